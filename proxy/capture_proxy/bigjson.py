"""An agent's JSON of many megabytes, read in a thread without holding up the event loop.

Invariant: what is read is what `json` reads. One call into `json` holds the interpreter until it is done; here the outer levels are walked
in Python, so that no such call is longer than one item (one message), and other calls get their turn in between. (What is written is
written by `fastjson`, which takes a tenth of a second for a hundred megabytes.)
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from json.decoder import JSONDecoder
from typing import Any, TypeVar

T = TypeVar("T")

_SPACE = re.compile(r"[ \t\n\r]*")

BIG = 1 << 20
"""Bodies from this many bytes on are handled in a thread and item by item, so that other calls go on meanwhile."""


async def off_loop(size: int, work: Callable[..., T], *args: Any) -> T:
    """`work(*args)`, in a thread where the call it is for is big."""
    return await asyncio.to_thread(work, *args) if size >= BIG else work(*args)


def loads(raw: bytes, decoder: JSONDecoder) -> Any:
    """`decoder.decode` of an object whose members may be long lists, item by item. Raises `ValueError`."""
    text = raw.decode(json.detect_encoding(raw), "surrogatepass")
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        return decoder.decode(text)
    value, at = _object(text, at + 1, decoder)
    if _skip(text, at) != len(text):
        raise json.JSONDecodeError("Extra data", text, _skip(text, at))
    return value


def _object(text: str, at: int, decoder: JSONDecoder) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    at = _skip(text, at)
    if text[at : at + 1] == "}":
        return members, at + 1
    while True:
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        key, at = _item(text, at, decoder)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
        at = _skip(text, at + 1)
        members[key], at = _list(text, at + 1, decoder) if text[at : at + 1] == "[" else _item(text, at, decoder)
        at, ended = _next(text, at, "}")
        if ended:
            return members, at


def _list(text: str, at: int, decoder: JSONDecoder) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = _skip(text, at)
    if text[at : at + 1] == "]":
        return items, at + 1
    while True:
        item, at = _item(text, at, decoder)
        items.append(item)
        at, ended = _next(text, at, "]")
        if ended:
            return items, at


def _item(text: str, at: int, decoder: JSONDecoder) -> tuple[Any, int]:
    try:
        return decoder.scan_once(text, at)  # type: ignore[attr-defined]
    except StopIteration as error:
        raise json.JSONDecodeError("Expecting value", text, error.value) from None


def _next(text: str, at: int, end: str) -> tuple[int, bool]:
    """Past a comma, or past the end."""
    at = _skip(text, at)
    found = text[at : at + 1]
    if found == end:
        return at + 1, True
    if found != ",":
        raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    return _skip(text, at + 1), False


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
