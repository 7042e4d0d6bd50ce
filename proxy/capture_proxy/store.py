"""Append-only, checksummed log of each session.

Invariant: a record that `append` has confirmed is read back whole after the proxy was killed (durability `process`) or the machine lost
power (`host`); whatever stands after the last whole record is a torn tail, is cut off and reported, and never read. Record: u32 payload
length, u32 crc32 of the payload, payload = u32 header length, JSON header, raw arrays as the header's `arrays` lists them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import struct
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from capture_proxy import fastjson

Durability = Literal["process", "host"]
Arrays = Mapping[str, npt.NDArray[Any]]

MAGIC = b"HRLSTORE1\n"
SUFFIX = ".log"
_FRAME = struct.Struct("<II")
_U32 = struct.Struct("<I")


class StoreError(Exception):
    """The log cannot be written or is not a log."""


@dataclass(frozen=True)
class Record:
    """One record as read back."""

    header: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class LogContent:
    """A log's whole records, in order."""

    records: list[Record]
    good_bytes: int
    torn_bytes: int
    """Bytes after the last whole record."""


@dataclass
class SessionLog:
    """The open log of one session. Appends of one session keep their order."""

    path: Path
    store: Store
    fd: int
    size: int
    _closed: bool = field(default=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Taken at once but where a big record is being written: then the session's next record waits for it."""

    def append(self, header: dict[str, Any], arrays: Arrays | None = None) -> asyncio.Future[None]:
        """Writes one record before it returns; the future is done when the record is as durable as the store promises.

        Raises `StoreError` when the write fails; the log is then as it was before.
        """
        self.put(frame(header, arrays or {}))
        return self.store.confirm(self.fd)

    def put(self, record: bytes) -> None:
        """Writes what `frame` gave; may run in a thread. Raises like `append`, whose future is `Store.confirm`."""
        with self._lock:
            if self._closed:
                raise StoreError(f"capture store: {self.path} is closed")
            try:
                _write_all(self.fd, record)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self.fd, self.size)
                raise StoreError(
                    f"capture store: cannot write {self.path} ({error.strerror}); free the disk or choose another --store"
                ) from error
            self.size += len(record)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self.store.forget(self.fd)
                os.close(self.fd)


class Store:
    """A folder of session logs, used by one proxy at a time."""

    def __init__(self, root: Path, durability: Durability = "process") -> None:
        self.root = root
        self.durability = durability
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._flusher: asyncio.Task[None] | None = None
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(root / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise StoreError(f"capture store {root} is in use by another proxy; stop it or give this one its own --store") from error
        self._lock: int | None = lock

    def path(self, session_id: str) -> Path:
        return self.root / (session_id + SUFFIX)

    def create(self, session_id: str) -> SessionLog:
        """Starts the log of a new session."""
        path = self.path(session_id)
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
            _write_all(fd, MAGIC)
            if self.durability == "host":
                folder = os.open(self.root, os.O_RDONLY)
                os.fsync(folder)
                os.close(folder)
        except OSError as error:
            raise StoreError(f"capture store: cannot create {path} ({error.strerror})") from error
        return SessionLog(path, self, fd, len(MAGIC))

    def reopen(self, session_id: str, content: LogContent) -> SessionLog:
        """Goes on with an existing log after its last whole record."""
        path = self.path(session_id)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(fd, content.good_bytes)
        return SessionLog(path, self, fd, content.good_bytes)

    def session_ids(self) -> list[str]:
        """The sessions that have a log here."""
        return sorted(path.name.removesuffix(SUFFIX) for path in self.root.glob("*" + SUFFIX))

    def confirm(self, fd: int) -> asyncio.Future[None]:
        """A future for what was just written to `fd`: done at once, or with the next group fdatasync."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.durability == "process":
            future.set_result(None)
            return future
        self._waiting.setdefault(fd, []).append(future)
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        return future

    def forget(self, fd: int) -> None:
        """`fd` is about to be closed: what waits for it is synced now."""
        if waiting := self._waiting.pop(fd, None):
            os.fdatasync(fd)
            _resolve(waiting, None)

    async def _flush(self) -> None:
        """One fdatasync for each file with records that wait, for as long as there are any."""
        while self._waiting:
            batch, self._waiting = self._waiting, {}
            copies = {os.dup(fd): waiting for fd, waiting in batch.items()}
            for fd, waiting in copies.items():
                try:
                    await asyncio.to_thread(os.fdatasync, fd)
                except OSError as error:
                    _resolve(waiting, StoreError(f"capture store: fdatasync failed ({error.strerror})"))
                else:
                    _resolve(waiting, None)
                finally:
                    os.close(fd)

    async def close(self) -> None:
        """Waits for what is not yet durable and gives the folder free."""
        if self._flusher is not None:
            await self._flusher
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def read_log(path: Path) -> LogContent:
    """All whole records of a log. Raises `StoreError` when the file is no log at all."""
    data = path.read_bytes()
    if data[: len(MAGIC)] != MAGIC:
        if MAGIC.startswith(data):
            return LogContent([], 0, len(data))
        raise StoreError(f"{path} is not a capture log of this version")
    view = memoryview(data)
    records: list[Record] = []
    at = len(MAGIC)
    while at + _FRAME.size <= len(data):
        size, crc = _FRAME.unpack_from(view, at)
        payload = view[at + _FRAME.size : at + _FRAME.size + size]
        if len(payload) < size or zlib.crc32(payload) != crc:
            break
        records.append(_record(payload))
        at += _FRAME.size + size
    return LogContent(records, at, len(data) - at)


def frame(header: dict[str, Any], arrays: Arrays) -> bytes:
    """A record as it stands in the log."""
    described = {**header, "arrays": [[name, array.dtype.str, len(array)] for name, array in arrays.items()]}
    raw = fastjson.dumps(described)
    payload = b"".join([_U32.pack(len(raw)), raw, *(np.ascontiguousarray(array).tobytes() for array in arrays.values())])
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _record(payload: memoryview) -> Record:
    (size,) = _U32.unpack_from(payload, 0)
    at = _U32.size + size
    header = json.loads(bytes(payload[_U32.size : at]))
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, dtype, length in header.pop("arrays"):
        arrays[name] = np.frombuffer(payload, dtype=dtype, count=length, offset=at).copy()
        at += arrays[name].nbytes
    return Record(header, arrays)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _resolve(waiting: list[asyncio.Future[None]], error: StoreError | None) -> None:
    for future in waiting:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
