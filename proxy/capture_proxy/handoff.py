"""Takes listening sockets from control and serves one session's agent routes on each.

Invariant: only a holder of the admin key can hand a socket over, the socket serves that one session and no admin route, and it is closed at
the session's seal. The socket may live in another network namespace: the proxy needs no access to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

from aiohttp import web

from capture_proxy.app import Proxy, agent_app, server
from capture_proxy.auth import same_key

MAX_LINE = 65536
TIMEOUT_S = 10.0
ACCEPT_AGAIN_S = 0.2

log = logging.getLogger(__name__)


class HandoffSocket:
    """The Unix stream socket on which listeners are handed over, whoever takes them."""

    def __init__(self, path: Path, admin_key_hash: str) -> None:
        self.path = path
        self._admin_key_hash = admin_key_hash
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Binds the path, readable by this user only. A path left by a killed proxy is replaced."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.setblocking(False)
        old = os.umask(0o177)
        try:
            server.bind(str(self.path))
        finally:
            os.umask(old)
        server.listen(64)
        self._socket = server
        self._accepting = asyncio.create_task(self._accept(server))

    async def close(self) -> None:
        for task in [self._accepting, *self._serving]:
            if task is not None:
                task.cancel()
                await asyncio.wait({task}, timeout=1.0)
        if self._socket is not None:
            self._socket.close()
            self.path.unlink(missing_ok=True)

    async def _accept(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(server)
            except OSError as error:
                log.error("cannot take listeners: %s", error)  # out of descriptors, for one
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            task = asyncio.create_task(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.setblocking(False)
            fds: list[int] = []
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    line = await _receive(connection, fds)
                    answer = await self._take(line, fds)
                    await asyncio.get_running_loop().sock_sendall(connection, json.dumps(answer).encode() + b"\n")
            except (OSError, TimeoutError) as error:
                log.warning("listener hand-off failed: %s", error or type(error).__name__)
            finally:
                for fd in fds:
                    os.close(fd)

    async def _take(self, line: bytes, fds: list[int]) -> dict[str, Any]:
        """The answer to an order and the descriptors that came with it; those that it leaves in the list are closed."""
        try:
            order = json.loads(line)
            key, session_id = str(order["admin_key"]), str(order["session_id"])
        except (ValueError, KeyError, TypeError):
            return refused("send one JSON line with admin_key and session_id")
        if not same_key(key, self._admin_key_hash):
            return refused("the admin key is wrong")
        if len(fds) != 1:
            return refused(f"send exactly one listening socket, got {len(fds)}")
        return await self._listen(line, session_id, fds)

    async def _listen(self, line: bytes, session_id: str, fds: list[int]) -> dict[str, Any]:
        """The answer to an order with the right key and one descriptor."""
        raise NotImplementedError


class HandoffServer(HandoffSocket):
    """Serves the listeners in this process."""

    def __init__(self, proxy: Proxy, path: Path) -> None:
        super().__init__(path, proxy.settings.admin_key_hash)
        self.proxy = proxy

    async def _listen(self, line: bytes, session_id: str, fds: list[int]) -> dict[str, Any]:
        """Starts serving on the one socket in `fds` and takes it out of the list, or says why not."""
        session = self.proxy.sessions.get(session_id)
        if session is None or session.state == "sealed":
            return refused("no such open session")
        listener = socket.socket(fileno=fds.pop())
        try:
            if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError("the socket is not listening")
            listener.setblocking(False)
            runner = server(agent_app(self.proxy, only=session_id), 1.0)
            await runner.setup()
            await web.SockSite(runner, listener).start()
        except OSError as error:
            listener.close()
            return refused(f"cannot serve on the socket: {error}")
        self.proxy.listeners.setdefault(session_id, []).append(runner)
        return {"ok": True}


async def _receive(connection: socket.socket, fds: list[int]) -> bytes:
    """One line; descriptors that come with it are put into `fds`."""
    loop = asyncio.get_running_loop()
    line = b""
    while not line.endswith(b"\n"):
        ready = asyncio.Event()
        loop.add_reader(connection, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(connection)
        part, received, _, _ = socket.recv_fds(connection, MAX_LINE, 4)
        fds += received
        if not part or len(line) > MAX_LINE:
            break
        line += part
    return line


def refused(reason: str) -> dict[str, Any]:
    return {"ok": False, "error": reason}
