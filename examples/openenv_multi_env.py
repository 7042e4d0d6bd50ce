# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-rl[openenv]", "textarena", "open-spiel"]
# ///
"""Train in two games at once, Wordle and catch, each on an OpenEnv server of its own.

The column `environment` of a row names its game; the model is shown that game's tools alone. Each game has its own reward function, which
returns None for the other's: watch `rewards/wordle_reward/mean` and `rewards/catch_reward/mean`, not their mixture.

    .venv-openenv/bin/python examples/openenv_multi_env.py                                        servers of its own
    .venv-openenv/bin/python examples/openenv_multi_env.py --cpu                                  smaller games, on two cores
    .venv-openenv/bin/python examples/openenv_multi_env.py \\
        --wordle-url https://openenv-wordle.hf.space --catch-url https://openenv-openspiel-env.hf.space
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import openenv_catch as catch
import openenv_wordle as wordle
from envs.options import add_training, games_at_once, held_out, read, run, training

from harness_rl import GRPOConfig, GRPOTrainer, openenv_server


def wordle_reward(environments: list[Any], environment: list[str], **columns: Any) -> list[float | None]:
    """1 for a game that was won, and a little for the letters of the best guess."""
    games = zip(environments, environment, strict=True)
    return [env.won + wordle.WEIGHTS[1] * env.letters if name == "wordle" else None for env, name in games]


def catch_reward(environments: list[Any], environment: list[str], **columns: Any) -> list[float | None]:
    """1 for a catch; 0 for a miss and for a game that was not played to its end."""
    games = zip(environments, environment, strict=True)
    return [catch.reward_catch([env])[0] if name == "catch" else None for env, name in games]


def rows(count: int) -> list[dict[str, Any]]:
    """`count` rows of each game, by turns."""
    games = {"wordle": wordle.rows(count), "catch": catch.rows(count)}
    return [{**games[name][number], "environment": name} for number in range(count) for name in games]


def trainer(options: argparse.Namespace, wordle_url: str, catch_url: str) -> GRPOTrainer:
    def demonstration(row: dict[str, Any]) -> list[dict[str, Any]]:
        if row["environment"] == "wordle":
            return wordle.solver_game(wordle_url, row, options.words)
        return catch.demonstration(catch_url, row, options.columns)

    return GRPOTrainer(
        model=options.model,
        reward_funcs=[wordle_reward, catch_reward],
        train_dataset=rows(options.dataset_size),
        eval_dataset=held_out(options, rows),
        environment_factory={"wordle": wordle.environment(wordle_url), "catch": catch.environment(catch_url, options.columns)},
        demonstrations=demonstration,
        args=GRPOConfig(**training(options, wordle.CPU, max_completion_length=2048, max_tool_calling_iterations=12)),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordle-url", help="of a Wordle server that runs already")
    parser.add_argument("--catch-url", help="of an OpenSpiel server that runs already")
    add_training(parser, "multi-env", dataset_size=500, per_device_batch_size=64)
    wordle.add_game(parser)
    catch.add_game(parser)
    return read(parser, arguments, **wordle.CPU_FLAGS, **catch.CPU_FLAGS)


@contextlib.contextmanager
def servers(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    room = games_at_once(options) + 4
    games = ((options.wordle_url, wordle.APP, wordle.game(options)), (options.catch_url, catch.APP, catch.game(options)))
    with contextlib.ExitStack() as running:
        urls = [running.enter_context(openenv_server(url=url, app=None if url else app, sessions=room, env=env)) for url, app, env in games]
        yield urls[0], urls[1]


if __name__ == "__main__":
    asked = parse()
    with servers(asked) as found:
        run(asked, trainer(asked, *found))
