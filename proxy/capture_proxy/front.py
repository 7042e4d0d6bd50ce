"""Several workers behind one address (`--workers N`).

Each session belongs to one worker, a process with a store folder of its own. The front accepts connections, looks at the first request
without taking it, and passes the connection itself (its descriptor) to the worker: no byte of a call goes through the front, so what a
worker knows of its client (gone, slow, has its answer) is what a lone proxy knows, and the front costs next to nothing. The price: an
answer closes its connection, and TLS has to end before the front. A front that forwards bytes would keep both, and would make "delivered"
mean "the front has it"; SO_REUSEPORT alone cannot choose by key.

Invariant: a session's requests, and listeners handed over for it, go to the one worker that has its log. A worker that dies is started
again on that log, under the hold and version in force, with its listeners.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from capture_proxy.app import server
from capture_proxy.auth import same_key
from capture_proxy.front_admin import FrontAdmin, WorkerDown
from capture_proxy.handoff import HandoffSocket, refused
from capture_proxy.routing import MAX_HEAD, Target, bearer_of, owner, target_of
from capture_proxy.settings import Settings
from capture_proxy.worker import handoff_path, http_path

START_S = 60.0
"""How long a worker may take to read its store."""
HEAD_S = 30.0
"""How long a client may take to send its first request's headers."""
MAX_RESTARTS = 5
"""Of a worker that does not stay up for `STABLE_S`; then the front gives up."""
STABLE_S = 60.0
SHUTDOWN_S = 4.0
_BUSY = b'{"error": {"message": "this session\'s worker is starting again", "type": "server_error", "code": null}}'
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)
)

log = logging.getLogger(__name__)


class Worker:
    """One worker process as the front sees it."""

    def __init__(self, index: int, argv: list[str], folder: Path) -> None:
        self.index = index
        self.up = asyncio.Event()
        self.restarts = 0
        self._argv = argv
        self._folder = folder
        self._channel: socket.socket | None = None
        self._child: asyncio.subprocess.Process | None = None
        self.http = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(http_path(folder, index))), timeout=aiohttp.ClientTimeout(total=10), trust_env=False
        )

    async def start(self) -> None:
        """Returns when it is ready. Raises `OSError`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            flag = f"{self.index}:{theirs.fileno()}:{self._folder}"
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "capture_proxy", *self._argv, "--worker", flag,
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
        finally:
            theirs.close()
        ours.setblocking(False)
        self._channel = ours
        assert self._child.stdout is not None
        try:
            line = await asyncio.wait_for(self._child.stdout.readline(), START_S)
        except TimeoutError:
            line = b""
        if not line.endswith(b"is ready\n"):
            await self.kill()
            raise OSError(f"worker {self.index} did not start; it says why above")

    async def wait(self) -> None:
        """Returns when it has ended."""
        assert self._child is not None
        await self._child.wait()
        self.up.clear()

    def give(self, connection: socket.socket) -> bool:
        """Passes a client's connection on; False where the worker cannot take it now. The caller closes its own copy."""
        if self._channel is None:
            return False
        try:
            socket.send_fds(self._channel, [b"c"], [connection.fileno()])
        except OSError:
            return False
        return True

    def terminate(self) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.send_signal(signal.SIGTERM)

    async def kill(self) -> None:
        self.up.clear()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
            await self._child.wait()


