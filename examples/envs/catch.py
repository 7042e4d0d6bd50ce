"""Catch: a ball falls, one row for each move; stand under it when it lands. Several short turns, and credit for coming near."""

from __future__ import annotations

from typing import Any, Literal

COLUMNS = 3
MOVES = 2
"""Rows that the ball falls: as many as the field is wide, less one, so that every ball can be caught."""
STEP = {"left": -1, "stay": 0, "right": 1}


class CatchEnv:
    def __init__(self) -> None:
        self.ball = self.paddle = self.moves = 0

    def reset(self, ball: int, paddle: int, **columns: Any) -> str:
        self.ball, self.paddle, self.moves = ball, paddle, 0
        return self._shown()

    def move(self, direction: Literal["left", "stay", "right"]) -> str:
        """Move one column.

        Args:
            direction: Where to.
        """
        if self.moves == MOVES:
            raise ValueError("The ball has landed. The game is over.")
        if direction not in STEP:
            raise ValueError(f"Move {', '.join(STEP)}.")
        self.paddle = min(max(self.paddle + STEP[direction], 1), COLUMNS)
        self.moves += 1
        if self.moves < MOVES:
            return self._shown()
        return "Caught." if self.paddle == self.ball else "Missed."

    def get_reward(self) -> float:
        """1 for a catch, less for each column between, 0 for a game that was not played to its end."""
        if self.moves < MOVES:
            return 0.0
        return 1.0 - abs(self.ball - self.paddle) / (COLUMNS - 1)

    def _shown(self) -> str:
        return f"ball {self.ball} you {self.paddle}"


def rows() -> list[dict[str, Any]]:
    places = range(1, COLUMNS + 1)
    return [{"prompt": [{"role": "user", "content": "Catch. "}], "ball": ball, "paddle": paddle} for ball in places for paddle in places]


def demonstration(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns of a policy that plays well, for the warm start."""
    paddle, turns = row["paddle"], []
    for _ in range(MOVES):
        direction = "stay" if paddle == row["ball"] else "right" if paddle < row["ball"] else "left"
        paddle += STEP[direction]
        turns.append({"content": None, "tool_calls": [{"name": "move", "arguments": {"direction": direction}}]})
    return [*turns, {"content": "Done."}]
