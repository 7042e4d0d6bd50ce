"""Holds new calls while the engine's weights change, and knows under which name the policy is asked for.

Invariant: while held, no new call is rendered or sampled; each waits for the release or for its own deadline, whichever comes first, and is
never dropped silently. Where policies are adapters, a request is made under one of them, and what `release` answers is exact: no request
will ever be made again under an adapter that is not in it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class HeldTooLong(Exception):
    """The gate stayed closed longer than its caller may wait."""


@dataclass(frozen=True)
class Adapter:
    """A policy that the engines serve beside others, under a name of its own."""

    name: str
    version: str


class Gate:
    """Open at first. `version` is the policy version that control said the engines serve."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._timeout_s = 0.0
        self.reason: str | None = None
        self.version: str | None = None
        self.adapter: Adapter | None = None
        """The policy's; None: it is the engines' own model, and an update replaces that one's weights."""
        self._asked: Counter[Adapter] = Counter()
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

    def release(self, version: str | None, adapter: str | None = None) -> list[str]:
        """Returns the names of the adapters that can still be asked for: this one, and those of requests under way."""
        if version is not None:
            self.version = version
            self.adapter = None if adapter is None else Adapter(adapter, version)
        self.reason = None
        self._open.set()
        return sorted({asked.name for asked in [*self._asked, *([self.adapter] if self.adapter else [])]})

    @contextmanager
    def asking(self) -> Iterator[Adapter | None]:
        """The adapter of one request, for as long as it takes."""
        adapter = self.adapter
        if adapter is None:
            yield None
            return
        self._asked[adapter] += 1
        try:
            yield adapter
        finally:
            self._asked[adapter] -= 1
            if not self._asked[adapter]:
                del self._asked[adapter]

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
