"""`make accept`: the quickstart and its two controls over three seeds, judged by their bars; writes tests/reports/accept.md and accept.png.

The controls have the same length and the same warm start. With advantages shuffled inside each group, or with learning rate 0, every part
of the chain still runs, so that a reward that rises there would not be learning. A run that has ended is kept (`--again` makes it anew), so
that the hours may be spread; the report names the commit of each.
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
LEARNING = "learning"
RUNS: dict[str, list[str]] = {
    LEARNING: [],
    "shuffled advantages": ["rollout.shuffle_advantages=true"],
    "learning rate 0": ["learner.learning_rate=0.0"],
}
SEEDS = (0, 1, 2)
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


def run(name: str, seed: int, folder: Path, again: bool) -> Finished:
    """One `harness-rl train`, as a person would type it. Raises CalledProcessError."""
    place = folder / f"{name.replace(' ', '-')}-{seed}"
    marker = place / MARKER
    if again or not marker.is_file():
        shutil.rmtree(place, ignore_errors=True)
        settings = [f"run.dir={folder}", f"run.name={place.name}", f"run.seed={seed}", *RUNS[name]]
        argv = [sys.executable, "-m", "harness_rl.cli", "train", str(CONFIG)]
        started = time.monotonic()
        subprocess.run([*argv, *(part for setting in settings for part in ("--set", setting))], check=True, cwd=ROOT)
        marker.write_text(json.dumps({"commit": _commit(), "minutes": (time.monotonic() - started) / 60}))
        shutil.rmtree(place / "checkpoints", ignore_errors=True)
    kept = json.loads(marker.read_text())
    with sqlite3.connect(place / "journal.sqlite") as journal:
        (found,) = journal.execute("SELECT value FROM meta WHERE key = 'evaluations'").fetchone()
    evaluations = {entry["label"]: entry for entry in json.loads(found)}
    rewards = [line["reward"] for line in read_metrics(place / "metrics.jsonl")]
    return Finished(name, seed, kept["commit"], kept["minutes"], rewards, evaluations)


def judge(finished: list[Finished]) -> list[tuple[str, str, bool]]:
    """(bar, measured, met) of every run."""
    bars = []
    for run in finished:
        what = f"seed {run.seed}, {run.name}"
        if run.name == LEARNING:
            bars += [
                (f"{what}: reward, first 3 steps, at most 0.6", f"{run.first:.3f}", run.first <= 0.6),
                (f"{what}: reward, last 3 steps, at least 0.85", f"{run.last:.3f}", run.last >= 0.85),
                (f"{what}: held-out reward rises by at least 0.2", f"{run.gain:+.3f}", run.gain >= 0.2),
                (f"{what}: trains in under 30 minutes", f"{run.minutes:.1f} min", run.minutes < 30),
            ]
        else:
            moved = run.last - run.first
            bars.append((f"{what}: last 3 within 0.1 of first 3", f"{moved:+.3f}", abs(moved) <= 0.1))
            bars.append((f"{what}: held-out within 0.1 of its start", f"{run.gain:+.3f}", abs(run.gain) <= 0.1))
    return bars


def write_report(finished: list[Finished], bars: list[tuple[str, str, bool]]) -> None:
    lines = [
        "# Acceptance of the quickstart",
        "",
        f"{platform.machine()}, {len(usable_cores())} cores. Rewards are means over all scored rollouts of a step, before any filtering; "
        "evaluations are 20 held-out tasks × 4 samples at temperature 1, with 95 % Wilson intervals.",
        "",
        "| run | seed | reward, first 3 steps | last 3 steps | held-out before | held-out after | minutes | commit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {run.name} | {run.seed} | {run.first:.3f} | {run.last:.3f} | {run.evaluation('start')} | {run.evaluation('end')} "
        f"| {run.minutes:.1f} | `{run.commit[:8]}` |"
        for run in finished
    ]
    lines += ["", "| bar | measured | met |", "| --- | --- | --- |"]
    lines += [f"| {bar} | {measured} | {'yes' if met else 'NO'} |" for bar, measured, met in bars]
    lines += ["", "Reward of every step:", ""]
    lines += [f"- {run.name}, seed {run.seed}: {' '.join(f'{reward:.2f}' for reward in run.rewards)}" for run in finished]
    lines += ["", "![reward of the runs](accept.png)", ""]
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / "accept.md").write_text("\n".join(lines))
    plot(finished, REPORTS / "accept.png")


def plot(finished: list[Finished], path: Path) -> None:
    """A thin line for each seed, a thick one for their mean."""
    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, colour in zip(RUNS, ("#1a7f5a", "#b0b0b0", "#d09a4a"), strict=True):
        seeds = [run.rewards for run in finished if run.name == name]
        for rewards in seeds:
            axes.plot(range(1, len(rewards) + 1), rewards, color=colour, linewidth=0.8, alpha=0.6)
        means = [mean(list(step)) for step in zip(*seeds, strict=False)]
        label = f"{name} ({len(seeds)} seed{'s' if len(seeds) > 1 else ''})"
        axes.plot(range(1, len(means) + 1), means, label=label, color=colour, linewidth=2.2)
    axes.set(xlabel="optimizer step", ylabel="reward, all scored rollouts", ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, action="append", help=f"may be repeated (default: {' '.join(map(str, SEEDS))})")
    parser.add_argument("--run", choices=RUNS, action="append", help="may be repeated (default: all)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "accept", help="where the runs are kept")
    parser.add_argument("--again", action="store_true", help="make runs anew that have ended")
    options = parser.parse_args()
    folder = options.runs.resolve()
    seeds = options.seed or SEEDS
    for name in options.run or RUNS:  # the likeliest to miss its bar first
        for seed in seeds:
            run(name, seed, folder, options.again)
    done = [
        (name, seed)
        for name in RUNS
        for seed in sorted({*SEEDS, *seeds})
        if (folder / f"{name.replace(' ', '-')}-{seed}" / MARKER).is_file()
    ]
    finished = [run(name, seed, folder, False) for name, seed in done]
    bars = judge(finished)
    write_report(finished, bars)
    for bar, measured, met in bars:
        print(f"{'ok  ' if met else 'MISS'}  {bar}: {measured}")
    return 0 if all(met for _, _, met in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
