"""`make accept-games`: are echo, catch and Wordle learned on two cores, each by its example's script on a real OpenEnv server? Writes
tests/reports/games.md and a picture of each game."""

from __future__ import annotations

import argparse
import math
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path

from runs import REPORTS, ROOT, Finished, Run, plot, report_lines

from harness_rl.threads import usable_cores

PYTHON = ROOT / ".venv-openenv" / "bin" / "python"
LEARNING, CONTROL = "learning", "shuffled advantages"
COLOURS = {LEARNING: "#1a7f5a", CONTROL: "#b0b0b0"}
Bar = tuple[str, str, bool]
"""What, measured, met."""


@dataclass(frozen=True)
class Game:
    script: str
    flags: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    controls: tuple[int, ...] = (0,)
    highest: float | None = 1.02
    """Reward at the top of the picture."""
    paired: bool = False
    """Judged by the games that are won before and after, and not by the reward of training."""
    notes: str = field(default="", kw_only=True)


PAIRED = 120
GAMES = {
    "echo": Game(
        "openenv_echo.py", highest=None, notes="The reward is a tenth of the length of what was sent: above 1 for the whole text."
    ),
    "catch": Game("openenv_catch.py", notes="OpenSpiel's catch with 4 rows and 3 columns; 1 for a catch."),
    "wordle": Game(
        "openenv_wordle.py",
        ("--held-out", str(PAIRED), "--max-steps", "14"),
        seeds=(0,),
        controls=(),
        highest=1.52,
        paired=True,
        notes="TextArena's Wordle with 16 secret words: won 1, letters up to 0.3, valid guesses up to 0.2.",
    ),
}


def wins(found: Finished, label: str) -> dict[str, bool]:
    """Whether each held-out game was won: what a lost one is paid stays below 0.5, a won one is paid more than 1."""
    return {name: reward >= 1.0 for name, reward in found.evaluations[label]["by_task"].items()}


def sign_test(gained: int, lost: int) -> float:
    """One-sided p-value of so many pairs that got better or worse, if both were as likely (McNemar's exact test)."""
    pairs = gained + lost
    return sum(math.comb(pairs, more) for more in range(gained, pairs + 1)) / 2**pairs


def judge(game: Game, found: Finished) -> list[Bar]:
    rise, what = found.last - found.first, f"seed {found.seed}, {found.name}"
    if found.name == CONTROL:
        return [(f"{what}: last 3 steps within 0.1 of the first 3", f"{rise:+.3f}", abs(rise) <= 0.1)]
    if not game.paired:
        return [
            (f"{what}: reward of all scored games, last 3 steps against first 3, rises by at least 0.3", f"{rise:+.3f}", rise >= 0.3),
            (f"{what}: in under 10 minutes, warm start and all", f"{found.minutes:.1f} min", found.minutes < 10),
        ]
    before, after = wins(found, "start"), wins(found, "end")
    both = before.keys() & after.keys()
    gained, lost = sum(after[name] > before[name] for name in both), sum(after[name] < before[name] for name in both)
    rise = (gained - lost) / len(both)
    measured = (
        f"{sum(before[name] for name in both)} to {sum(after[name] for name in both)} of {len(both)} ({rise:+.3f}; {gained} gained, "
        f"{lost} lost, p = {sign_test(gained, lost):.2g})"
    )
    return [
        (f"{what}: at least 100 paired games", str(len(both)), len(both) >= 100),
        (f"{what}: the share of games won rises by at least 0.1 over the warm start", measured, rise >= 0.1),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--game", choices=GAMES, action="append", help="may be repeated (default: all)")
    parser.add_argument("--seed", type=int, action="append", help="may be repeated (default: those of the game)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "games", help="the run folders")
    parser.add_argument("--again", action="store_true", help="make runs anew that are kept")
    options = parser.parse_args()
    folder = options.runs.resolve()
    setting = f"{platform.machine()}, {len(usable_cores())} cores. Rewards are means over all scored games of a step, before any filtering."
    lines, met = ["# Are the OpenEnv games learned", "", setting], True
    for name, game in GAMES.items():
        finished, asked = [], options.game is None or name in options.game
        for kind, seeds in ((LEARNING, game.seeds), (CONTROL, game.controls)):
            for seed in seeds:
                place = folder / f"{name}-{kind.split()[0]}-{seed}"
                settings = ["--cpu", "--seed", str(seed), *game.flags, *["--control"] * (kind == CONTROL)]
                script = ROOT / "examples" / game.script
                one = Run(kind, seed, [str(PYTHON), str(script), *settings, "--output-dir", str(place)], place, script, settings)
                make = asked and (options.seed is None or seed in options.seed)
                if found := one.make(options.again) if make else one.kept():
                    finished.append(found)
        if not finished:
            continue
        bars = [bar for found in finished for bar in judge(game, found)]
        about = f"`examples/{game.script} {' '.join(('--cpu', *game.flags))}`. {game.notes}"
        lines += ["", *(line if not line.startswith("# ") else f"#{line}" for line in report_lines(name, finished, bars, about))]
        lines += ["", f"![reward of the runs](games_{name}.png)"]
        plot(finished, COLOURS, REPORTS / f"games_{name}.png", game.highest)
        for bar, measured, passed in bars:
            print(f"{'ok  ' if passed else 'MISS'}  {name}: {bar}: {measured}")
            met = met and passed
    (REPORTS / "games.md").write_text("\n".join([*lines, ""]))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
