"""Holds new calls while the engine's weights change.

Invariant: while held, no new call is rendered or sampled; each waits for the release or for its own deadline, whichever comes first, and is
never dropped silently.
"""

from __future__ import annotations

import asyncio


class HeldTooLong(Exception):
    """The gate stayed closed longer than its caller may wait."""


class Gate:
    """Open at first. `version` is the policy version that control said the engines serve."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._timeout_s = 0.0
        self.reason: str | None = None
        self.version: str | None = None
        self.waiting = 0
        self.holds = 0
        """How often it was closed: a call that an engine aborts meanwhile was aborted for the update."""

    @property
    def held(self) -> bool:
        return not self._open.is_set()

    def hold(self, reason: str, timeout_s: float) -> None:
        self.reason, self._timeout_s = reason, timeout_s
        self.holds += 1
        self._open.clear()

    def release(self, version: str | None) -> None:
        if version is not None:
            self.version = version
        self.reason = None
        self._open.set()

    async def wait(self) -> None:
        """Returns when the gate is open. Raises `HeldTooLong` after the hold's timeout."""
        if not self.held:
            return
        self.waiting += 1
        try:
            await asyncio.wait_for(self._open.wait(), self._timeout_s)
        except TimeoutError as error:
            raise HeldTooLong(f"held for {self.reason} for more than {self._timeout_s:g} s") from error
        finally:
            self.waiting -= 1
