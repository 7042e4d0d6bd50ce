"""Which worker a request belongs to, from its first bytes alone.

Invariant: keys and session ids are made so that their sha256 names the worker that made them; so a request finds its session without any
shared state, and one with an unknown key finds a worker that answers what every worker would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

from capture_proxy.auth import key_hash

MAX_HEAD = 65536
"""Longest request line and headers; aiohttp takes less."""
EVERYONES = ("/hold", "/release", "/health", "/metrics")
"""Routes that all workers answer together."""


def owner(name: str, workers: int) -> int:
    """The worker of a key or a session id."""
    return int(key_hash(name)[:8], 16) % workers


@dataclass(frozen=True)
class Target:
    """Where a request goes."""

    kind: Literal["new", "everyone", "session", "key"]
    name: str = ""
    """The session's id or the key."""
    ends: bool = False
    """It seals or deletes the session."""


def target_of(head: bytes) -> Target:
    """Of the bytes up to the empty line."""
    lines = head.decode("latin-1").split("\r\n")
    method, _, rest = lines[0].partition(" ")
    try:
        parts = urlsplit(rest.rpartition(" ")[0] or rest)
    except ValueError:
        return Target("key")  # whichever worker it is, it says 400
    steps = [unquote(step) for step in parts.path.split("/")[1:]]
    if steps == ["sessions"]:
        return Target("new")
    if steps[:1] == ["sessions"]:
        return Target("session", steps[1], ends=method == "DELETE" or steps[2:] == ["seal"])
    if parts.path in EVERYONES:
        return Target("everyone")
    if steps[:1] == ["s"] and len(steps) > 2:
        return Target("key", steps[1])
    return Target("key", next(_keys(_headers(lines), parts.query), ""))


def bearer_of(head: bytes) -> str:
    """The key in the `Authorization` header; empty where there is none."""
    kind, _, key = _headers(head.decode("latin-1").split("\r\n")).get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _headers(lines: list[str]) -> dict[str, str]:
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}


def _keys(headers: dict[str, str], query: str) -> Iterator[str]:
    """As `auth.agent_key` looks for them."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        yield key.strip()
    for name in ("x-api-key", "x-goog-api-key"):
        if headers.get(name):
            yield headers[name]
    yield from parse_qs(query).get("key", ())
