"""`make accept`: the quickstart and its two controls, judged by their bars; writes tests/reports/accept.md and accept.png.

The controls have the same length and the same warm start. With advantages shuffled inside each group, or with learning rate 0, every part
of the chain still runs, so that a reward that rises there would not be learning.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from harness_rl.metrics import mean, read_metrics
from harness_rl.threads import usable_cores

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "configs" / "quickstart.toml"
REPORTS = ROOT / "tests" / "reports"
RUNS: dict[str, list[str]] = {
    "learning": [],
    "shuffled advantages": ["rollout.shuffle_advantages=true"],
    "learning rate 0": ["learner.learning_rate=0.0"],
}
ORDER = ("learning", "shuffled advantages", "learning rate 0")
"""The likeliest to miss its bar first."""
ENDS = 3


@dataclass
class Finished:
    name: str
    rewards: list[float]
    evaluations: dict[str, dict[str, Any]]
    minutes: float
    lines: list[dict[str, Any]]

    @property
    def first(self) -> float:
        return mean(self.rewards[:ENDS])

    @property
    def last(self) -> float:
        return mean(self.rewards[-ENDS:])

    def evaluation(self, label: str) -> str:
        found = self.evaluations[label]
        return f"{found['reward']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"

    @property
    def gain(self) -> float:
        return self.evaluations["end"]["reward"] - self.evaluations["start"]["reward"]


def run(name: str, overrides: list[str], seed: int, folder: Path) -> Finished:
    """One `harness-rl train`, as a person would type it. Raises CalledProcessError."""
    slug = f"{name.replace(' ', '-')}-{seed}"
    shutil.rmtree(folder / slug, ignore_errors=True)
    settings = [f"run.dir={folder}", f"run.name={slug}", f"run.seed={seed}", *overrides]
    argv = [sys.executable, "-m", "harness_rl.cli", "train", str(CONFIG)]
    started = time.monotonic()
    subprocess.run([*argv, *(part for setting in settings for part in ("--set", setting))], check=True, cwd=ROOT)
    minutes = (time.monotonic() - started) / 60
    lines = read_metrics(folder / slug / "metrics.jsonl")
    with sqlite3.connect(folder / slug / "journal.sqlite") as journal:
        (found,) = journal.execute("SELECT value FROM meta WHERE key = 'evaluations'").fetchone()
    evaluations = {entry["label"]: entry for entry in json.loads(found)}
    return Finished(name, [line["reward"] for line in lines], evaluations, minutes, lines)


def judge(finished: list[Finished]) -> list[tuple[str, str, bool]]:
    """(bar, measured, met)."""
    learning, *controls = finished
    bars = [
        ("reward, first 3 steps, at most 0.6", f"{learning.first:.3f}", learning.first <= 0.6),
        ("reward, last 3 steps, at least 0.85", f"{learning.last:.3f}", learning.last >= 0.85),
        ("held-out reward rises by at least 0.2", f"{learning.gain:+.3f}", learning.gain >= 0.2),
        ("trains in under 30 minutes", f"{learning.minutes:.1f} min", learning.minutes < 30),
    ]
    for control in controls:
        bars.append(
            (
                f"{control.name}: last 3 within 0.1 of first 3",
                f"{control.last - control.first:+.3f}",
                abs(control.last - control.first) <= 0.1,
            )
        )
        bars.append((f"{control.name}: held-out within 0.1 of its start", f"{control.gain:+.3f}", abs(control.gain) <= 0.1))
    return bars


def write_report(finished: list[Finished], bars: list[tuple[str, str, bool]], seed: int) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    lines = [
        "# Acceptance of the quickstart",
        "",
        f"Commit `{commit}`, seed {seed}, {platform.machine()}, {len(usable_cores())} cores. Rewards are means over all scored rollouts of "
        "a step, before any filtering; evaluations are 20 held-out tasks × 4 samples at temperature 1, with 95 % Wilson intervals.",
        "",
        "| run | reward, first 3 steps | last 3 steps | held-out before | held-out after | minutes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {run.name} | {run.first:.3f} | {run.last:.3f} | {run.evaluation('start')} | {run.evaluation('end')} | {run.minutes:.1f} |"
        for run in finished
    ]
    lines += ["", "| bar | measured | met |", "| --- | --- | --- |"]
    lines += [f"| {bar} | {measured} | {'yes' if met else 'NO'} |" for bar, measured, met in bars]
    lines += ["", "Reward of every step:", ""]
    lines += [f"- {run.name}: {' '.join(f'{reward:.2f}' for reward in run.rewards)}" for run in finished]
    lines += ["", "![reward of the three runs](accept.png)", ""]
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / "accept.md").write_text("\n".join(lines))
    plot(finished, REPORTS / "accept.png")


def plot(finished: list[Finished], path: Path) -> None:
    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for run, colour in zip(finished, ("#1a7f5a", "#b0b0b0", "#d09a4a"), strict=True):
        axes.plot(range(1, len(run.rewards) + 1), run.rewards, label=run.name, color=colour, linewidth=2.2 if run is finished[0] else 1.4)
    axes.set(xlabel="optimizer step", ylabel="reward, all scored rollouts", ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "accept")
    options = parser.parse_args()
    done = {name: run(name, RUNS[name], options.seed, options.runs.resolve()) for name in ORDER}
    finished = [done[name] for name in RUNS]
    bars = judge(finished)
    write_report(finished, bars, options.seed)
    for bar, measured, met in bars:
        print(f"{'ok  ' if met else 'MISS'}  {bar}: {measured}")
    return 0 if all(met for _, _, met in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
