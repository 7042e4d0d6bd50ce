"""The dynamic loader's cache (/etc/ld.so.cache), as far as it says which file is loaded for a library. Invariant: a cache that cannot be
read, or that says something else of a library known before, is not the same.

Installing a package rewrites the cache; that is harmless while every library of the image is still found where it was."""

from __future__ import annotations

import struct

_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER, _ENTRY = 48, 24


def same_libraries(before: bytes, after: bytes) -> bool:
    """Whether `after` loads, for each library that `before` knows, the same files in the same order."""
    try:
        old, new = _libraries(before), _libraries(after)
    except (struct.error, ValueError):
        return False
    return all(new.get(name) == files for name, files in old.items())


def _libraries(cache: bytes) -> dict[bytes, list[tuple[int, int, bytes]]]:
    """Name of a library -> (flags, hardware capability, path) of its files. Raises ValueError or struct.error."""
    if not cache.startswith(_MAGIC):
        raise ValueError("not a loader cache")
    (count,) = struct.unpack_from("=I", cache, len(_MAGIC))
    found: dict[bytes, list[tuple[int, int, bytes]]] = {}
    for index in range(count):
        flags, key, value, _version, capability = struct.unpack_from("=iIIIQ", cache, _HEADER + index * _ENTRY)
        found.setdefault(_text(cache, key), []).append((flags, capability, _text(cache, value)))
    return found


def _text(cache: bytes, offset: int) -> bytes:
    return cache[offset : cache.index(b"\0", offset)]
