"""What the dialects share: the refusal of a request, events on the wire, and readings of small fields."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from capture_proxy import bigjson

PIECE = 8192
"""Longest text in one streamed delta, so that no client's line buffer overflows."""

MAX_DEPTH = 200
"""Of nested lists and objects."""
_NESTED = (dict, list)


_LINE_BREAKS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Some clients (whatever reads with httpx's `iter_lines`) break a line at these too; JSON may write them as escapes."""


class BadRequest(Exception):
    """The request cannot be served; the message says which field and why."""


def loads(text: str | bytes, big: bool = False) -> Any:
    """JSON as every client reads it: no NaN or infinity, and no deeper than `MAX_DEPTH`. Raises `ValueError`. `big`: see `bigjson`."""
    try:
        if big and isinstance(text, bytes):
            value = bigjson.loads(text, json.JSONDecoder(parse_constant=_not_json, parse_float=_finite))
        else:
            value = json.loads(text, parse_constant=_not_json, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    # Text has brackets too, so few of them are enough only to say no.
    if len(text) < MAX_DEPTH or (isinstance(text, bytes) and text.count(b"[") + text.count(b"{") <= MAX_DEPTH):
        return value
    level = [value] if type(value) in _NESTED else []
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in (item.values() if type(item) is dict else item) if type(child) in _NESTED]
        if not level:
            return value
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def arguments_object(text: str) -> dict[str, Any] | None:
    """A tool call's arguments as an object; {} where there are none, None where they are no JSON object."""
    if not text.strip():
        return {}
    try:
        value = loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is out of range")
    return value


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event. Lone surrogates, which UTF-8 cannot carry, become question marks."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        text = text.translate(_LINE_BREAKS)
    line = b"data: " + text.encode("utf-8", "replace") + b"\n\n"
    return line if name is None else f"event: {name}\n".encode() + line


def pieces(text: str) -> Iterator[str]:
    """`text` in deltas of at most `PIECE` characters."""
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]


def folded(parts: list[dict[str, Any]]) -> Any:
    """The content of parts: a plain string where there is one text, as clients send the same message in both forms."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def content_of(content: Any, where: str, kinds: tuple[str, ...], image: Callable[[Any, str], dict[str, Any] | None]) -> Any:
    """OpenAI's content: a string, null, or a list of parts. Raises `BadRequest`.

    Parts are texts of one of `kinds` (a refusal is text too), or what `image` makes a part of; it returns None for anything but an image.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where}: must be a string, a list of parts or null")
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if (picture := image(part, f"{where}[{i}]")) is not None:
            parts.append(picture)
            continue
        field = "refusal" if kind == "refusal" else "text"
        if kind not in (*kinds, "refusal") or not isinstance(part.get(field), str):
            raise BadRequest(f"{where}[{i}]: a part of type {kind!r} is not served here")
        parts.append({"type": "text", "text": part[field]})
    return folded(parts) if parts else ""


def whole_number(value: Any, field: str) -> int | None:
    """`value`, if it is None or a whole number from 1 on. Raises `BadRequest`."""
    if value is None or (type(value) is int and value >= 1):
        return value
    raise BadRequest(f"{field}: must be a whole number >= 1, got {value!r}")


def stop_strings(value: Any, field: str) -> tuple[str, ...]:
    """A string or a list of them. Raises `BadRequest`."""
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise BadRequest(f"{field}: must be a string or a list of non-empty strings")
    return tuple(items)


def retried(headers: Any) -> bool:
    """Whether the vendor's SDK says that this request repeats one that it gave up."""
    count = headers.get("x-stainless-retry-count", "0")
    return count.isdigit() and int(count) > 0
