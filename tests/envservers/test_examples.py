"""The OpenEnv examples: their servers, environments and solvers play whole games over WebSockets through the real loop and proxy."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace
from typing import Any

import openenv_catch
import openenv_echo
import openenv_multi_env
import openenv_sudoku
import openenv_wordle
import pytest
import train_browsergym
from environments.bench import Bench, call
from envs import options as flags
from envs.textarena_env.words import SECRETS
from envs.wordle import best_guess, consistent, marks, read_marks
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_rl import GRPOTrainer


def prepared(bench: Bench, trainer: GRPOTrainer) -> Any:
    """The example's own factory, in front of the test's proxy and engine."""
    bench.configure(max_calls=100)
    trainer.factory.bind(bench.services())
    return trainer.factory


def small(module: Any, tmp_path: Any, *arguments: str) -> argparse.Namespace:
    return module.parse(["--dataset-size", "3", "--output-dir", str(tmp_path / "run"), "--model", "m", *arguments])


async def test_echo_is_paid_by_length(bench: Bench, server: str, tmp_path):
    factory = prepared(bench, openenv_echo.trainer(small(openenv_echo, tmp_path), f"{server}/echo"))
    bench.engine.say(call("echo", message="Hello World"))
    session = await bench.play(factory)
    assert session.verify().env_reward == pytest.approx(1.1)
    assert "Hello World" in bench.prompts()[1]
    await factory.close()


@pytest.mark.parametrize(
    ("module", "path", "reward"),
    [
        (openenv_catch, "openspiel", 1.0),
        (openenv_wordle, "wordle", sum(openenv_wordle.WEIGHTS)),
        (openenv_sudoku, "sudoku", 2.0),
    ],
)
async def test_a_solvers_game_has_the_full_reward(bench: Bench, server: str, tmp_path, module, path: str, reward: float):
    factory = prepared(bench, module.trainer(small(module, tmp_path), f"{server}/{path}"))
    for row in factory.prompt_rows():
        session = await bench.play(factory, row, script=factory.demonstration(row))
        assert session.verify().env_reward == pytest.approx(reward), session.outcome().completion[-3:]
        assert session.outcome().tool_failure_count == 0
    await factory.close()


async def test_rule_16_each_game_is_scored_and_logged_by_its_own_function(bench: Bench, server: str, tmp_path):
    options = small(openenv_multi_env, tmp_path)
    factory = prepared(bench, openenv_multi_env.trainer(options, f"{server}/wordle", f"{server}/openspiel"))
    wanted = {"wordle": ({"rewards/wordle_reward": 1.3}, ["guess"]), "catch": ({"rewards/catch_reward": 1.0}, ["move", "stay"])}
    for row in factory.prompt_rows()[:4]:
        session = await bench.play(factory, row, script=factory.demonstration(row))
        parts, tools = wanted[row["environment"]]
        found = {name: value for name, value in session.outcome().metrics.items() if name.startswith("rewards/")}
        assert found == {name: pytest.approx(value) for name, value in parts.items()}
        assert {tool["function"]["name"] for tool in bench.engine.bodies("/render")[-1]["tools"]} == set(tools)
    await factory.close()


def test_catch_is_missed_from_too_far_and_never_paid_unfinished(server: str):
    game = openenv_catch.environment(f"{server}/openspiel")()
    seed = next(seed for seed in range(50) if game.reset(seed=seed).endswith("2 to the left"))
    again = openenv_catch.environment(f"{server}/openspiel")()
    assert again.reset(seed=seed) == game.reset(seed=seed)  # all games of a group begin alike
    for _ in range(openenv_catch.ROWS - 1):
        assert openenv_catch.reward_catch([game]) == [0.0] and not game.done
        last = game.stay()
    assert (last, game.done, openenv_catch.reward_catch([game])) == ("Missed.", True, [0.0])
    with pytest.raises(ValueError, match="The game is over"):
        game.move("left")


def test_wordle_tells_only_what_is_new_and_rewards_what_was_reached(server: str):
    game = openenv_wordle.environment(f"{server}/wordle")()
    first = game.reset(seed=5)
    secret = next(word for word in SECRETS if game_secret(game, word))
    wrong = [word for word in SECRETS if word != secret][:2]
    answers = [game.guess(f"[{word}]") for word in wrong]
    assert all(first not in answer for answer in answers) and answers[0] not in answers[1]
    expected = max(share(marks(word, secret)) for word in wrong)
    assert (openenv_wordle.reward_letters([game]), openenv_wordle.reward_valid([game])) == ([pytest.approx(expected)], [1.0])
    assert "invalid move" in game.guess("[xx]")
    assert openenv_wordle.reward_valid([game]) == [pytest.approx(2 / 3)]
    game.guess(f"[{secret}]")
    assert [openenv_wordle.reward_won([game]), openenv_wordle.reward_letters([game])] == [[1.0], [1.0]]
    with pytest.raises(ValueError, match="Game over"):
        game.guess("[crane]")
    game.reset(seed=5)
    assert (game.won, game.letters, openenv_wordle.reward_valid([game])) == (False, 0.0, [0.0])


def game_secret(game: Any, word: str) -> bool:
    """Whether `word` is the secret of the seed 5, in a game of its own."""
    probe = type(game)()
    probe.reset(seed=5)
    probe.guess(f"[{word}]")
    probe.client.close()
    return bool(probe.won)


def share(seen: str) -> float:
    return (seen.count("G") + seen.count("Y") / 2) / 5


def test_sudoku_pays_for_each_cell_that_is_filled(server: str):
    game = openenv_sudoku.environment(f"{server}/sudoku")()
    grid = openenv_sudoku.board(game.reset(seed=1))
    solved = openenv_sudoku.solve(grid)
    cells = [(row, column) for row in range(9) for column in range(9) if not grid[row][column]]
    assert (game.to_fill, openenv_sudoku.reward_filled([game])) == (len(cells), [0.0])
    row, column = cells[0]
    assert "invalid" in game.place(row + 1, column + 1, solved[row][column] % 9 + 1)
    assert openenv_sudoku.reward_filled([game]) == [0.0]
    game.place(row + 1, column + 1, solved[row][column])
    assert openenv_sudoku.reward_filled([game]) == [pytest.approx(1 / len(cells))]
    assert openenv_sudoku.reward_solved([game]) == [float(len(cells) == 1)]


@settings(deadline=None)
@given(st.sampled_from(SECRETS), st.sampled_from(SECRETS))
def test_the_marks_are_textarenas(guess: str, secret: str):
    from envs.textarena_env.server import textarena

    textarena()
    from textarena.envs.Wordle.env import WordleEnv

    state = SimpleNamespace(game_state={"word_length": 5, "secret_word": secret})
    assert list(marks(guess, secret)) == WordleEnv._evaluate_guess(SimpleNamespace(state=state, word_length=5), guess)


def test_the_solver_finds_every_word_in_time():
    for secret in SECRETS[::7]:
        words = SECRETS
        for _ in range(openenv_wordle.GUESSES):
            guess = best_guess(words)
            if guess == secret:
                break
            words = consistent(words, guess, marks(guess, secret))
        assert guess == secret
    assert read_marks("Feedback:\nC R A N E\nG G Y X Y\nYou have 5 guesses left.") == "GGYXY"
    assert read_marks("You attempted an invalid move.") is None


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ([], {"app": "a:b"}),
        (["--env-mode", "local"], {"app": "a:b"}),
        (["--env-host", "https://openenv-echo-env.hf.space"], {"url": "https://openenv-echo-env.hf.space"}),
        (["--env-url", "https://x.hf.space"], {"url": "https://x.hf.space"}),
        (["--env-mode", "space", "--env-host", "x.hf.space"], {"url": "http://x.hf.space"}),
        (["--env-mode", "docker-local", "--env-port", "8003"], {"url": "http://127.0.0.1:8003"}),
        (["--env-mode", "docker-local", "--env-host", "box"], {"url": "http://box:8001"}),
        (["--env-mode", "docker-image", "--env-image", "mine:1"], {"image": "mine:1"}),
        (["--env-mode", "docker-hub"], {"image": "registry.hf.space/openenv-echo-env:latest"}),
    ],
)
def test_the_flags_say_where_the_server_is(monkeypatch, arguments: list[str], where: dict[str, str]):
    asked: list[dict[str, Any]] = []

    def taken(**options: Any) -> Any:
        asked.append(options)
        raise InterruptedError

    monkeypatch.setattr(flags, "openenv_server", taken)
    with pytest.raises(InterruptedError), flags.server(openenv_echo.parse(arguments), "a:b"):
        raise AssertionError
    assert asked == [{**where, "sessions": 36, "env": {}}]


def test_the_flags_reach_the_config(server: str, tmp_path):
    wanted = ["--vllm-mode", "server", "--vllm-server-url", "http://box:8000", "--per-device-batch-size", "2", "--num-generations", "4"]
    options = small(openenv_wordle, tmp_path, *wanted, "--gradient-accumulation-steps", "16", "--learning-rate", "2e-6", "--no-warm-start")
    config = openenv_wordle.trainer(options, f"{server}/wordle").config
    assert (config.engine.url, config.rollout.num_generations, config.rollout.groups_per_step) == ("http://box:8000", 4, 8)
    assert (config.learner.learning_rate, config.warmup.enabled, config.rollout.max_concurrent_rollouts) == (2e-6, False, 32)


@pytest.mark.parametrize(
    ("module", "arguments", "enabled"),
    [
        (openenv_wordle, [], True),
        (openenv_wordle, ["--cpu"], True),
        (openenv_wordle, ["--cpu", "--no-warm-start"], False),
        (openenv_wordle, ["--short", "--no-warm-start"], False),
        (train_browsergym, [], False),
        (train_browsergym, ["--warm-start"], True),
        (train_browsergym, ["--cpu"], True),
        (train_browsergym, ["--short", "--no-warm-start"], False),
        (train_browsergym, ["--cpu", "--env-url", "https://x.hf.space"], False),  # its tasks have no solutions
    ],
)
def test_the_flag_for_a_warm_start_has_the_last_word(tmp_path, module: Any, arguments: list[str], enabled: bool):
    trainer = module.trainer(small(module, tmp_path, *arguments), "http://127.0.0.1:9")
    assert trainer.config.warmup.enabled is enabled


def test_held_out_games_are_others_than_those_that_are_trained(tmp_path):
    for module, urls, each in ((openenv_echo, 1, 1), (openenv_multi_env, 2, 2)):
        options = small(module, tmp_path, "--held-out", "2")
        trainer = module.trainer(options, *["http://127.0.0.1:9"] * urls)
        trained, held = trainer.factory.prompt_rows(), trainer._eval.prompt_rows()
        assert (len(trained), len(held), trainer.config.eval.at_start) == (3 * each, 2, True)
        assert not [row for row in held if row in trained]


def test_a_script_trains_or_measures(monkeypatch, capsys, server: str, tmp_path):
    asked: list[Any] = []
    monkeypatch.setattr(GRPOTrainer, "train", lambda self: asked.append("trained"))
    monkeypatch.setattr(GRPOTrainer, "evaluate", lambda self, rows, samples: asked.append((len(rows), samples)) or {"eval_reward": 0.5})
    for arguments in ((), ("--evaluate", "2")):
        options = small(openenv_echo, tmp_path, *arguments)
        flags.run(options, openenv_echo.trainer(options, f"{server}/echo"))
    assert (asked, capsys.readouterr().out) == (["trained", (2, 1)], "eval_reward 0.500\n")


def test_the_rows_are_plain_data():
    for module in (openenv_echo, openenv_catch, openenv_wordle, openenv_sudoku, openenv_multi_env):
        assert json.loads(json.dumps(module.rows(3))) == module.rows(3)
