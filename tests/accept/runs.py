"""What the acceptance runs share: one run as a person would type it, kept once it has ended, and a plot of reward curves."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from harness_rl.metrics import mean, read_metrics

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples" / "configs"
REPORTS = ROOT / "tests" / "reports"
ENDS = 3
MARKER = "accept.json"


@dataclass
class Finished:
    name: str
    seed: int
    commit: str
    minutes: float
    rewards: list[float]
    evaluations: dict[str, dict[str, Any]]
    """By label: `start` and `end`, of a run that has them."""

    @property
    def first(self) -> float:
        return mean(self.rewards[:ENDS])

    @property
    def last(self) -> float:
        return mean(self.rewards[-ENDS:])

    def evaluation(self, label: str) -> str:
        found = self.evaluations.get(label)
        if found is None:
            return "-"
        return f"{found['reward']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"

    @property
    def gain(self) -> float:
        return self.evaluations["end"]["reward"] - self.evaluations["start"]["reward"]


def run(config: Path, name: str, seed: int, settings: Sequence[str], place: Path, again: bool) -> Finished:
    """One `harness-rl train` with its warm start. See `command`."""
    settings = [f"run.dir={place.parent}", f"run.name={place.name}", f"run.seed={seed}", *settings]
    argv = [sys.executable, "-m", "harness_rl.cli", "train", str(config)]
    return command([*argv, *(part for setting in settings for part in ("--set", setting))], name, seed, place, again)


def command(argv: Sequence[str], name: str, seed: int, place: Path, again: bool) -> Finished:
    """What trains into the run folder `place`; a run that has ended is only read. Raises CalledProcessError."""
    marker = place / MARKER
    if again or not marker.is_file():
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        subprocess.run(argv, check=True, cwd=ROOT)
        marker.write_text(json.dumps({"commit": _commit(), "minutes": (time.monotonic() - started) / 60}))
        shutil.rmtree(place / "checkpoints", ignore_errors=True)
    kept = json.loads(marker.read_text())
    with sqlite3.connect(place / "journal.sqlite") as journal:
        found = journal.execute("SELECT value FROM meta WHERE key = 'evaluations'").fetchone()
    evaluations = {entry["label"]: entry for entry in json.loads(found[0] if found else "[]")}
    rewards = [line["reward"] for line in read_metrics(place / "metrics.jsonl")]
    return Finished(name, seed, kept["commit"], kept["minutes"], rewards, evaluations)


def report_lines(title: str, finished: Sequence[Finished], bars: Sequence[tuple[str, str, bool]], setting: str) -> list[str]:
    """A report in Markdown: the runs, the bars with (what, measured, met), and every reward."""
    lines = [f"# {title}", "", setting, ""]
    lines += ["| run | seed | reward, first 3 steps | last 3 steps | held-out before | held-out after | minutes | commit |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    lines += [
        f"| {run.name} | {run.seed} | {run.first:.3f} | {run.last:.3f} | {run.evaluation('start')} | {run.evaluation('end')} "
        f"| {run.minutes:.1f} | `{run.commit[:8]}` |"
        for run in finished
    ]
    lines += ["", "| bar | measured | met |", "| --- | --- | --- |"]
    lines += [f"| {bar} | {measured} | {'yes' if met else 'NO'} |" for bar, measured, met in bars]
    lines += ["", "Reward of every step:", ""]
    return [*lines, *(f"- {run.name}, seed {run.seed}: {' '.join(f'{reward:.2f}' for reward in run.rewards)}" for run in finished)]


def plot(finished: Sequence[Finished], colours: Mapping[str, str], path: Path, top: float | None = 1.02) -> None:
    """A thin line for each seed, a thick one for their mean."""
    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, colour in colours.items():
        seeds = [run.rewards for run in finished if run.name == name]
        for rewards in seeds:
            axes.plot(range(1, len(rewards) + 1), rewards, color=colour, linewidth=0.8, alpha=0.6)
        means = [mean(list(step)) for step in zip(*seeds, strict=False)]
        label = f"{name} ({len(seeds)} seed{'s' if len(seeds) > 1 else ''})"
        axes.plot(range(1, len(means) + 1), means, label=label, color=colour, linewidth=2.2)
    axes.set(xlabel="optimizer step", ylabel="reward, all scored rollouts", ylim=(0, top))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
