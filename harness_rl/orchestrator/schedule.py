"""Which task comes next."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

Row = TypeVar("Row")


class TaskOrder(Generic[Row]):
    """An endless, seeded order over the rows; every epoch is a fresh permutation. `position` counts rows given out.

    `again`: positions before `position` that are given out once more, first.
    """

    def __init__(self, rows: Sequence[Row], *, seed: int, shuffle: bool, position: int = 0, again: Sequence[int] = ()) -> None:
        if not rows:
            raise ValueError("no tasks")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self.position = position
        self._again = deque(again)
        self._epoch = -1
        self._permutation: list[int] = []

    def next(self) -> tuple[int, Row]:
        """(position, row)."""
        position = self._again.popleft() if self._again else self.position
        epoch, index = divmod(position, len(self._rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = list(range(len(self._rows)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._permutation)
        self.position = max(self.position, position + 1)
        return position, self._rows[self._permutation[index]]
