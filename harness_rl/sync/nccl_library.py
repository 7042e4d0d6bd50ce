"""The five NCCL calls that a sender needs, straight from the library that torch has loaded: no vLLM in the learner's process.

A communicator is always opened by an id that goes to the engines as data (`nccl_unique_id_b64`), which vLLM 0.32 and later take. As vLLM's
workers do, it begins with an all-reduce of one float.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from harness_rl.sync.client import SyncFailed

UNIQUE_ID_BYTES = 128
UINT8, INT32, FLOAT16, FLOAT32, BFLOAT16, SUM = 1, 2, 6, 7, 9, 0
"""ncclDataType_t and ncclRedOp_t, as nccl.h numbers them."""


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class Library(Protocol):
    """Of `libnccl.so.2`: every call gives a ncclResult_t, 0 for success."""

    ncclGetUniqueId: Any
    ncclCommInitRank: Any
    ncclAllReduce: Any
    ncclBroadcast: Any
    ncclCommAbort: Any


def load_library(name: str = "libnccl.so.2") -> Library:
    """Raises SyncFailed where there is none."""
    try:
        library: Any = ctypes.CDLL(name)
    except OSError as error:
        raise SyncFailed(f"sync backend nccl: {name} cannot be loaded ({error}); it comes with torch's CUDA build") from error
    pointer, size, whole = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for function, arguments in {
        "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
        "ncclCommInitRank": [ctypes.POINTER(pointer), whole, UniqueId, whole],
        "ncclAllReduce": [pointer, pointer, size, whole, whole, pointer, pointer],
        "ncclBroadcast": [pointer, pointer, size, whole, whole, pointer, pointer],
        "ncclCommAbort": [pointer],
    }.items():
        getattr(library, function).restype = whole
        getattr(library, function).argtypes = arguments
    found: Library = library
    return found


class Communicator:
    """Rank 0 of a group of `world` ranks. Every method but `abort` only starts work on `stream` (a CUDA stream handle)."""

    def __init__(self, library: Library, world: int) -> None:
        self._library, self._world = library, world
        self._id, self._comm = UniqueId(), ctypes.c_void_p()
        self._done("ncclGetUniqueId", library.ncclGetUniqueId(ctypes.byref(self._id)))

    @property
    def unique_id(self) -> bytes:
        return bytes(self._id)

    def join(self, on_device: Callable[[], AbstractContextManager[Any]], timeout_s: float) -> None:
        """Waits for all other ranks, in a thread that has entered `on_device()`.

        Raises SyncFailed when they do not come in time; that thread is then left behind.
        """
        failure: list[str] = []
        joined = threading.Event()

        def init() -> None:
            with on_device():
                code = self._library.ncclCommInitRank(ctypes.byref(self._comm), self._world, self._id, 0)
            if code:
                failure.append(f"ncclCommInitRank gave {code}")
            joined.set()

        threading.Thread(target=init, daemon=True, name="nccl join").start()
        if not joined.wait(timeout_s):
            raise SyncFailed(f"sync step 'connect': the engines' workers did not join the NCCL group of {self._world} in {timeout_s:g} s")
        if failure:
            raise SyncFailed(f"sync step 'connect': {failure[0]}; NCCL_DEBUG=INFO tells more")

    def all_reduce(self, address: int, count: int, stream: int) -> None:
        """Sum of float32."""
        self._done("ncclAllReduce", self._library.ncclAllReduce(address, address, count, FLOAT32, SUM, self._comm, stream))

    def broadcast(self, address: int, count: int, kind: int, stream: int) -> None:
        """`count` values from here to all; all must name the same count and kind (a ncclDataType_t)."""
        self._done("ncclBroadcast", self._library.ncclBroadcast(address, address, count, kind, 0, self._comm, stream))

    def abort(self) -> None:
        """Ends it, and what is under way in it. Returns at once: NCCL may take its time, in a thread that may be left behind."""
        if self._comm:
            comm, self._comm = self._comm, ctypes.c_void_p()
            threading.Thread(target=self._library.ncclCommAbort, args=(comm,), daemon=True, name="nccl abort").start()

    def _done(self, call: str, code: int) -> None:
        if code:
            raise SyncFailed(f"sync backend nccl: {call} gave {code}; NCCL_DEBUG=INFO tells more")
