"""Several engines behind one name.

Invariant: a session keeps to one engine (its prefix cache) until that engine fails; then the call goes to the next one that is up, at most
once round, and the session stays there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from capture_proxy.engine import Engine, EngineUnavailable

T = TypeVar("T")

COOL_DOWN_S = 10.0
"""How long a failed engine is asked only when no other one is up."""

log = logging.getLogger(__name__)


class EnginePool:
    """Sticky choice of engine per session."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self._of_session: dict[str, int] = {}
        self._down_until = [0.0] * len(engines)
        self._next = 0

    def is_down(self, index: int) -> bool:
        return time.monotonic() < self._down_until[index]

    async def use(self, session_id: str, work: Callable[[Engine], Awaitable[T]]) -> T:
        """`work(engine)` on the session's engine, or on the next ones when it is unavailable. Raises the last `EngineUnavailable`."""
        if session_id not in self._of_session:
            self._of_session[session_id] = self._assign()
        first = self._of_session[session_id]
        order = [(first + i) % len(self.engines) for i in range(len(self.engines))]
        order.sort(key=self.is_down)
        failure: EngineUnavailable | None = None
        for index in order:
            try:
                result = await work(self.engines[index])
            except EngineUnavailable as error:
                log.warning("%s", error)
                failure = error
                self._down_until[index] = time.monotonic() + COOL_DOWN_S
                self.engines[index].forget()
                continue
            self._of_session[session_id] = index
            self._down_until[index] = 0.0
            return result
        assert failure is not None
        raise failure

    def forget(self, session_id: str) -> None:
        self._of_session.pop(session_id, None)

    async def states(self) -> dict[str, bool]:
        """URL -> answers `/health` now."""
        alive = await asyncio.gather(*(engine.alive() for engine in self.engines))
        return {engine.url: up for engine, up in zip(self.engines, alive, strict=True)}

    def _assign(self) -> int:
        self._next += 1
        return (self._next - 1) % len(self.engines)
