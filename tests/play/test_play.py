"""`harness-rl play`: rule 13's advice to try an environment and its rewards before training, by hand and by script."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from harness_rl.cli import main
from harness_rl.errors import UserError
from harness_rl.sessions.byhand import Person, read_line
from harness_rl.sessions.toolschema import tool_schema

ROOT = Path(__file__).resolve().parents[2]
CATCH = f"{ROOT}/examples/envs/catch.py"


@pytest.fixture
def games(tmp_path: Path) -> Path:
    """A user's own file."""
    file = tmp_path / "games.py"
    file.write_text(
        textwrap.dedent('''
        class Guess:
            """Between 1 and 9."""

            def reset(self, secret=5, **columns):
                if secret > 9:
                    raise OSError("no such game")
                self.secret, self.tries = secret, 0
                return "Guess a number."

            def guess(self, number: int) -> str:
                """Guess.

                Args:
                    number: From 1 to 9.
                """
                if not isinstance(number, int):
                    raise ValueError("a whole number, please")
                self.tries += 1
                self.number = number
                return "right" if number == self.secret else "higher" if number < self.secret else "lower"

        def made():
            return Guess

        def near(environments, **columns):
            game = environments[0]
            return [1.0 if game.number == game.secret else 0.25 if game.tries else None] if game.tries else [None]

        def quick(environments, **columns):
            return [0.5 / max(1, environments[0].tries)]

        def bisect(messages, tools):
            if messages[-1]["content"] == "right":
                return "Found."
            low, high = 1, 9
            for call, result in zip(messages[1::2], messages[2::2]):
                import json
                number = json.loads(call["tool_calls"][0]["function"]["arguments"])["number"]
                low, high = (number + 1, high) if result["content"] == "higher" else (low, number - 1)
            return {"name": "guess", "arguments": {"number": (low + high) // 2}}

        async def give_up(messages, tools):
            return None

        def nonsense(messages, tools):
            return 7
    ''')
    )
    return file