class Front:
    """Accepts, routes, supervises."""

    def __init__(self, settings: Settings, argv: list[str], folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.workers = [Worker(index, argv, folder) for index in range(settings.workers)]
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what makes the front give up."""
        self.admin = FrontAdmin(settings, self.workers)
        self.listeners: dict[str, list[tuple[bytes, int]]] = {}
        """Session id -> hand-off lines and our copies of the listeners, for a worker that has to start again."""
        self._runner = server(self.admin.app(), SHUTDOWN_S)
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        await self._runner.setup()
        await asyncio.gather(*(worker.start() for worker in self.workers))
        for worker in self.workers:
            worker.up.set()
            self._spawn(self._supervise(worker))
        self._spawn(self._accept(listener))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.workers:
            worker.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                await asyncio.gather(*(worker.wait() for worker in self.workers if worker.up.is_set()))
        for worker in self.workers:
            await worker.kill()
            await worker.http.close()
        for session_id in list(self.listeners):
            self.forget_listeners(session_id)
        await self._runner.cleanup()

    async def take_listener(self, line: bytes, session_id: str, fd: int) -> dict[str, Any]:
        """Hands a listener on to its session's worker, and keeps a copy while the session is open."""
        answer = await self._hand_over(self.workers[owner(session_id, len(self.workers))], line, fd)
        if answer.get("ok"):
            self.listeners.setdefault(session_id, []).append((line, os.dup(fd)))
        return answer

    def forget_listeners(self, session_id: str) -> None:
        for _, fd in self.listeners.pop(session_id, ()):
            os.close(fd)

    async def _hand_over(self, worker: Worker, line: bytes, fd: int) -> dict[str, Any]:
        copy = os.dup(fd)  # a seal closes ours, and its number may then be another file's
        try:
            return await asyncio.to_thread(_send_listener, handoff_path(self.folder, worker.index), line, copy)
        finally:
            os.close(copy)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.error("cannot accept: %s", error)  # out of descriptors, for one
                await asyncio.sleep(0.2)
                continue
            self._spawn(self._route(connection))

    async def _route(self, connection: socket.socket) -> None:
        with connection:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                async with asyncio.timeout(HEAD_S):
                    head = await _peek_head(connection)
            except (TimeoutError, OSError):
                return
            if head is None:
                return
            target = target_of(head)
            if target.kind == "everyone":
                # The protocol owns the connection from here on.
                await asyncio.get_running_loop().connect_accepted_socket(_factory(self._runner), connection.dup())
                return
            if target.ends and same_key(bearer_of(head), self.settings.admin_key_hash):
                self.forget_listeners(target.name)
            await self._give(self.workers[self._worker_of(target)], connection)

    def _worker_of(self, target: Target) -> int:
        if target.kind == "new":
            self._next += 1
            return self._next % len(self.workers)
        return owner(target.name, len(self.workers))

    async def _give(self, worker: Worker, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(START_S):
                while True:
                    await worker.up.wait()
                    if worker.give(connection):
                        return
                    await asyncio.sleep(0.01)  # its queue is full, or it has just died
        except TimeoutError:
            with contextlib.suppress(OSError):
                connection.send(BUSY)

    async def _supervise(self, worker: Worker) -> None:
        """Starts a dead worker again, as it was."""
        loop = asyncio.get_running_loop()
        started, failures = loop.time(), 0
        while True:
            await worker.wait()
            failures = 0 if loop.time() - started > STABLE_S else failures + 1
            log.error("worker %d died; starting it again", worker.index)
            await worker.kill()
            try:
                if failures > MAX_RESTARTS:
                    raise OSError(f"worker {worker.index} died {failures} times in a row")
                await asyncio.sleep(0 if failures < 2 else min(0.25 * 2.0**failures, 10.0))
                started = loop.time()
                await worker.start()
                await self._restore(worker)
            except (OSError, WorkerDown) as error:
                await worker.kill()  # where it runs, and could not be brought to the state of the others
                log.error("worker %d: %s", worker.index, error)
                if failures <= MAX_RESTARTS:
                    continue
                if not self.failed.done():
                    self.failed.set_exception(error)
                return

    async def _restore(self, worker: Worker) -> None:
        """The hold and the version in force first: a listener's queue may be full of calls."""
        worker.restarts += 1
        await self.admin.restore(worker)
        for session_id in [name for name in self.listeners if owner(name, len(self.workers)) == worker.index]:
            for line, fd in self.listeners.get(session_id, [])[:]:
                if session_id not in self.listeners:
                    break  # sealed meanwhile
                answer = await self._hand_over(worker, line, fd)
                if not answer.get("ok"):
                    log.error("session %s: its listener is lost: %s", session_id, answer.get("error"))
                    self.forget_listeners(session_id)
                    break

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class FrontHandoff(HandoffSocket):
    """Takes listeners for all workers."""

    def __init__(self, front: Front, path: Path) -> None:
        super().__init__(path, front.settings.admin_key_hash)
        self.front = front

    async def _listen(self, line: bytes, session_id: str, fds: list[int]) -> dict[str, Any]:
        return await self.front.take_listener(line, session_id, fds[0])


async def serve_front(settings: Settings, argv: list[str], announce: Callable[[int], None]) -> None:
    """Runs until SIGTERM or SIGINT. Raises `OSError` where it cannot."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with (
        tempfile.TemporaryDirectory(prefix="hrl-") as folder,
        socket.create_server((settings.host, settings.port), family=family, backlog=1024) as listener,
    ):
        listener.setblocking(False)
        front = Front(settings, argv, Path(folder))
        handoff = FrontHandoff(front, settings.handoff_socket) if settings.handoff_socket is not None else None
        try:
            await front.start(listener)
            if handoff is not None:
                handoff.start()
            announce(listener.getsockname()[1])
            stopping = asyncio.create_task(stop.wait())
            either: set[asyncio.Future[Any]] = {stopping, front.failed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if front.failed.done():
                front.failed.result()
        finally:
            if handoff is not None:
                await handoff.close()
            await front.close()


def check_store(root: Path, workers: int) -> None:
    """A store belongs to one number of workers: sessions are found by it. Raises `OSError`."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    note = root / "workers"
    written = int(note.read_text()) if note.exists() else 1 if any(root.glob("*.log")) else workers
    if written != workers:
        raise OSError(
            f"--workers: the sessions in {root} belong to {written} workers; start it with --workers {written}, or choose another --store"
        )
    if workers > 1:
        note.write_text(f"{workers}\n")


async def _peek_head(connection: socket.socket) -> bytes | None:
    """The first request up to its empty line, left in the connection; None where the client has gone."""
    loop = asyncio.get_running_loop()
    seen = 0
    while True:
        readable = asyncio.Event()
        loop.add_reader(connection, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(connection)
        data = connection.recv(MAX_HEAD, socket.MSG_PEEK)
        if not data:
            return None
        if b"\r\n\r\n" in data or len(data) == MAX_HEAD:
            return data.partition(b"\r\n\r\n")[0]
        if len(data) == seen:
            await asyncio.sleep(0.01)  # what is there keeps the connection readable
        seen = len(data)


def _send_listener(path: Path, line: bytes, fd: int) -> dict[str, Any]:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
            control.settimeout(10.0)
            control.connect(str(path))
            socket.send_fds(control, [line], [fd])
            answer = b""
            while not answer.endswith(b"\n") and (part := control.recv(4096)):
                answer += part
        read = json.loads(answer)
    except (OSError, ValueError) as error:
        return refused(f"the session's worker does not answer: {error}")
    return dict(read)


def _factory(runner: web.AppRunner) -> web.Server:
    assert runner.server is not None
    return runner.server
