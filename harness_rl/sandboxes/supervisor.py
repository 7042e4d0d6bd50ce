"""The host-side process of one session: boots the sandbox, keeps its namespaces, starts every command in it. Invariant: it ends when its
owner does, and everything of the session's (mounts, namespaces, processes) ends with it.

It talks to its owner over a SOCK_SEQPACKET pair. Requests are one JSON object with descriptors attached in the order of its "fds"; large
content (command, environment) travels in a memfd, so that it is on no disk and has no size limit. Each command's output goes to a file on
a tmpfs of its own that is detached at once: size-limited, freed with its last descriptor, and no pipe that a background child could hold
open.

    owner -> supervisor   exec {id, fds: [spec, stdin?, stdout?]} · clean {id, fds: [spec]} · stop
    supervisor -> owner   ready {init_pid, fds: [listener?]} · failed {error} · started {id, fds: [stdout, stderr]} · exit {id, code,
    error, report} · dead

It and the modules that it imports do without dataclasses and other slow imports: their start-up is part of every rollout.
"""

from __future__ import annotations

import codecs
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NamedTuple

from . import boot, changed, clean, launch
from . import linux as lx

_IO = f"{boot.BASE}/io"
_MESSAGE_LIMIT = 65536
_REPORT_LIMIT = 65536
_SPARE = 8
"""Storage counts as full when less than this part of it is free."""


class Running(NamedTuple):
    id: str
    pid: int
    report: int
    """Read end of the pipe on which the child says why it could not start, or what it found."""


class Supervisor:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._linux = lx.load()
        self._last_capability = lx.last_capability()
        self._running: dict[int, Running] = {}
        self._poll = select.poll()

    def run(self) -> int:
        self._linux.set_name("hrl-sandbox")
        self._linux.set_undumpable()
        _request, fds = self._receive()
        spec = _read_all(fds[0])
        spec["filter"] = self._filter = bytes.fromhex(spec["filter"])
        owner = os.pidfd_open(spec["owner_pid"])
        try:
            boot.prepare(self._linux, spec)
            os.mkdir(_IO, 0o700)
            self._entrance = boot.start(self._linux, spec)
            listeners = [boot.listen(spec["port"])] if spec["port"] else []
        except (OSError, boot.BootFailed, ValueError) as error:
            self._send({"event": "failed", "error": str(error)})
            return 1
        self._send({"event": "ready", "init_pid": self._entrance.init_pid}, [listener.fileno() for listener in listeners])
        for listener in listeners:
            listener.close()
        # Forked children read the agent's files: from here on nothing may be imported.
        sys.path.clear()
        sys.meta_path.clear()
        for fd in (self._channel.fileno(), owner, self._entrance.bwrap_pidfd):
            self._poll.register(fd, select.POLLIN)
        while True:
            for fd, _event in self._poll.poll():
                if fd == owner:
                    return 0
                if fd == self._entrance.bwrap_pidfd:
                    self._send({"event": "dead"})
                    return 1
                if fd in self._running:
                    self._finish(fd)
                elif not self._serve():
                    return 0

    def _serve(self) -> bool:
        """Answer one request; False when the owner is gone or says stop."""
        request, fds = self._receive()
        if request["op"] == "stop":
            return False
        spec = _read_all(fds[0])
        given = dict(zip(request["fds"], fds, strict=True))
        if request["op"] == "exec":
            self._execute(request["id"], spec, given.get("stdin"), given.get("stdout"))
        else:
            self._clean(request["id"], spec)
        for fd in fds[1:]:
            os.close(fd)
        return True

    def _execute(self, identity: str, spec: dict[str, Any], stdin: int | None, stdout: int | None) -> None:
        self._linux.mount("harness-rl-io", _IO, "tmpfs", lx.MS_NOSUID | lx.MS_NODEV, f"mode=700,size={spec['capture_bytes']}")
        captured = [os.open(f"{_IO}/{name}", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600) for name in ("stdout", "stderr")]
        for fd in captured:
            os.fchmod(fd, 0o666)  # a command may reopen its own output as /dev/stdout
        self._linux.detach(_IO)
        source = os.open("/dev/null", os.O_RDONLY) if stdin is None else stdin
        targets = [source, captured[0] if stdout is None else stdout, captured[1]]

        def command() -> bytes:
            user = launch.enter(self._linux, self._entrance, spec["cgroups"], self._filter, spec["user"], self._last_capability)
            launch.execute(spec, user)
            return b""

        self._fork(identity, command, targets)
        self._send({"event": "started", "id": identity}, captured)
        for fd in (*captured, *([source] if stdin is None else [])):
            os.close(fd)

    def _clean(self, identity: str, spec: dict[str, Any]) -> None:
        """Empty folders with this process's own code: the agent may have replaced the sandbox's `rm` and `find`."""

        def work() -> bytes:
            replaced, failed = _replaced(spec["search"], spec["work"], spec["limit"])
            storage = os.open(boot.STORE, os.O_RDONLY | os.O_DIRECTORY)
            launch.enter(self._linux, self._entrance, spec["cgroups"], self._filter, None, self._last_capability)
            report = clean.reset_folders(spec["folders"], spec["limit"])
            room = os.fstatvfs(storage)
            report["hindered"] = [reason for reason in (failed, report.pop("failed"), _full(room)) if reason]
            return json.dumps({**report, "replaced": replaced}).encode()

        null = os.open("/dev/null", os.O_RDWR)
        self._fork(identity, work, [null, null, null])
        os.close(null)

    def _fork(self, identity: str, work: Any, targets: list[int]) -> None:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 126
            try:
                for number, fd in enumerate([os.dup(fd) for fd in targets]):
                    os.dup2(fd, number)
                _close_others({0, 1, 2, write, self._entrance.pidfd, self._entrance.root})
                os.write(write, work())
                code = 0
            except BaseException as error:  # noqa: BLE001 - reported to the owner; a fork of this process must never run on
                os.write(write, f"!{type(error).__name__}: {error}".encode("utf-8", "replace")[:4096])
            finally:
                os._exit(code)
        os.close(write)
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = Running(identity, pid, read)
        self._poll.register(pidfd, select.POLLIN)

    def _finish(self, pidfd: int) -> None:
        run = self._running.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(run.pid, 0)[1])
        os.set_blocking(run.report, False)
        try:
            report = os.read(run.report, _REPORT_LIMIT)
        except BlockingIOError:
            report = b""
        os.close(run.report)
        text = report.decode("utf-8", "replace")
        failed = text.startswith("!")
        self._send(
            {
                "event": "exit",
                "id": run.id,
                "code": 128 - code if code < 0 else code,
                "error": text[1:] if failed else "",
                "report": "" if failed else text,
            }
        )

    def _send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        try:
            socket.send_fds(self._channel, [json.dumps(message).encode()], fds or [])
        except (BrokenPipeError, ConnectionError):
            os._exit(0)

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        data, fds, _flags, _address = socket.recv_fds(self._channel, _MESSAGE_LIMIT, 4)
        return (json.loads(data) if data else {"op": "stop"}), list(fds)


