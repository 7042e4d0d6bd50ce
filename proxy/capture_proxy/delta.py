"""A JSON body stored as what it adds to an earlier one.

Invariant: `apply(base, encode(base, body)) == body`, type for type and in key order, and the encoding of a conversation that only grew is
as long as its growth. Two values count as equal only when they would be written as the same JSON (so `1`, `1.0` and `true` differ).
"""

from __future__ import annotations

from typing import Any

from capture_proxy import fastjson

Body = dict[str, Any]


def encode(base: Body | None, body: Body) -> Body:
    """`body` relative to `base`: keys in order, those that are unchanged, list prefixes that are shared, and the rest."""
    if base is None:
        return {"set": body}
    same: list[str] = []
    prefix: dict[str, int] = {}
    rest: Body = {}
    for key, value in body.items():
        if key in base and strictly_equal(base[key], value):
            same.append(key)
        elif isinstance(value, list) and isinstance(base.get(key), list) and (shared := _shared(base[key], value)):
            prefix[key] = shared
            rest[key] = value[shared:]
        else:
            rest[key] = value
    return {"keys": list(body), "same": same, "prefix": prefix, "set": rest}


def apply(base: Body | None, delta: Body) -> Body:
    """The body that `delta` stands for. Lists and values that did not change are shared with `base`, not copied."""
    if "keys" not in delta:
        return dict(delta["set"])
    if base is None:
        raise ValueError("delta without the body that it is relative to")
    same, prefix, rest = set(delta["same"]), delta["prefix"], delta["set"]
    body: Body = {}
    for key in delta["keys"]:
        if key in same:
            body[key] = base[key]
        elif key in prefix:
            body[key] = base[key][: prefix[key]] + rest[key]
        else:
            body[key] = rest[key]
    return body


def strictly_equal(a: Any, b: Any) -> bool:
    """Equal as JSON text: same types, same key order, same values."""
    # Python's equality is the quick refusal; it takes 1, 1.0 and True for the same, and 0.0 and -0.0.
    return a is b or (a == b and fastjson.dumps(a) == fastjson.dumps(b))


def _shared(a: list[Any], b: list[Any]) -> int:
    n = min(len(a), len(b))
    if strictly_equal(a[:n], b[:n]):
        return n
    n = 0
    for x, y in zip(a, b, strict=False):
        if not strictly_equal(x, y):
            break
        n += 1
    return n
