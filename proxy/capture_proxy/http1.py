"""HTTP/1.1 to one server: as much of it as an engine's answers need, at a fraction of what a general client costs for each request.

Invariant: `request` returns a whole answer or raises. A connection carries one request at a time and is used again only after a whole
answer that allows it; a cancelled or failed request closes its connection. Head and body are bounded, and redirects are answers like any
other.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import zlib
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote, urlsplit

MAX_HEAD = 1 << 16
MAX_BODY = 1 << 30
IDLE = 256
"""Connections that are kept for later requests."""


class NoAnswer(Exception):
    """No connection, or it ended before the answer was whole; the message says which."""


@dataclass(frozen=True)
class Head:
    """Status line and headers of an answer."""

    status: int
    length: int | None
    """Of the body; None: until the connection ends."""
    chunked: bool
    keep: bool
    """Another request may follow on the connection."""
    gzip: bool = False
    """What stands between us and the engine has compressed the body, asked or not."""


def parse_head(raw: bytes) -> Head:
    """The head in `raw`, without its closing empty line. Raises `NoAnswer`."""
    first, *lines = raw.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    status = rest[:3]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not status.isdigit():
        raise NoAnswer("its answer is not HTTP/1.1")
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        if not colon or (name == b"content-length" and headers.get(name, value) != value):
            raise NoAnswer("its answer has a malformed head")
        headers[name] = value
    coding = headers.get(b"content-encoding", b"identity").lower()
    if coding not in (b"identity", b"gzip"):
        raise NoAnswer(f"its answer is encoded as {coding.decode(errors='replace')}, which was not asked for")
    chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
    size = headers.get(b"content-length")
    if size is not None and not size.isdigit():
        raise NoAnswer("its answer has a malformed head")
    length = 0 if status in (b"204", b"304") else None if chunked or size is None else int(size)
    connection = headers.get(b"connection", b"").lower()
    keep = connection != b"close" and (version == b"HTTP/1.1" or connection == b"keep-alive") and (chunked or length is not None)
    return Head(int(status), length, chunked, keep, coding == b"gzip")


class _Connection(asyncio.Protocol):
    """One connection; `send` one request, await its answer, `send` the next."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[Head, bytes]] | None = None
        self._start()

    def _start(self) -> None:
        self._buffer = bytearray()
        self._head: Head | None = None
        self._at = 0
        """Where in the buffer the body, or its next chunk, begins."""
        self._chunks: list[bytes] = []
        self._size = 0

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes) -> asyncio.Future[tuple[Head, bytes]]:
        assert self._transport is not None
        self._start()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.writelines([head, body] if body else [head])
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def expire(self) -> None:
        """The answer has taken too long."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(TimeoutError())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nothing was asked
            return
        self._buffer += data
        try:
            body = self._advance()
        except NoAnswer as error:
            self._fail(error)
            return
        if body is not None:
            self._succeed(body)
            if len(self._buffer) > self._at:
                self.close()  # more than was asked

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is None or self._answer.done():
            return
        if self._head is not None and self._head.length is None and not self._head.chunked and exc is None:
            self._succeed(bytes(self._buffer[self._at :]))
        else:
            self._fail(NoAnswer(f"the connection ended before the answer was whole ({exc or 'closed by the server'})"))

    def _advance(self) -> bytes | None:
        """The body, once it is whole."""
        while self._head is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end > MAX_HEAD or (end < 0 and len(self._buffer) > MAX_HEAD):
                raise NoAnswer("its answer has too long a head")
            if end < 0:
                return None
            head, self._at = parse_head(bytes(self._buffer[:end])), end + 4
            if head.status >= 200:
                self._head = head
            else:  # an interim answer
                del self._buffer[: self._at]
        if self._head.chunked:
            return self._dechunk()
        if (self._head.length or len(self._buffer)) > MAX_BODY:
            raise NoAnswer("its answer is too long")
        if self._head.length is None or len(self._buffer) - self._at < self._head.length:
            return None
        return self._take(self._head.length)

    def _dechunk(self) -> bytes | None:
        while (end := self._buffer.find(b"\r\n", self._at)) >= 0:
            try:
                size = int(self._buffer[self._at : end].partition(b";")[0], 16)
            except ValueError as error:
                raise NoAnswer("its answer is chunked wrongly") from error
            if size < 0 or self._size + size > MAX_BODY:
                raise NoAnswer("its answer is too long")
            if size == 0:
                last = self._buffer.find(b"\r\n\r\n", end)  # after trailers, if there are any
                if last < 0:
                    return None
                self._at = last + 4
                return b"".join(self._chunks)
            if len(self._buffer) < end + 4 + size:
                return None
            self._at = end + 2
            self._chunks.append(self._take(size))
            self._at += 2
            self._size += size
        return None

    def _take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        return bytes(memoryview(self._buffer)[start : start + size])

    def _succeed(self, body: bytes) -> None:
        assert self._answer is not None and self._head is not None
        try:
            self._answer.set_result((self._head, _expanded(body) if self._head.gzip else body))
        except NoAnswer as error:
            self._fail(error)

    def _fail(self, error: NoAnswer) -> None:
        assert self._answer is not None
        self._answer.set_exception(error)
        self.close()


def _expanded(body: bytes) -> bytes:
    """A gzip body's content. Raises `NoAnswer` where it is broken or too long."""
    reader = zlib.decompressobj(wbits=31)
    try:
        content = reader.decompress(body, MAX_BODY)
    except zlib.error as error:
        raise NoAnswer("its answer is compressed wrongly") from error
    if not reader.eof:
        raise NoAnswer("its answer is too long")
    return content


class HttpClient:
    """Requests to one base URL (`http` or `https`, a path before the routes, credentials)."""

    def __init__(self, url: str, connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http(s) URL")
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._prefix = parts.path.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        headers = [f"Host: {parts.netloc.rpartition('@')[2]}", "Accept: */*"]
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers.append("Authorization: Basic " + base64.b64encode(pair.encode()).decode())
        self._headers = "\r\n".join(headers)
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer. Raises `NoAnswer`, or `TimeoutError` when it is not whole `timeout_s` after the request."""
        connection = await self._connection()
        content = "" if body is None else f"\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{content}\r\n\r\n".encode()
        timer = asyncio.get_running_loop().call_later(timeout_s, connection.expire)
        try:
            answer, raw = await connection.send(head, body or b"")
        except BaseException:
            connection.close()
            raise
        finally:
            timer.cancel()
        if answer.keep and connection.open and len(self._idle) < IDLE:
            self._idle.append(connection)
        else:
            connection.close()
        return answer.status, raw

    def close(self) -> None:
        """Closes the connections that no request uses."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except TimeoutError as error:
            raise NoAnswer(f"no connection within {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise NoAnswer(f"no connection ({error.strerror or error})") from error
        return connection
