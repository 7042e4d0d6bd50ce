"""`make accept`: the quickstart and its two controls over three seeds, judged by their bars; writes tests/reports/accept.md and accept.png.

The controls have the same length and the same warm start. With advantages shuffled inside each group, or with learning rate 0, every part
of the chain still runs, so that a reward that rises there would not be learning.
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

from runs import CONFIGS, REPORTS, ROOT, Finished, Run, plot, report_lines, training

from harness_rl.threads import usable_cores

CONFIG = CONFIGS / "quickstart.toml"
LEARNING = "learning"
RUNS: dict[str, list[str]] = {
    LEARNING: [],
    "shuffled advantages": ["rollout.shuffle_advantages=true"],
    "learning rate 0": ["learner.learning_rate=0.0"],
}
COLOURS = dict(zip(RUNS, ("#1a7f5a", "#b0b0b0", "#d09a4a"), strict=True))
SEEDS = (0, 1, 2)


def judge(finished: list[Finished]) -> list[tuple[str, str, bool]]:
    """(bar, measured, met) of every run."""
    bars = []
    for one in finished:
        what = f"seed {one.seed}, {one.name}"
        if one.name == LEARNING:
            bars += [
                (f"{what}: reward, first 3 steps, at most 0.6", f"{one.first:.3f}", one.first <= 0.6),
                (f"{what}: reward, last 3 steps, at least 0.85", f"{one.last:.3f}", one.last >= 0.85),
                (f"{what}: held-out reward rises by at least 0.2", f"{one.gain:+.3f}", one.gain >= 0.2),
                (f"{what}: trains in under 30 minutes", f"{one.minutes:.1f} min", one.minutes < 30),
            ]
        else:
            moved = one.last - one.first
            bars.append((f"{what}: last 3 within 0.1 of first 3", f"{moved:+.3f}", abs(moved) <= 0.1))
            bars.append((f"{what}: held-out within 0.1 of its start", f"{one.gain:+.3f}", abs(one.gain) <= 0.1))
    return bars


def write_report(finished: list[Finished], bars: list[tuple[str, str, bool]]) -> None:
    setting = (
        f"{platform.machine()}, {len(usable_cores())} cores. Rewards are means over all scored rollouts of a step, before any filtering; "
        "evaluations are 20 held-out tasks × 4 samples at temperature 1, with 95 % Wilson intervals."
    )
    lines = report_lines("Acceptance of the quickstart", finished, bars, setting)
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / "accept.md").write_text("\n".join([*lines, "", "![reward of the runs](accept.png)", ""]))
    plot(finished, COLOURS, REPORTS / "accept.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, action="append", help=f"may be repeated (default: {' '.join(map(str, SEEDS))})")
    parser.add_argument("--run", choices=RUNS, action="append", help="may be repeated (default: all)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "accept", help="the run folders")
    parser.add_argument("--again", action="store_true", help="make runs anew that are kept")
    options = parser.parse_args()
    folder = options.runs.resolve()
    seeds = options.seed or SEEDS

    def one(name: str, seed: int) -> Run:
        return training(CONFIG, name, seed, RUNS[name], folder / f"{name.replace(' ', '-')}-{seed}")

    for name in options.run or RUNS:  # the likeliest to miss its bar first
        for seed in seeds:
            one(name, seed).make(options.again)
    finished = [found for name in RUNS for seed in sorted({*SEEDS, *seeds}) if (found := one(name, seed).kept())]
    bars = judge(finished)
    write_report(finished, bars)
    for bar, measured, met in bars:
        print(f"{'ok  ' if met else 'MISS'}  {bar}: {measured}")
    return 0 if all(met for _, _, met in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
