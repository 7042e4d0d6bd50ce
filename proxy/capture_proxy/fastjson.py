"""JSON of the engine's traffic, where a list of ids is most of it.

Invariant: what is read and written is what the standard library would read and write, only faster: whatever the fast reader or writer
does not take (a lone surrogate, NaN in an answer, a whole number beyond 64 bits in a request) goes through the standard library. A list
becomes an array of ids only when every one of its elements is a whole number from 0 to `MAX_ID`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import orjson

from capture_proxy.ids import MAX_ID, Ids


def dumps(value: Any) -> bytes:
    """`value` as JSON in UTF-8; integer arrays are written as lists."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return json.dumps(value, default=np.ndarray.tolist).encode()


def loads(raw: bytes) -> Any:
    """The value in `raw`. Raises `ValueError`."""
    try:
        return orjson.loads(raw)
    except ValueError:
        return json.loads(raw)


def loads_with_ids(raw: bytes, member: str, known: Ids | None = None) -> Any:
    """The value in `raw`; where it is an object whose `member` is a list of ids, that list is an int32 array. Raises `ValueError`.

    `known` are ids that the list probably starts with: they are compared as text, which costs a quarter of reading them.
    """
    # Inside a JSON string the quotes would be escaped, so what is found is a member's name.
    name = re.compile(rb'"%s":\s*\[' % member.encode())
    found = name.search(raw)
    end = raw.find(b"]", found.end()) if found else -1
    if found is None or end < 0 or name.search(raw, end):
        return loads(raw)
    head = b"" if known is None or not len(known) else dumps(known)[1:-1] + b","
    if head and raw.startswith(head, found.end()):
        tail = parse_ids(raw[found.end() + len(head) : end])
        ids = None if tail is None or not len(tail) else np.concatenate([known, tail])
    else:
        ids = parse_ids(raw[found.end() : end])
    if ids is None:
        return loads(raw)
    value = loads(raw[: found.end()] + raw[end:])
    if not isinstance(value, dict) or value.get(member) != []:
        return loads(raw)
    value[member] = ids
    return value


def parse_ids(text: bytes) -> Ids | None:
    """Whole numbers from 0 to `MAX_ID` between commas, or None where `text` holds anything else."""
    if not text.strip():
        return np.empty(0, np.int32)
    text = text.replace(b", ", b",")
    if any(byte in text for byte in (b" ", b"\n", b"\r", b"\t", b"\v", b"\f", b"+")):
        return None  # numpy reads a blank as 0
    try:
        ids = np.fromstring(text, dtype=np.int64, sep=",")
    except ValueError:
        return None
    if len(ids) != text.count(b",") + 1 or ids.min() < 0 or ids.max() > MAX_ID:
        return None
    return ids.astype(np.int32)
