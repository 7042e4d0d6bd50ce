"""What the dialects share: the refusal of a request, events on the wire, and readings of small fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

PIECE = 8192
"""Longest text in one streamed delta, so that no client's line buffer overflows."""


class BadRequest(Exception):
    """The request cannot be served; the message says which field and why."""


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event. Lone surrogates, which UTF-8 cannot carry, become question marks."""
    line = b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"
    return line if name is None else f"event: {name}\n".encode() + line


def pieces(text: str) -> Iterator[str]:
    """`text` in deltas of at most `PIECE` characters."""
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]


def folded(parts: list[dict[str, Any]]) -> Any:
    """The content of text parts: a plain string where there is one, as clients send the same message in both forms."""
    return parts[0]["text"] if len(parts) == 1 else parts


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
