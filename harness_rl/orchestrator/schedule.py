"""Which task comes next, and whether more work may start now.

Pacing holds by arithmetic, not by throwing finished work away: batch `b` is trained on the policy of version `b`, so a group that would
join batch `b` may
start only while `b` minus the version that the engine serves is at most `max_staleness`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


class TaskOrder:
    """An endless, seeded order over the rows; every epoch is a fresh permutation. `position` counts rows given out."""

    def __init__(self, rows: list[dict[str, Any]], *, seed: int, shuffle: bool, position: int = 0) -> None:
        if not rows:
            raise ValueError("no tasks")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self.position = position
        self._epoch = -1
        self._permutation: list[int] = []

    def next(self) -> tuple[int, dict[str, Any]]:
        """(position, row)."""
        epoch, index = divmod(self.position, len(self._rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = list(range(len(self._rows)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._permutation)
        position = self.position
        self.position += 1
        return position, self._rows[self._permutation[index]]


@dataclass(frozen=True)
class Pacer:
    groups_per_step: int
    max_staleness: int

    def may_start(self, *, batches_closed: int, groups_waiting: int, version: int) -> bool:
        """True if one more group can still be trained within `max_staleness`.

        `batches_closed`: batches given to the learner so far (the next one has this index); `groups_waiting`: groups that run or are
        scored and not yet in a batch; `version`: optimizer steps in the weights that the engine serves.
        """
        batch = batches_closed + groups_waiting // self.groups_per_step
        return batch - version <= self.max_staleness
