"""Token ids as arrays, and the digests by which prefixes of them are known.

Invariant: a digest is a function of the ids alone, whatever array type they came in.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
MAX_ID = 2**31 - 1
DIGEST_BYTES = 16


class PrefixHash:
    """blake2b-16 of prefixes of an array of ids as little-endian int32. Each id is read once while the asked lengths grow."""

    def __init__(self, ids: npt.ArrayLike) -> None:
        self._raw = _raw(ids)
        self._state = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._done = 0

    def at(self, length: int) -> bytes:
        """The digest of the first `length` ids."""
        end = 4 * length
        if end < self._done:
            self._state, self._done = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
        self._state.update(self._raw[self._done : end])
        self._done = end
        return self._state.copy().digest()

    def whole(self) -> bytes:
        """The digest of all ids."""
        return self.at(len(self._raw) // 4)

    def followed_by(self, ids: npt.ArrayLike) -> bytes:
        """The digest of all ids and then `ids`."""
        self.whole()
        state = self._state.copy()
        state.update(_raw(ids))
        return state.digest()


def _raw(ids: npt.ArrayLike) -> memoryview:
    return memoryview(np.ascontiguousarray(ids, dtype="<i4")).cast("B")
