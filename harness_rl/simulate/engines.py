"""The engines of a simulation: calls share what they can do.

Up to `capacity` calls run at full speed; more of them share the same throughput evenly. A call's tokens are spread evenly over its work, so
each belongs to the policy that was served at that point of it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass, field

EPSILON_S = 1e-6
"""Of work: what rounding may leave of a call that has ended."""


@dataclass
class Engines:
    capacity: float
    """Calls at full speed, of all engines together."""
    delivered_s: float = 0.0
    """Seconds of full-speed work done."""
    occupied_s: float = 0.0
    """Calls under way times seconds."""
    busy_s: float = 0.0
    """Seconds with at least one call under way."""
    paused: bool = False
    _done: float = 0.0
    """Work that each call under way since the beginning would have got."""
    _at: float = 0.0
    """When `_done` was right."""
    _calls: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)
    """(`_done` at its end, number, who waits), the first to end first."""
    _marks: list[float] = field(default_factory=lambda: [-math.inf])
    _versions: list[int] = field(default_factory=lambda: [0])
    """`_versions[i]` is served from `_done` = `_marks[i]` on."""
    _timer: asyncio.TimerHandle | None = None
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    @property
    def running(self) -> int:
        return len(self._calls)

    async def call(self, seconds: float) -> list[tuple[int, float]]:
        """Work of `seconds` at full speed; (version, share of the work) in order."""
        self._advance()
        began = self._done
        ended = asyncio.get_running_loop().create_future()
        heapq.heappush(self._calls, (began + seconds, next(self._numbers), ended))
        self._idle.clear()
        self._wait_for_next()
        try:
            await ended
        finally:
            if ended.cancelled():
                self._advance()
                self._calls = [entry for entry in self._calls if entry[2] is not ended]
                heapq.heapify(self._calls)
                self._rest()
        return self._shares(began, began + seconds)

    def pause(self) -> None:
        """Calls under way stand still."""
        self._advance()
        self.paused = True
        self._wait_for_next()

    def resume(self, version: int) -> None:
        """They go on, under the weights of `version`."""
        self._advance()
        self.paused = False
        self._marks.append(self._done)
        self._versions.append(version)
        self._wait_for_next()

    async def drained(self, timeout_s: float) -> bool:
        """Whether no call is under way within `timeout_s`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def settle(self) -> None:
        """Bring the totals up to now."""
        self._advance()

    def _shares(self, began: float, ended: float) -> list[tuple[int, float]]:
        first = bisect_right(self._marks, began) - 1
        if ended <= began:
            return [(self._versions[first], 1.0)]
        shares, at = [], began
        for index in range(first, len(self._marks)):
            until = min(ended, self._marks[index + 1]) if index + 1 < len(self._marks) else ended
            if until > at:
                shares.append((self._versions[index], (until - at) / (ended - began)))
                at = until
        return shares

    @property
    def _speed(self) -> float:
        return 0.0 if self.paused or not self._calls else min(1.0, self.capacity / len(self._calls))

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        passed, self._at = now - self._at, now
        self._done += passed * self._speed
        self.delivered_s += passed * self._speed * len(self._calls)
        self.occupied_s += passed * len(self._calls)
        self.busy_s += passed * bool(self._calls)

    def _wait_for_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._speed > 0:
            left = max(0.0, self._calls[0][0] - self._done) / self._speed
            self._timer = asyncio.get_running_loop().call_later(left, self._end_first)

    def _end_first(self) -> None:
        self._timer = None
        self._advance()
        while self._calls and (self._calls[0][0] <= self._done + EPSILON_S or self._calls[0][2].cancelled()):
            ended = heapq.heappop(self._calls)[2]
            if not ended.done():
                ended.set_result(None)
        self._rest()

    def _rest(self) -> None:
        if not self._calls:
            self._idle.set()
        self._wait_for_next()
