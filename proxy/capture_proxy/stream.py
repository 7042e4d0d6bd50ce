"""Server-sent events to the agent.

Invariant: while the engine works the client hears something at least every `keepalive_s`; the answer's events are written only by `send`,
after the turn is stored; a stream that cannot be finished ends in a reset connection, never in a clean end that a client could take for the
answer; no write waits for ever for a client that does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiohttp import web

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream:
    """One streamed answer."""

    def __init__(self, request: web.Request, keepalive_s: float, patience_s: float) -> None:
        self._request = request
        self._keepalive_s = keepalive_s
        self._patience_s = patience_s
        self.response = web.StreamResponse(headers=HEADERS)

    async def start(self, head: bytes) -> None:
        """Sends the headers and the first event."""
        await self.response.prepare(self._request)
        await self._write(head)

    async def wait(self, task: asyncio.Task[Any], noop: bytes) -> None:
        """Returns when `task` is done; until then sends `noop` at every silence."""
        while not (await asyncio.wait({task}, timeout=self._keepalive_s))[0]:
            await self._write(noop)

    async def send(self, events: Iterable[bytes]) -> None:
        """Sends the rest of the answer, terminal event included."""
        for event in events:
            await self._write(event)

    async def end(self) -> None:
        """Ends the response; the client may already be gone."""
        with contextlib.suppress(ConnectionError):
            async with reading_within(self._request, self._patience_s):
                await self.response.write_eof()

    async def abort(self, event: bytes) -> None:
        """Says what went wrong and resets the connection."""
        if event:
            await self._write(event)
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _write(self, data: bytes) -> None:
        async with reading_within(self._request, self._patience_s):
            await self.response.write(data)


@contextlib.asynccontextmanager
async def reading_within(request: web.Request, seconds: float) -> AsyncIterator[None]:
    """A client that takes none of what is written to it for so long has left: its connection is reset. Raises `ConnectionResetError`."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client did not read its answer for {seconds:g} s") from error
