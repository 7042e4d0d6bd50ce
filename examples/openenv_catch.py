# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-rl[openenv]", "open-spiel"]
# ///
"""Train in OpenSpiel's game of catch, on an OpenEnv server: a ball falls through some rows, and a paddle waits below.

.venv-openenv/bin/python examples/openenv_catch.py                                                     a server of its own
.venv-openenv/bin/python examples/openenv_catch.py --cpu                                               small enough for two cores
.venv-openenv/bin/python examples/openenv_catch.py --env-host https://openenv-openspiel-env.hf.space   a Space
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any, Literal

from envs.openspiel_env import OpenSpielAction, OpenSpielEnv
from envs.options import add_server, add_training, held_out, read, run, server, training

from harness_rl import GRPOConfig, GRPOTrainer

APP = "envs.openspiel_env.server:app"
ROWS, COLUMNS = 10, 5
"""OpenSpiel's own, which a Space has too."""
CPU_FLAGS = {"rows": 4, "columns": 3}
CPU = {"max_completion_length": 320}
LEFT, STAY, RIGHT = 0, 1, 2
PROMPT = (
    "Catch the ball. It falls one row with each of your moves; be in its column when it comes down. Call `move` to go one column to the "
    "left or right, and `stay` to wait, until the game is over.\n"
)


def places(info_state: Sequence[float], width: int) -> tuple[int, int, int]:
    """(row of the ball, its column, the paddle's column), from 0 on: the last of the grid's rows is the paddle's."""
    taken = [divmod(index, width) for index, value in enumerate(info_state) if value]
    _, paddle = taken[-1]
    row, ball = taken[0]
    return row, ball, paddle


def shown(info_state: Sequence[float], width: int) -> str:
    row, ball, paddle = places(info_state, width)
    side = "straight above" if ball == paddle else f"{abs(ball - paddle)} to the {'left' if ball < paddle else 'right'}"
    return f"ball: row {row + 1} of {len(info_state) // width}, column {ball + 1}; you: column {paddle + 1}; the ball is {side}"


def environment(url: str, width: int = COLUMNS) -> type:
    """The environment class of games at `url`, whose grid is so wide."""

    class CatchEnv:
        def __init__(self) -> None:
            self.client: OpenSpielEnv | None = None
            self.reward, self.done = 0.0, False

        def reset(self, seed: int, **columns: Any) -> str:
            if self.client is not None:
                with contextlib.suppress(ConnectionError):
                    self.client.close()
            self.client = OpenSpielEnv(base_url=url)
            self.reward, self.done = 0.0, False
            return shown(self.client.reset(seed=seed).observation.info_state, width)

        def move(self, direction: Literal["left", "right"]) -> str:
            """Move one column.

            Args:
                direction: Where to.
            """
            if direction not in ("left", "right"):
                raise ValueError("direction must be 'left' or 'right'")
            return self._act(LEFT if direction == "left" else RIGHT)

        def stay(self) -> str:
            """Stay where you are while the ball falls one row."""
            return self._act(STAY)

        def _act(self, action: int) -> str:
            if self.done:
                raise ValueError("The game is over.")
            result = self.client.step(OpenSpielAction(action_id=action, game_name="catch"))
            self.reward, self.done = result.reward or 0.0, result.done
            if self.done:
                return "Caught." if self.reward > 0 else "Missed."
            return shown(result.observation.info_state, width)

    return CatchEnv


def reward_catch(environments: list[Any], **columns: Any) -> list[float]:
    """1 for a catch, 0 for a miss and for a game that was not played to its end."""
    return [max(env.reward, 0.0) if env.done else 0.0 for env in environments]


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": PROMPT}], "task_name": f"catch {seed}", "seed": seed} for seed in range(count)]


def demonstration(url: str, row: dict[str, Any], width: int = COLUMNS) -> list[dict[str, Any]]:
    """The turns of a policy that goes under the ball and waits there, from the first view of the game with this row's seed."""
    with OpenSpielEnv(base_url=url).sync() as client:
        grid = client.reset(seed=row["seed"]).observation.info_state
    _, ball, paddle = places(grid, width)
    direction = "left" if ball < paddle else "right"
    steps = [{"name": "move", "arguments": {"direction": direction}}] * abs(ball - paddle)
    waits = [{"name": "stay", "arguments": {}}] * (len(grid) // width - 1 - len(steps))
    return [*({"content": None, "tool_calls": [call]} for call in [*steps, *waits]), {"content": "Done."}]


def trainer(options: argparse.Namespace, url: str) -> GRPOTrainer:
    return GRPOTrainer(
        model=options.model,
        reward_funcs=reward_catch,
        train_dataset=rows(options.dataset_size),
        eval_dataset=held_out(options, rows),
        environment_factory=environment(url, options.columns),
        demonstrations=lambda row: demonstration(url, row, options.columns),
        args=GRPOConfig(**training(options, CPU, max_completion_length=1024, max_tool_calling_iterations=options.rows)),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server(parser, image="registry.hf.space/openenv-openspiel-env:latest")
    add_training(parser, "catch", model="Qwen/Qwen3-0.6B", per_device_batch_size=32)
    add_game(parser)
    return read(parser, arguments, **CPU_FLAGS)


def add_game(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=ROWS, help="of the grid of a server of this script's")
    parser.add_argument("--columns", type=int, default=COLUMNS, help="the same")


def game(options: argparse.Namespace) -> dict[str, str]:
    """For the server's process."""
    return {"OPENSPIEL_GAME": f"catch(rows={options.rows},columns={options.columns})"}


if __name__ == "__main__":
    asked = parse()
    with server(asked, APP, **game(asked)) as found:
        run(asked, trainer(asked, found))
