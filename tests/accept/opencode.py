"""`make accept-opencode`: stock opencode learns the quickstart's tasks; judged by its bar, writes tests/reports/opencode.md and .png."""

from __future__ import annotations

import argparse
import platform
import sys

from runs import CONFIGS, REPORTS, ROOT, plot, report_lines, training

from harness_rl.threads import usable_cores

NAME = "opencode"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="make the run anew if it is kept")
    options = parser.parse_args()
    place = ROOT / "runs" / "accept" / f"{NAME}-{options.seed}"
    done = training(CONFIGS / "opencode.toml", NAME, options.seed, [], place).make(options.again)
    rise = done.last - done.first
    bars = [
        ("at least 10 steps", str(len(done.rewards)), len(done.rewards) >= 10),
        ("reward over all scored rollouts, last 3 steps against first 3, rises by at least 0.15", f"{rise:+.3f}", rise >= 0.15),
    ]
    setting = (
        f"{platform.machine()}, {len(usable_cores())} cores; examples/configs/opencode.toml. Rewards are means over all scored rollouts "
        "of a step, before any filtering; evaluations are 20 held-out tasks × 2 samples at temperature 1, with 95 % Wilson intervals."
    )
    lines = report_lines("opencode learns", [done], bars, setting)
    (REPORTS / "opencode.md").write_text("\n".join([*lines, "", "![reward of the run](opencode.png)", ""]))
    plot([done], {NAME: "#1a7f5a"}, REPORTS / "opencode.png")
    for bar, measured, met in bars:
        print(f"{'ok  ' if met else 'MISS'}  {bar}: {measured}")
    return 0 if all(met for _, _, met in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
