"""What the acceptance runs share: one run as a person would type it, and a plot of reward curves.

What a run came to is kept under tests/reports/kept, so that the hours may be spread over days and machines. It names its commit and has a
digest of what the run was made from: one made from another config or script is made anew, and never stands in a report.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from harness_rl.metrics import mean, read_metrics

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples" / "configs"
REPORTS = ROOT / "tests" / "reports"
KEPT = REPORTS / "kept"
ENDS = 3


@dataclass
class Finished:
    name: str
    seed: int
    commit: str
    minutes: float
    before: float
    """Minutes of what came before it: its warm start, next to nothing where that was cached."""
    rewards: list[float]
    evaluations: dict[str, dict[str, Any]]
    """By label: `start` and `end`, of a run that has them."""
    made_from: str
    """Digest of the config or script and of the settings."""

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


@dataclass(frozen=True)
class Run:
    """One command that trains into the run folder `place`."""

    name: str
    seed: int
    argv: Sequence[str]
    place: Path
    source: Path
    """The config or script that it is made from."""
    settings: Sequence[str]
    before: Sequence[str] = ()
    """A command that comes first and is timed apart."""

    @property
    def made_from(self) -> str:
        text = self.source.read_text()
        meant = tomllib.loads(text) if self.source.suffix == ".toml" else text  # a comment is no other config
        return hashlib.sha256(json.dumps([meant, *self.settings], sort_keys=True).encode()).hexdigest()[:16]

    @property
    def kept_at(self) -> Path:
        return KEPT / self.place.parent.name / f"{self.place.name}.json"

    def kept(self) -> Finished | None:
        """What it came to, if it has ended and was made from what it would be made from now."""
        if not self.kept_at.is_file():
            return None
        found = Finished(**json.loads(self.kept_at.read_text()))
        return found if found.made_from == self.made_from else None

    def make(self, again: bool = False) -> Finished:
        """What it came to; made only if it is not kept, or `again`. Raises CalledProcessError."""
        if not again and (found := self.kept()):
            return found
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.parent.mkdir(parents=True, exist_ok=True)
        commit, times = _commit(), []
        for argv in (self.before, self.argv):
            started = time.monotonic()
            if argv:
                subprocess.run(argv, check=True, cwd=ROOT)
            times.append(round((time.monotonic() - started) / 60, 1))
        shutil.rmtree(self.place / "checkpoints", ignore_errors=True)
        with sqlite3.connect(self.place / "journal.sqlite") as journal:
            row = journal.execute("SELECT value FROM meta WHERE key = 'evaluations'").fetchone()
        evaluations = {entry["label"]: entry for entry in json.loads(row[0] if row else "[]")}
        rewards = [line["reward"] for line in read_metrics(self.place / "metrics.jsonl")]
        made = Finished(self.name, self.seed, commit, times[1], times[0], rewards, evaluations, self.made_from)
        self.kept_at.parent.mkdir(parents=True, exist_ok=True)
        self.kept_at.write_text(json.dumps(asdict(made), indent=1) + "\n")
        return made


def training(config: Path, name: str, seed: int, settings: Sequence[str], place: Path) -> Run:
    """`harness-rl warmup` and `harness-rl train`, as `make quickstart` has them."""
    given = [f"run.dir={place.parent}", f"run.name={place.name}", f"run.seed={seed}", *settings]

    def command(name: str) -> list[str]:
        return [sys.executable, "-m", "harness_rl.cli", name, str(config), *(part for setting in given for part in ("--set", setting))]

    return Run(name, seed, command("train"), place, config, settings, command("warmup"))


def report_lines(title: str, finished: Sequence[Finished], bars: Sequence[tuple[str, str, bool]], setting: str) -> list[str]:
    """A report in Markdown: the runs, the bars with (what, measured, met), and every reward."""
    lines = [f"# {title}", "", setting, ""]
    lines += [
        "| run | seed | reward, first 3 steps | last 3 steps | held-out before | held-out after | minutes | warm start before | commit |"
    ]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    lines += [
        f"| {run.name} | {run.seed} | {run.first:.3f} | {run.last:.3f} | {run.evaluation('start')} | {run.evaluation('end')} "
        f"| {run.minutes:.1f} | {run.before:.1f} | `{run.commit[:8]}` |"
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
        if not (seeds := [run.rewards for run in finished if run.name == name]):
            continue
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
