# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-rl[openenv]", "textarena"]
# ///
"""Train in TextArena's Sudoku, on an OpenEnv server: a number at a time, and credit for each cell that is filled.

.venv-openenv/bin/python examples/openenv_sudoku.py --difficulty very-easy                       a server of its own
.venv-openenv/bin/python examples/openenv_sudoku.py --cpu                                        its first three numbers, on two cores
.venv-openenv/bin/python examples/openenv_sudoku.py --env-host https://openenv-sudoku.hf.space   a Space
"""

from __future__ import annotations

import argparse
import contextlib
import re
from typing import Any

from envs.options import add_server, add_training, held_out, read, run, server, training
from envs.textarena_env import TextArenaAction, TextArenaEnv

from harness_rl import GRPOConfig, GRPOTrainer

APP = "envs.textarena_env.server:app"
GAMES = {"very-easy": "Sudoku-v0-very-easy", "easy": "Sudoku-v0-easy", "medium": "Sudoku-v0-medium", "hard": "Sudoku-v0-hard"}
CPU = {
    "max_completion_length": 1536,
    "engine": {"max_model_len": 3072, "max_num_seqs": 8},
    "warmup": {"target_low": 0.05, "target_high": 0.1},
}
PROMPT = "Solve the Sudoku. Call the tool `place` for each number, until no cell is empty.\n"
_ROW = re.compile(r"^R(\d)\s+([\d.| ]+)$", re.MULTILINE)


def board(text: str) -> list[list[int]] | None:
    """The last grid that the text shows, 0 where a cell is empty; None where it shows none."""
    lines = _ROW.findall(text)[-9:]
    if [number for number, _ in lines] != list("123456789"):
        return None
    return [[0 if cell == "." else int(cell) for cell in cells if cell in ".123456789"] for _, cells in lines]


def empty(grid: list[list[int]]) -> int:
    return sum(row.count(0) for row in grid)


def solve(grid: list[list[int]]) -> list[list[int]] | None:
    """The grid filled; None where it cannot be."""
    open_cells = [(row, column) for row in range(9) for column in range(9) if not grid[row][column]]
    if not open_cells:
        return grid
    row, column = min(open_cells, key=lambda cell: len(_fits(grid, *cell)))
    for number in _fits(grid, row, column):
        found = solve([[number if (r, c) == (row, column) else grid[r][c] for c in range(9)] for r in range(9)])
        if found is not None:
            return found
    return None


def _fits(grid: list[list[int]], row: int, column: int) -> list[int]:
    top, left = row - row % 3, column - column % 3
    seen = {*grid[row], *(line[column] for line in grid), *(grid[r][c] for r in range(top, top + 3) for c in range(left, left + 3))}
    return [number for number in range(1, 10) if number not in seen]


def environment(url: str) -> type:
    """The environment class of games at `url`."""

    class SudokuEnv:
        def __init__(self) -> None:
            self.client: TextArenaEnv | None = None
            self.said, self.done = "", False
            self.to_fill = self.left = 0

        def reset(self, seed: int, **columns: Any) -> str:
            if self.client is not None:
                with contextlib.suppress(ConnectionError):
                    self.client.close()
            self.client = TextArenaEnv(base_url=url)
            self.said = self.client.reset(seed=seed).observation.messages[0].content
            self.done = False
            self.to_fill = self.left = empty(board(self.said) or [])
            return self.said

        def place(self, row: int, column: int, number: int) -> str:
            """Write a number into an empty cell.

            Args:
                row: From 1 at the top to 9.
                column: From 1 at the left to 9.
                number: From 1 to 9.
            """
            if self.done:
                raise ValueError("The game is over.")
            result = self.client.step(TextArenaAction(message=f"[{row} {column} {number}]"))
            said = result.observation.messages[0].content
            answer, self.said, self.done = said[len(self.said) :], said, result.done  # the server says again what it has said before
            grid = board(answer)
            if grid is not None:
                self.left = empty(grid)
            return answer

    return SudokuEnv


def reward_solved(environments: list[Any], **columns: Any) -> list[float]:
    return [float(env.left == 0) for env in environments]


def reward_filled(environments: list[Any], **columns: Any) -> list[float]:
    """The share of the empty cells that were filled: the game takes only numbers that are right."""
    return [1.0 - env.left / env.to_fill if env.to_fill else 0.0 for env in environments]


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": PROMPT}], "task_name": f"sudoku {seed}", "seed": seed} for seed in range(count)]


def solver_game(url: str, row: dict[str, Any], turns: int | None = None) -> list[dict[str, Any]]:
    """The turns of a solver in the game with this row's seed, or the first `turns` of them."""
    with TextArenaEnv(base_url=url).sync() as client:
        grid = board(client.reset(seed=row["seed"]).observation.messages[0].content)
    solved = solve(grid or [])
    assert grid is not None and solved is not None, "the game has one solution"
    cells = [(r, c) for r in range(9) for c in range(9) if not grid[r][c]]
    calls = [{"name": "place", "arguments": {"row": r + 1, "column": c + 1, "number": solved[r][c]}} for r, c in cells[:turns]]
    return [*({"content": None, "tool_calls": [call]} for call in calls), {"content": "Done."}]


def trainer(options: argparse.Namespace, url: str) -> GRPOTrainer:
    return GRPOTrainer(
        model=options.model,
        reward_funcs=[reward_solved, reward_filled],
        train_dataset=rows(options.dataset_size),
        eval_dataset=held_out(options, rows),
        environment_factory=environment(url),
        demonstrations=lambda row: solver_game(url, row, options.max_turns),
        args=GRPOConfig(**training(options, CPU, max_completion_length=8192, max_tool_calling_iterations=options.max_turns)),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server(parser, image="registry.hf.space/openenv-sudoku:latest")
    add_training(parser, "sudoku", dataset_size=100, per_device_batch_size=64)
    parser.add_argument("--difficulty", choices=sorted(GAMES), default="very-easy", help="of a server of this script's")
    parser.add_argument("--max-turns", type=int, default=100)
    return read(parser, arguments, max_turns=3)


if __name__ == "__main__":
    asked = parse()
    with server(asked, APP, TEXTARENA_ENV_ID=GAMES[asked.difficulty]) as found:
        run(asked, trainer(asked, found))