def _replaced(search: list[str], work: str, limit: int) -> tuple[list[str], str]:
    """Programs that the session replaced, and why they could not all be found; compiled modules that it added are removed."""
    upper, image, root = (os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (boot.UPPER, boot.IMAGE, boot.ROOT))
    changes, failed = changed.Changes(upper, image, search, work), ""
    try:
        changes.find()
        clean.remove_below(root, changes.caches)
    except OSError as error:
        failed = f"its programs cannot be compared with the image's: {error.strerror or error}"
    for fd in (upper, image, root):
        os.close(fd)
    return [clean.shown(path) for path in changes.replaced[:limit]], failed


def _full(room: os.statvfs_result) -> str:
    """What is said of storage that has next to no room for the verifier's files."""
    if room.f_bavail * _SPARE < room.f_blocks:
        return f"its disk quota is full: {room.f_bavail * room.f_frsize >> 10} KiB of {room.f_blocks * room.f_frsize >> 10} are left"
    if room.f_files and room.f_favail * _SPARE < room.f_files:
        return f"its disk quota is full: {room.f_favail} of {room.f_files} files are left"
    return ""


def _read_all(fd: int) -> dict[str, Any]:
    """Read a memfd and close it."""
    with open(fd, "rb") as file:
        file.seek(0)
        return dict(json.loads(file.read()))


def _close_others(keep: set[int]) -> None:
    low = 0
    for fd in sorted(keep):
        if low < fd:  # closerange(n, n) closes everything from n on
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 4096)


def main(channel_fd: int) -> int:
    for name in ("ascii", "utf-8", "idna"):
        codecs.lookup(name)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return Supervisor(socket.socket(fileno=channel_fd)).run()
