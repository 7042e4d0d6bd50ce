"""The owner's end of the conversation with a sandbox's supervisor (supervisor.py lists the messages). Invariant: a request is sent whole or
fails by name, and every descriptor that arrives is handed on."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import RuntimeRequestError

log = logging.getLogger(__name__)
_MESSAGE_LIMIT = 1 << 17
_MAX_DESCRIPTORS = 4


class Channel:
    """Owns its socket. `on_message` gets each message with its descriptors, `on_end` the reason once there are no more."""

    def __init__(self, sock: socket.socket, on_message: Callable[[dict[str, Any], list[int]], None], on_end: Callable[[str], None]) -> None:
        self._sock, self._on_message, self._on_end = sock, on_message, on_end
        sock.setblocking(False)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._read)

    async def send(self, header: Mapping[str, Any], spec: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """`spec` travels in a memfd, the first descriptor. Raises OSError when nobody is there, RuntimeRequestError when nobody reads."""
        memfd = _in_memory(json.dumps(spec).encode())
        try:
            for _ in range(100):
                try:
                    socket.send_fds(self._sock, [json.dumps(header).encode()], [memfd, *fds])
                    return
                except BlockingIOError:
                    await asyncio.sleep(0.01)
            raise RuntimeRequestError("the sandbox's supervisor does not take requests")
        finally:
            os.close(memfd)

    def _read(self) -> None:
        while True:
            try:
                data, fds, _flags, _address = socket.recv_fds(self._sock, _MESSAGE_LIMIT, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError as error:
                data, fds = b"", []
                log.debug("a supervisor's channel broke: %s", error)
            if not data:
                asyncio.get_running_loop().remove_reader(self._sock.fileno())
                self._on_end("its supervisor ended")
                return
            self._on_message(json.loads(data), list(fds))

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()


def _in_memory(data: bytes) -> int:
    try:
        memfd = os.memfd_create("request", os.MFD_CLOEXEC)
    except OSError as error:
        raise RuntimeRequestError(f"cannot prepare a request to the sandbox: {error}") from error
    with open(memfd, "wb", closefd=False) as file:
        file.write(data)
    return memfd
