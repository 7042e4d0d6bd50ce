"""One step on all engines at once, under one deadline: a server that hangs holds up nobody, and the first failure is told at once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from harness_rl.sync.client import EngineClient, StepLate, SyncFailed

T = TypeVar("T")
GRACE_S = 2.0
"""Beyond a call's own deadline, whose error says more than ours."""


@dataclass
class Calls(Generic[T]):
    """Calls under way, one for each engine, in threads that may be left behind."""

    step: str
    engines: Sequence[EngineClient]
    call: Callable[[EngineClient], T]
    results: dict[int, T | SyncFailed] = field(default_factory=dict)
    _ended: queue.SimpleQueue[tuple[int, T | SyncFailed]] = field(default_factory=queue.SimpleQueue)

    def start(self) -> Calls[T]:
        for index, engine in enumerate(self.engines):
            threading.Thread(target=self._run, args=(index, engine), daemon=True, name=f"sync {self.step} {engine.url}").start()
        return self

    def _run(self, index: int, engine: EngineClient) -> None:
        found: T | SyncFailed
        try:
            found = self.call(engine)
        except SyncFailed as error:
            found = type(error)(f"sync step {self.step!r}: {error}")
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            found = SyncFailed(f"sync step {self.step!r}: engine {engine.url} answered what cannot be read: {error!r}")
        self._ended.put((index, found))

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.engines)

    def check(self, wait_s: float = 0.0) -> None:
        """Take in what has ended. Raises the first call's SyncFailed, with the step's name."""
        while not self.done and self._take(wait_s):
            wait_s = 0.0
        for result in self.results.values():
            if isinstance(result, SyncFailed):
                raise result

    def wait(self, deadline: float) -> list[T]:
        """The results in the engines' order. Raises as `check`, and StepLate at `deadline` (monotonic)."""
        while not self.done and deadline > time.monotonic():
            self.check(deadline - time.monotonic())
        self.check()
        self._late()
        return [result for _, result in sorted(self.results.items()) if not isinstance(result, SyncFailed)]

    def settle(self, deadline: float) -> list[T | SyncFailed]:
        """What became of each call, in the engines' order."""
        while not self.done and deadline > time.monotonic():
            self._take(deadline - time.monotonic())
        late = [StepLate(f"sync step {self.step!r}: engine {engine.url}: not done in time") for engine in self.engines]
        return [self.results.get(index, late[index]) for index in range(len(self.engines))]

    def _take(self, wait_s: float) -> bool:
        """Whether a call had ended, or did within `wait_s`."""
        try:
            index, found = self._ended.get(timeout=wait_s) if wait_s > 0 else self._ended.get_nowait()
        except queue.Empty:
            return False
        self.results[index] = found
        return True

    def _late(self) -> None:
        if not self.done:
            late = ", ".join(engine.url for index, engine in enumerate(self.engines) if index not in self.results)
            raise StepLate(f"sync step {self.step!r}: engine {late}: not done in time")


def everywhere(step: str, engines: Sequence[EngineClient], call: Callable[[EngineClient], T], timeout_s: float | None = None) -> list[T]:
    """`call` for every engine, all at once; it has the engines' own deadline, or `timeout_s`."""
    limit = max((engine.timeout_s for engine in engines), default=0.0) if timeout_s is None else timeout_s
    return Calls(step, engines, call).start().wait(time.monotonic() + limit + GRACE_S)