def played(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = main(["play", *arguments])
    return code, capsys.readouterr().out.strip().splitlines()


def test_rule_13_a_policy_that_plays_well_is_told_from_one_that_does_not(capsys, games: Path):
    rewards = ["--reward", f"{games}:near", "--reward", f"{games}:quick"]
    code, lines = played(capsys, f"{games}:Guess", *rewards, "--policy", f"{games}:bisect", "--columns", '{"secret": 7}')
    assert (code, lines) == (0, ["episode 0: reward 1.250 (near 1.000, quick 0.250), 2 calls, 0 of them failed"])
    code, lines = played(capsys, f"{games}:made", *rewards, "--policy", f"{games}:give_up")
    assert (code, lines) == (0, ["episode 0: reward 0.500 (quick 0.500), 0 calls, 0 of them failed"])


def test_rewards_are_weighed_as_in_training(capsys, games: Path):
    rewards = ["--reward", f"{games}:near", "--reward", f"{games}:quick", "--columns", '{"secret": 5}']
    wins = ["--policy", f"{games}:bisect", "--json"]
    near, quick = 1.0, 0.5
    for weights, wanted in (((), near + quick), (("--reward-weights", "1", "0.2"), near + 0.2 * quick)):
        _, lines = played(capsys, f"{games}:Guess", *rewards, *wins, *weights)
        assert json.loads(lines[0])["reward"] == pytest.approx(wanted)
    assert main(["play", f"{games}:Guess", *rewards, *wins, "--reward-weights", "1"]) == 2
    assert "reward_weights: 1 weights for 2 reward functions" in capsys.readouterr().err


def test_many_episodes_have_a_mean_an_interval_and_what_could_not_be_scored(capsys, games: Path):
    rows = ["--columns", '{"secret": 5}', "--columns", '{"secret": 99}', "--columns", '{"secret": 1}']
    code, lines = played(
        capsys, f"{games}:Guess", "--reward", f"{games}:near", "--policy", f"{games}:bisect", *rows, "--episodes", "6", "--json"
    )
    episodes, total = [json.loads(line) for line in lines[:6]], json.loads(lines[6])
    assert [episode["reward"] for episode in episodes] == [1.0, None, 1.0] * 2
    assert [episode["calls"] for episode in episodes] == [1, 0, 3] * 2
    assert episodes[1]["cause"] == "environment" and "Guess.reset raised: OSError: no such game" in episodes[1]["failure"]
    assert [message["role"] for message in episodes[0]["messages"]] == ["user", "assistant", "tool", "assistant"]
    # Wilson's interval of 4 of 4: 1 / (1 + 1.96² / 4)
    assert (total["reward"], total["unscored"]) == (1.0, {"environment": 2}) and total["low"] == pytest.approx(0.510, abs=1e-3)
    code, lines = played(capsys, f"{games}:Guess", "--reward", f"{games}:near", "--policy", f"{games}:give_up", "--episodes", "2")
    assert (code, lines[-1]) == (1, "reward nan [0.000, 1.000] over 0 episodes, 2 unscored (reward_none 2)")


def test_a_demonstration_is_tried_before_it_is_learned(capsys):
    rows = [word for row in ({"ball": 3, "paddle": 1}, {"ball": 2, "paddle": 2}) for word in ("--columns", json.dumps(row))]
    code, lines = played(capsys, f"{CATCH}:CatchEnv", "--turns", f"{CATCH}:demonstration", *rows, "--episodes", "4")
    assert (code, lines[-1]) == (0, "reward 1.000 [0.510, 1.000] over 4 episodes")


def test_max_calls_ends_it_as_it_does_in_training(capsys, games: Path):
    arguments = [f"{games}:Guess", "--reward", f"{games}:near", "--policy", f"{games}:bisect", "--columns", '{"secret": 9}']
    assert played(capsys, *arguments, "--max-calls", "2")[1] == [
        "episode 0: reward 0.250 (near 0.250), 1 calls, 0 of them failed"
    ]  # the calls of the last answer are not executed


def test_a_person_plays_line_by_line():
    lines = "move sideways\njump\nmove right\n\n"
    words = [sys.executable, "-m", "harness_rl.cli", "play", f"{CATCH}:CatchEnv", "--columns", '{"ball": 3, "paddle": 1}']
    ended = subprocess.run(words, input=lines + "move right\nsay Done.\n", capture_output=True, text=True, cwd=ROOT, timeout=120)
    shown = ended.stdout
    assert ended.returncode == 0, ended.stderr
    assert "move(direction): Move one column." in shown and "direction: Where to. (left, stay, right)" in shown
    assert "[user] ball 3 you 1" in shown
    assert "[tool] {'error': 'Move left, stay, right.'}" in shown
    assert "there is no tool jump: move" in shown
    assert "[tool] ball 3 you 2" in shown
    assert shown.strip().splitlines()[-1] == "episode 0: reward 0.000 (CatchEnv 0.000), 2 calls, 1 of them failed"  # an empty line ended it


async def test_the_end_of_the_input_ends_the_episode():
    def nothing() -> str:
        raise EOFError

    said: list[str] = []
    answer = await Person(said.append, nothing).ask([{"role": "user", "content": "Play."}], [])
    assert (answer.message, answer.finish_reason) == ({"role": "assistant", "content": ""}, "stop")


def two(a: int, b: str = "x", deep: bool = False) -> str:
    """Two and a half.

    Args:
        a: One.
        b: Two.
        deep: Half.
    """
    return ""


def one(text: str) -> str:
    """One.

    Args:
        text: All.
    """
    return ""


@pytest.mark.parametrize(
    ("line", "turn"),
    [
        ("", ""),
        ("say All done.", "All done."),
        ("two 3 4 true", {"name": "two", "arguments": {"a": 3, "b": "4", "deep": True}}),
        ("two three", {"name": "two", "arguments": {"a": "three"}}),
        ("two", {"name": "two", "arguments": {}}),
        ('two {"a": 1, "c": [2]}', {"name": "two", "arguments": {"a": 1, "c": [2]}}),
        ('two 1 "a b"', {"name": "two", "arguments": {"a": 1, "b": "a b"}}),
        ("one what is left of it", {"name": "one", "arguments": {"text": "what is left of it"}}),
        ("one [crane]", {"name": "one", "arguments": {"text": "[crane]"}}),
    ],
)
def test_a_line_is_a_call_or_an_answer(line: str, turn: Any):
    assert read_line(line, [tool_schema(two), tool_schema(one)]) == turn


@pytest.mark.parametrize(
    ("line", "words"),
    [("three 1", "there is no tool three: two"), ("two 1 2 3 4", "two takes 3 values"), ("two {1}", "not JSON"), ('two "a', "No closing")],
)
def test_a_line_that_is_neither_is_said(line: str, words: str):
    with pytest.raises(UserError, match=words):
        read_line(line, [tool_schema(two)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{games}:Guess"], "play: no reward: name --reward FILE.py:NAME"),
        (["{games}:Nothing"], "has no function or class Nothing"),
        (["{games}:Guess", "--reward", "{games}:near", "--columns", "{{"], "--columns {{: not JSON"),
        (["{games}:Guess", "--reward", "{games}:near", "--columns", "[1]"], "write an object"),
        (["{games}:Guess", "--reward", "{games}:near", "--json"], "--json is for scripts"),
        (["{games}:Guess", "--reward", "{games}:near", "--episodes", "0"], "play one or more"),
        (
            ["{games}:Guess", "--reward", "{games}:near", "--policy", "{games}:nonsense"],
            "the policy answered 7; answer a text, None, or calls",
        ),
        (["{games}:Guess", "--reward", "{games}:near", "--policy", "{games}:near"], "the policy raised TypeError: near() takes 1"),
        (["{root}/openenv_catch.py:environment", "--reward", "{games}:near"], "asks for the url of a server; name --serve"),
    ],
)
def test_what_cannot_be_played_is_said_in_one_line(capsys, monkeypatch, games: Path, arguments: list[str], words: str):
    if "openenv" in arguments[0]:
        pytest.importorskip("openenv")
    words = words.replace("{{", "{")
    code = main(["play", *(argument.format(games=games, root=ROOT / "examples") for argument in arguments)])
    shown = capsys.readouterr().err.strip()
    assert code == 2 and words in shown and "\n" not in shown
