"""Whose turn it is, control's or the learner's: a deadline for the learner's next word runs only while it owes one.

An idle learner says nothing, however long a batch takes to collect, and one that waits within an update waits for us. Neither is dead; one
that has died closes its connection.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Turns:
    asked: bool = False
    """An update or the end was asked for. The first update asks for itself."""
    batches: int = 0
    """With the learner, and not answered."""
    ours: bool = False
    """It waits for an answer of ours."""
    _since: float | None = None
    """When it last said something, or got work after idleness; None while it owes nothing."""

    def __post_init__(self) -> None:
        self._tick()

    @property
    def silent_s(self) -> float:
        """For how long it has had work and said nothing."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def given(self) -> None:
        """It has one more batch."""
        self.batches += 1
        self._tick(heard=False)

    def ask(self) -> None:
        """It is to push its weights, or to end."""
        self.asked, self.ours = True, False
        self._tick()

    def hear(self, kind: str) -> None:
        """It has sent a message of that type, which control works on until `answered`."""
        self.batches -= kind == "result"
        self.asked = self.asked and kind != "sync_done"
        self.ours = True
        self._tick()

    def answered(self) -> None:
        self.ours = False
        self._tick()

    def _tick(self, heard: bool = True) -> None:
        owes = not self.ours and (self.asked or self.batches > 0)
        if not owes or heard or self._since is None:
            self._since = time.monotonic() if owes else None
