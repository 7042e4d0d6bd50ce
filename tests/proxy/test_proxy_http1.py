"""The client of the engines' HTTP: whole answers in any framing, or a failure that says why; connections that are used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from proxy_helpers import until

from capture_proxy.http1 import HttpClient, NoAnswer


@dataclass
class RawServer:
    """Answers each request with the next of `answers`, byte for byte; None closes the connection."""

    answers: list[bytes | None] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    split: int = 0
    """Bytes in one write; 0: all at once."""
    close_after: bool = False
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")), 0)
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                if answer is None:
                    break
                if not answer:
                    await reader.read()
                    break
                for start in range(0, len(answer), self.split or len(answer)):
                    writer.write(answer[start : start + (self.split or len(answer))])
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.close_after:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


Start = Callable[..., Awaitable[tuple[RawServer, HttpClient]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    closing: list[asyncio.Server | HttpClient] = []

    async def run(*answers: bytes | None, **options: object) -> tuple[RawServer, HttpClient]:
        raw = RawServer(list(answers), **options)  # type: ignore[arg-type]
        server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
        raw.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = HttpClient(raw.url, 2.0)
        closing.extend((server, client))
        return raw, client

    yield run
    for item in closing:
        item.close()


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
TRAILER = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED, TRAILER, INTERIM], ids=["length", "chunked", "trailer", "interim"])
@pytest.mark.parametrize("split", [0, 1, 7])
async def test_every_framing_gives_the_body_and_keeps_the_connection(start: Start, answer: bytes, split: int) -> None:
    raw, client = await start(answer, answer, split=split)
    assert await client.request("POST", "/x", b"{}", 5.0) == (200, b"hello")
    assert await client.request("GET", "/y", None, 5.0) == (200, b"hello")
    assert raw.connections == 1
    assert raw.requests[0].startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1") and raw.requests[0].endswith(b"Content-Length: 2\r\n\r\n{}")
    assert raw.requests[1].startswith(b"GET /y HTTP/1.1\r\n") and b"Content-" not in raw.requests[1]


async def test_a_body_may_last_as_long_as_its_connection(start: Start) -> None:
    raw, client = await start(b"HTTP/1.0 503 Busy\r\n\r\nsoon", PLAIN, close_after=True)
    assert await client.request("GET", "/", None, 5.0) == (503, b"soon")
    assert await client.request("GET", "/", None, 5.0) == (200, b"hello")
    assert raw.connections == 2


async def test_a_connection_that_is_to_close_or_has_closed_is_not_used_again(start: Start) -> None:
    raw, client = await start(PLAIN.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), PLAIN, PLAIN)
    await client.request("GET", "/", None, 5.0)
    raw.close_after = True
    await client.request("GET", "/", None, 5.0)
    await until(lambda: raw.open == 0)
    await asyncio.sleep(0.1)
    assert await client.request("GET", "/", None, 5.0) == (200, b"hello")
    assert raw.connections == 3


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "before the answer was whole"),
        (PLAIN[:-1], "before the answer was whole"),
        (CHUNKED[:-3], "before the answer was whole"),
        (b"SSH-2.0-x\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello", "malformed"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello", "compressed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxx\r\nhello", "chunked wrongly"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello", "too long"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", "too long"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, "too long a head"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_anything_else_is_no_answer(start: Start, answer: bytes | None, says: str) -> None:
    raw, client = await start(answer, PLAIN, close_after=True)
    with pytest.raises(NoAnswer, match=says):
        await client.request("GET", "/", None, 5.0)
    assert await client.request("GET", "/", None, 5.0) == (200, b"hello")
    assert raw.connections == 2


async def test_bytes_nobody_asked_for_end_the_connection(start: Start) -> None:
    raw, client = await start(PLAIN + PLAIN, PLAIN)
    assert await client.request("GET", "/", None, 5.0) == (200, b"hello")
    assert await client.request("GET", "/", None, 5.0) == (200, b"hello")
    assert raw.connections == 2


async def test_a_cancelled_or_late_request_closes_its_connection(start: Start) -> None:
    raw, client = await start(b"", b"")
    task = asyncio.create_task(client.request("GET", "/", None, 5.0))
    await until(lambda: raw.requests)
    task.cancel()
    await until(lambda: raw.open == 0)
    with pytest.raises(TimeoutError):
        await client.request("GET", "/", None, 0.1)
    await until(lambda: raw.open == 0)


async def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(NoAnswer, match="no connection"):
        await HttpClient("http://127.0.0.1:1", 2.0).request("GET", "/", None, 5.0)
    with pytest.raises(ValueError, match=r"no http\(s\) URL"):
        HttpClient("ftp://host", 1.0)


async def test_path_and_credentials_of_the_url_are_sent(start: Start) -> None:
    raw, _ = await start(PLAIN)
    client = HttpClient(raw.url.replace("http://", "http://us%40er:pass@") + "/base/", 2.0)
    await client.request("GET", "/x", None, 5.0)
    assert raw.requests[0].startswith(b"GET /base/x HTTP/1.1\r\n") and b"Authorization: Basic dXNAZXI6cGFzcw==\r\n" in raw.requests[0]
    client.close()
