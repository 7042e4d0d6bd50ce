"""A thread of its own for each environment: its synchronous code always runs there, one call at a time, in the order in which it was asked.

Invariant: user code never blocks the event loop, and never meets itself in two threads; libraries that are bound to the thread that
opened them (browsers, databases, clients with a loop of their own) work. The thread is a daemon: code that never returns costs its
rollout, not the end of the process. Whatever it raises comes back as an ordinary exception.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any


class OwnThread:
    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether something that was asked for has not come to its end; also after its asker has gone."""
        return self._pending > 0

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `function` returns or raises. A caller that is cancelled stops waiting; a call that has begun goes on to its end."""
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """The same as a future. `function` sees the asker's context variables."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        context = contextvars.copy_context()
        with self._lock:
            self._pending += 1
        self._work.put((lambda: context.run(function, *args, **kwargs), future))
        return future

    def close(self) -> None:
        """Let the thread end after what it was already asked for."""
        self._work.put(None)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            call, future = item
            result, failure = None, None
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, sys.exit() included; its asker gets it
                    failure = contained(error)
            with self._lock:
                self._pending -= 1  # before the asker hears of it, so that it never finds its own call pending
            if failure is not None:
                future.set_exception(failure)
            elif not future.cancelled():
                future.set_result(result)
            del item, call, future, result, failure


def contained(error: BaseException) -> Exception:
    """The error itself; a RuntimeError that names it where raising it in the event loop would end the process, or confuse a future."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


async def awaited(work: Awaitable[Any]) -> Any:
    """What the user's asynchronous code returns, or raises as an ordinary exception."""
    try:
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("it was cancelled from within") from None
    except BaseException as error:  # also sys.exit(), which must not end the run
        raise contained(error) from error
