"""`harness-rl play` on an OpenEnv server of its own, as the docs show it."""

from __future__ import annotations

from pathlib import Path

from harness_rl.cli import main

WORDLE = f"{Path(__file__).resolve().parents[2]}/examples/openenv_wordle.py"


def test_rule_13_a_solvers_games_are_scored_before_training(capsys, server: str):
    words = ["play", f"{WORDLE}:environment", "--url", f"{server}/wordle", "--turns", f"{WORDLE}:solver_game", "--episodes", "2"]
    rewards = [word for name in ("won", "letters", "valid") for word in ("--reward", f"{WORDLE}:reward_{name}")]
    assert main([*words, *rewards, "--columns", '{"seed": 3}', "--columns", '{"seed": 4}']) == 0
    *episodes, total = capsys.readouterr().out.strip().splitlines()
    assert all("reward 3.000 (reward_won 1.000, reward_letters 1.000, reward_valid 1.000)" in line for line in episodes)
    assert total == "reward 3.000 [3.000, 3.000] over 2 episodes"
