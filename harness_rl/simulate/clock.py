"""An event loop whose clock jumps to the next timer: hours of waiting pass in the time that the code between takes.

Invariant: nothing that runs in it sees real time, and the order of events depends on their times alone.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(RuntimeError):
    """Everything waits for something that will never happen."""


class _Jumping(selectors.SelectSelector):
    """Moves the clock where a real selector would sleep."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("nothing happens any more: everything waits for something else")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at 0 seconds. It has no input and output: only timers, tasks and what they wake."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Raises `Stuck` where `main` can never end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
