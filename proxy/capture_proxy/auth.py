"""Keys: where they stand in a request, and how they are compared.

Invariant: keys are kept and compared as sha256 hashes, in constant time; no key is ever logged or stored.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from aiohttp import web

KEY_PREFIX = "hrl-"


def new_key() -> str:
    """A session key with 256 random bits."""
    return KEY_PREFIX + secrets.token_hex(32)


def key_hash(key: str) -> str:
    """sha256, hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def same_key(key: str, expected_hash: str) -> bool:
    return hmac.compare_digest(key_hash(key), expected_hash)


def bearer(request: web.Request) -> str | None:
    """The key after `Authorization: Bearer`, if any."""
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" and key.strip() else None


def agent_key(request: web.Request) -> str | None:
    """The key an agent sent: in the path, in one of the headers that clients use, or as `?key=`."""
    headers = request.headers
    return (
        request.match_info.get("key")
        or bearer(request)
        or headers.get("x-api-key")
        or headers.get("x-goog-api-key")
        or request.query.get("key")
    )
