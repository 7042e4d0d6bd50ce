"""Binary form of a list of turns, linear in the tokens.

Invariant: `decode(encode(turns)) == turns` bit for bit, each turn stores only what it adds to an earlier one, and any changed or missing
byte is an error. Layout (little endian): magic, blake2b-16 of everything after it, turn count, then per turn a JSON header and four raw
arrays (prompt tail, completion ids, logprobs, completion mask). The prompt part of a loss mask is zero by definition and not stored.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_proxy import delta
from capture_proxy.ids import Ids

MAGIC = b"HRLTRACE1\n"
_DIGEST = 16
_U32 = struct.Struct("<I")

Logps = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]


@dataclass
class PlainTurn:
    """One turn as plain parts: what the binary form holds, before any check of meaning."""

    header: dict[str, Any]
    """`node_id`, `response`, `metadata`."""
    request: dict[str, Any]
    prompt: Ids
    completion: Ids
    logps: Logps
    mask: Mask
    """0/1 for each completion token."""


def common_prefix(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Length of the longest common prefix of two id arrays."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def common_suffix(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Length of the longest common suffix of two id arrays."""
    return common_prefix(a[::-1], b[::-1])


def encode(turns: list[PlainTurn]) -> bytes:
    """The binary form of `turns`; a turn's base is its `metadata.parent` where that came earlier, else the turn before it."""
    index = {turn.header["node_id"]: i for i, turn in enumerate(turns)}
    out = [_U32.pack(len(turns))]
    for i, turn in enumerate(turns):
        parent = index.get(turn.header["metadata"].get("parent"), i)
        base = parent if parent < i else i - 1
        keep = 0
        if base >= 0:
            head = common_prefix(turns[base].prompt, turn.prompt)
            keep = head
            if head == len(turns[base].prompt):
                keep += common_prefix(turns[base].completion, turn.prompt[head:])
        tail = turn.prompt[keep:]
        header = {
            **turn.header,
            "base": base,
            "keep": keep,
            "sizes": [len(tail), len(turn.completion), len(turn.logps), len(turn.mask)],
            "request": delta.encode(turns[base].request if base >= 0 else None, turn.request),
        }
        raw = json.dumps(header, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
        out += [_U32.pack(len(raw)), raw]
        out += [tail.astype("<i4").tobytes(), turn.completion.astype("<i4").tobytes()]
        out += [turn.logps.astype("<f4").tobytes(), turn.mask.astype("u1").tobytes()]
    payload = b"".join(out)
    return MAGIC + hashlib.blake2b(payload, digest_size=_DIGEST).digest() + payload


def decode(data: bytes) -> list[PlainTurn]:
    """Reads what `encode` wrote. Prompts of one conversation are views of one array, so memory is linear as well.

    Raises `ValueError` for anything that is not whole and unchanged.
    """
    start = len(MAGIC) + _DIGEST
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError("not a binary trace of this version: the first bytes are not its mark")
    payload = memoryview(data)[start:]
    if hashlib.blake2b(payload, digest_size=_DIGEST).digest() != data[len(MAGIC) : start]:
        raise ValueError("binary trace is damaged: its checksum does not match")
    (count,) = _U32.unpack_from(payload, 0)
    at = _U32.size
    headers: list[dict[str, Any]] = []
    parts: list[tuple[Ids, Ids, Logps, Mask]] = []
    for _ in range(count):
        (size,) = _U32.unpack_from(payload, at)
        at += _U32.size
        header = json.loads(bytes(payload[at : at + size]))
        at += size
        arrays: list[npt.NDArray[Any]] = []
        for dtype, n in zip(("<i4", "<i4", "<f4", "u1"), header["sizes"], strict=True):
            arrays.append(np.frombuffer(payload, dtype=dtype, count=n, offset=at))
            at += n * np.dtype(dtype).itemsize
        headers.append(header)
        parts.append((arrays[0], arrays[1], arrays[2], arrays[3]))
    totals = _rebuild(headers, parts)
    turns: list[PlainTurn] = []
    for header, (tail, completion, logps, mask), total in zip(headers, parts, totals, strict=True):
        base, keep = header["base"], header["keep"]
        request = delta.apply(turns[base].request if base >= 0 else None, header["request"])
        plain = {key: header[key] for key in ("node_id", "response", "metadata")}
        cut = keep + len(tail)
        turns.append(PlainTurn(plain, request, total[:cut], total[cut:], logps.astype(np.float32), mask.astype(np.uint8)))
        assert len(total) == cut + len(completion)
    return turns


def _rebuild(headers: list[dict[str, Any]], parts: list[tuple[Ids, Ids, Logps, Mask]]) -> list[Ids]:
    """Prompt + completion ids of each turn. A turn that another continues whole is a view of that other's array."""
    sizes = [h["keep"] + len(p[0]) + len(p[1]) for h, p in zip(headers, parts, strict=True)]
    host: list[Ids | None] = [None] * len(headers)
    for i in reversed(range(len(headers))):
        if host[i] is None:
            host[i] = np.empty(sizes[i], dtype=np.int32)
        base, keep = headers[i]["base"], headers[i]["keep"]
        if base >= 0 and host[base] is None and keep == sizes[base]:
            host[base] = host[i]
    totals: list[Ids] = []
    for i, (header, (tail, completion, _, _)) in enumerate(zip(headers, parts, strict=True)):
        array = host[i]
        assert array is not None
        base, keep = header["base"], header["keep"]
        if keep and array is not host[base]:
            array[:keep] = totals[base][:keep]
        array[keep : keep + len(tail)] = tail
        array[keep + len(tail) : sizes[i]] = completion
        totals.append(array[: sizes[i]])
    return totals
