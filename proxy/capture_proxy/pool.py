"""Several engines behind one name.

Invariant: a session keeps to one engine (its prefix cache) until that engine fails or has much more to do than another; then its calls go
to one that is up, and the session stays there. No answer is used of an engine that has other weights than control released: one that was
started again has those of its model folder until it is synced. Of several, such a one is not even asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from capture_proxy.engine import Engine
from capture_proxy.gate import Gate
from capture_proxy.upstream import EngineUnavailable, EngineUnsynced, PolicyHeld, Retry

T = TypeVar("T")

COOL_DOWN_S = 10.0
"""How long a failed engine is asked only when no other one is up."""
MOVE_AFTER_S = 2.0
"""How long a call asks an engine that does not answer, where there is another."""
PAUSE_S = 0.5
"""Between two rounds over all engines."""
SLACK = 8
"""Calls that an engine may have in flight beyond twice those of the least busy one before a session leaves it."""

log = logging.getLogger(__name__)


def patience(retry: Retry, engines: int) -> Retry:
    """How long one engine of so many is asked again; the pool goes round until `retry.total_s` is over."""
    return retry if engines == 1 else replace(retry, total_s=min(retry.total_s, MOVE_AFTER_S))


class EnginePool:
    """Sticky choice of engine per session."""

    def __init__(self, engines: list[Engine], gate: Gate, total_s: float, first: int = 0) -> None:
        """`first`: the engine of the first session, another in each worker."""
        self.engines = engines
        self._first = first
        self.moves = 0
        """Sessions that went to another engine."""
        self._gate = gate
        self._total_s = total_s
        self._of_session: dict[str, int] = {}
        self._down_until = [0.0] * len(engines)
        self._in_flight = [0] * len(engines)
        self._has: list[str | None] = [None] * len(engines)
        """The version that each engine was seen to serve, since it last failed."""

    def is_down(self, index: int) -> bool:
        return time.monotonic() < self._down_until[index]

    async def use(self, session_id: str, work: Callable[[Engine], Awaitable[T]]) -> T:
        """`work(engine)` on the session's engine, or on the others when it is unavailable. Raises the last `EngineUnavailable`."""
        deadline = time.monotonic() + self._total_s
        while True:
            failure: EngineUnavailable | None = None
            for index in self._order(session_id):
                if failure is not None and time.monotonic() > deadline:
                    break
                try:
                    await self._check_version(index)
                    result = await self._work(index, work)
                except PolicyHeld:
                    raise
                except EngineUnavailable as error:
                    log.warning("%s", error)
                    failure = error
                    self._down_until[index] = time.monotonic() + COOL_DOWN_S
                    self._has[index] = None
                    self.engines[index].forget()
                    continue
                self.moves += self._of_session.get(session_id, index) != index
                self._of_session[session_id] = index
                self._down_until[index] = 0.0
                return result
            assert failure is not None
            # One engine was asked for as long already, but for one that answered too early.
            if (len(self.engines) == 1 and not isinstance(failure, EngineUnsynced)) or time.monotonic() + PAUSE_S > deadline:
                raise failure
            await asyncio.sleep(PAUSE_S)

    def forget(self, session_id: str) -> None:
        self._of_session.pop(session_id, None)

    async def states(self) -> dict[str, bool]:
        """URL -> answers `/health` now."""
        alive = await asyncio.gather(*(engine.alive() for engine in self.engines))
        return {engine.url: up for engine, up in zip(self.engines, alive, strict=True)}

    def load(self) -> dict[str, dict[str, int]]:
        """URL -> its sessions and calls in flight."""
        sessions = self._sessions()
        return {engine.url: {"sessions": sessions[index], "in_flight": self._in_flight[index]} for index, engine in enumerate(self.engines)}

    async def _work(self, index: int, work: Callable[[Engine], Awaitable[T]]) -> T:
        self._in_flight[index] += 1
        try:
            return await work(self.engines[index])
        finally:
            self._in_flight[index] -= 1

    async def _check_version(self, index: int) -> None:
        """Raises `EngineUnavailable` while one of several engines serves another version than the released one."""
        wanted = self._gate.version
        if len(self.engines) == 1 or wanted is None or self._has[index] == wanted:
            return
        engine = self.engines[index]
        served = await engine.version()
        if served not in (None, wanted):
            raise EngineUnsynced(f"engine {engine.url} serves version {served}, the policy is {wanted}")
        self._has[index] = wanted

    def _order(self, session_id: str) -> list[int]:
        """The session's engine, then the others, the least busy first; those that failed lately last."""
        others = sorted(range(len(self.engines)), key=lambda i: (self.is_down(i), self._in_flight[i]))
        mine = self._of_session.get(session_id)
        if mine is None:
            sessions = self._sessions()
            mine = min(others, key=lambda i: (self.is_down(i), sessions[i], (i - self._first) % len(self.engines)))
        elif self._in_flight[mine] > 2 * self._in_flight[others[0]] + SLACK:
            mine = others[0]
        return sorted([mine, *(i for i in others if i != mine)], key=self.is_down)

    def _sessions(self) -> list[int]:
        held = list(self._of_session.values())
        return [held.count(index) for index in range(len(self.engines))]
