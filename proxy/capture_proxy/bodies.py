"""Request bodies: read within a limit, expanded, and parsed away from the event loop when they are big.

Invariant: the limit is on the body as it is after decompression, and a body over it is refused before more than a few megabytes of it were
kept: what a compressed body expands to is counted first and kept only then.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Generator, Iterator
from typing import Any

from aiohttp import web

from capture_proxy.bigjson import BIG, off_loop
from capture_proxy.dialects.wire import BadRequest, loads

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
else:
    from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

SLICE = 1 << 16
"""Compressed bytes that are expanded in one step, and expanded bytes that one step gives at most."""
KEPT = 8 << 20
"""Expanded bytes that are kept while it is not known how many there will be."""
ZSTD_WINDOW_LOG = 23
"""Largest window of a zstd frame: 8 MB, which every decoder must offer (RFC 8878, 3.1.1.1.2); more would be memory on demand."""


class BodyRefused(BadRequest):
    """The body is not taken; `status` says why in HTTP's words."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def too_large(limit: int) -> BodyRefused:
    return BodyRefused(f"the body is larger than {limit} bytes", 413)


async def read(request: web.Request, limit: int, timeout_s: float) -> bytes:
    """The expanded body, at most `limit` bytes. Raises `BodyRefused`."""
    coding = request.headers.get("Content-Encoding", "").strip().lower()
    if coding not in ("", "identity", "gzip", "x-gzip", "deflate", "zstd"):
        raise BodyRefused(f"Content-Encoding {coding!r} is not understood; send gzip, deflate or zstd, once", 415)
    if (request.content_length or 0) > limit:
        raise too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while part := await request.content.readany():
                size += len(part)
                if size > limit:
                    raise too_large(limit)
                parts.append(part)
    except TimeoutError as error:
        raise BodyRefused(f"the body did not arrive within {timeout_s:g} s", 408) from error
    raw = await off_loop(size, b"".join, parts)
    if coding in ("", "identity") or not raw:
        return raw
    return await asyncio.to_thread(expand, raw, coding, limit)


async def read_object(request: web.Request, limit: int, timeout_s: float) -> tuple[dict[str, Any], bytes]:
    """The body as a JSON object, and its bytes. Raises `BadRequest`."""
    raw = await read(request, limit, timeout_s)
    try:
        body = await asyncio.to_thread(loads, raw, True) if len(raw) >= BIG else loads(raw)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body, raw


def expand(raw: bytes, coding: str, limit: int) -> bytes:
    """The body that `raw` holds under one coding. Raises `BodyRefused`, for one over `limit` without keeping what it expands to."""
    kept: list[bytes] = []
    size = 0
    for part in _parts(raw, coding):
        size += len(part)
        if size > limit:
            raise too_large(limit)
        if size <= KEPT:
            kept.append(part)
        else:
            kept.clear()
    return b"".join(kept if size <= KEPT else _parts(raw, coding))


def _parts(raw: bytes, coding: str) -> Iterator[bytes]:
    """The expanded bytes, piece by piece. One member or frame: no client sends more, and many small ones are slow to read."""
    try:
        rest = yield from _zstd(raw) if coding == "zstd" else _zlib(raw, coding)
    except (zlib.error, ZstdError) as error:
        raise BodyRefused(f"the body does not expand as {coding}: {error}", 400) from error
    if rest is None:
        raise BodyRefused(f"the {coding} body is cut short", 400)
    if rest:
        raise BodyRefused(f"the {coding} body goes on after its end", 400)


def _zlib(raw: bytes, coding: str) -> Generator[bytes, None, bool | None]:
    """Returns whether anything follows the end, or None when there is no end."""
    # RFC 9110: `deflate` has zlib's header; some send the bare stream.
    bare = coding == "deflate" and raw[0] & 0x0F != 8
    expander = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS if coding == "deflate" else 16 + zlib.MAX_WBITS)
    for at in range(0, len(raw), SLICE):
        if expander.eof:
            return True
        given = raw[at : at + SLICE]
        while given and not expander.eof:
            yield expander.decompress(given, SLICE)
            given = expander.unconsumed_tail
    # What the window still holds once the input is used up.
    while not expander.eof and (part := expander.decompress(b"", SLICE)):
        yield part
    return bool(expander.unused_data) if expander.eof else None


def _zstd(raw: bytes) -> Generator[bytes, None, bool | None]:
    expander = ZstdDecompressor(options={DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})
    for at in range(0, len(raw), SLICE):
        if expander.eof:
            return True
        yield expander.decompress(raw[at : at + SLICE], SLICE)
        while not expander.eof and not expander.needs_input:
            yield expander.decompress(b"", SLICE)
    return bool(expander.unused_data) if expander.eof else None
