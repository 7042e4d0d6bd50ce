"""One running sandbox, seen from the control process. Invariant: whatever happens to a call (time-out, cancellation, a dead supervisor),
no process of it goes on, and `stop` returns within its deadline with everything reclaimed or left to the reaper."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import platform
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import seccomp
from .cgroups import CgroupLimits, CgroupUnavailable, Hierarchies, SessionCgroup, detect, remove_tree
from .channel import Channel
from .errors import LocalSandboxError, RuntimeRequestError, SandboxBuildFailedError, SandboxLikelyOutOfMemoryError
from .ledger import Entry, Ledger, sandboxes_dir, start_time
from .limits import ExecResult, SandboxLimits
from .storage import make_storage

UID_BASE = 1_900_000_000
"""Host uid of the sandbox's root: a range of 65,536 that neither accounts, subordinate-id files nor other container managers use."""
_SUPERVISOR = "import sys; sys.path.append({path!r}); from sandboxes.supervisor import main; raise SystemExit(main(int(sys.argv[1])))"
_POLL_OUTPUT_S = 0.25
_KILL_GRACE_S = 2.0
_START_TIMEOUT_S = 30.0
_CLEAN_S = 60.0

OutputCallback = Callable[[str, str], Awaitable[None]]
"""Called with (text, "stdout" | "stderr") while a command runs."""
ListenerCallback = Callable[[socket.socket], Awaitable[None]]
"""Takes over the listening socket of the sandbox's one open port."""


@dataclass(frozen=True)
class SandboxSpec:
    lowers: Sequence[Path]
    """Read-only layers, the topmost first; the last is the root file system."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    port: int | None = None
    """TCP port of 127.0.0.1 that leads out; None: nothing does."""
    host_network: bool = False
    """Only for building layers."""
    upper: Path | None = None
    """Write to this folder instead of to storage that goes with the session (building layers)."""
    binds: Sequence[tuple[Path, str]] = ()
    """Read-only (host path, path inside)."""
    hostname: str = "sandbox"


class _Call:
    """One command under way."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[list[int]] = loop.create_future()
        self.ended: asyncio.Future[dict[str, Any]] = loop.create_future()

    def fail(self, error: Exception) -> None:
        for future in (self.started, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: a caller that was cancelled does not look at it


class Sandbox:
    """Make with `await Sandbox.start(spec)`; `stop()` is idempotent and bounded."""

    def __init__(self, spec: SandboxSpec, log: logging.Logger) -> None:
        self.id = secrets.token_hex(8)
        self.spec = spec
        self._log = log
        self._ledger = Ledger.at()
        self.folder = sandboxes_dir() / "sessions" / self.id
        self._channel: Channel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._cgroup: SessionCgroup | None = None
        self._calls: dict[str, _Call] = {}
        self._booted: asyncio.Future[list[int]] | None = None
        self._dead: LocalSandboxError | None = None
        self._serial = 0
        self.downloaded: dict[str, int] = {}
        """Bytes that were copied out, by account (transfer.py)."""
        self._stopped: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, spec: SandboxSpec, *, on_listener: ListenerCallback | None = None, log: logging.Logger | None = None) -> Sandbox:
        """Boot. Raises SandboxBuildFailedError with the reason; nothing is left behind then."""
        sandbox = cls(spec, log or logging.getLogger(__name__))
        try:
            listener = await sandbox._boot()
            if listener is not None:
                if on_listener is None:
                    listener.close()
                else:
                    await _hand_over(listener, on_listener)
        except (OSError, CgroupUnavailable, seccomp.UnsupportedArchitecture) as error:
            await sandbox.stop()
            raise SandboxBuildFailedError(f"sandbox cannot start: {error}") from error
        except BaseException:
            await asyncio.shield(sandbox.stop())
            raise
        return sandbox

    async def _boot(self) -> socket.socket | None:
        limits = self.spec.limits
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxBuildFailedError("bubblewrap is not installed: apt-get install bubblewrap")
        hierarchies: Hierarchies = detect()
        cgroup = SessionCgroup(self.id, hierarchies)
        entry = Entry.mine(self.id, cgroup.directories(), self.folder)
        self._ledger.write(entry)
        self.folder.mkdir(parents=True, mode=0o700)
        self._cgroup = SessionCgroup.create(self.id, hierarchies, CgroupLimits(limits.memory_bytes, limits.pids, limits.cpus))
        storage = await make_storage(self.folder, limits, self.spec.upper)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = Channel(ours, self._dispatch, self._die)
        try:
            with (self.folder / "supervisor.log").open("wb") as log:
                # A session of its own: a Ctrl-C at the terminal is the control process's to handle. Neither the site packages nor
                # harness_rl are loaded.
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-I", "-S", "-c", _SUPERVISOR.format(path=str(Path(__file__).parents[1])), str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()], start_new_session=True, env={},
                )  # fmt: skip
        finally:
            theirs.close()
        entry.supervisor_pid, entry.supervisor_start = self._process.pid, start_time(self._process.pid) or 0
        self._ledger.write(entry)
        self._booted = asyncio.get_running_loop().create_future()
        message = {
            "id": self.id,
            "owner_pid": os.getpid(),
            "bwrap": bwrap,
            "boot_timeout_s": limits.boot_timeout_s,
            "hostname": self.spec.hostname,
            "network": "host" if self.spec.host_network else "none",
            "port": self.spec.port,
            "lowers": [str(path) for path in self.spec.lowers],
            "binds": [[str(host), inside] for host, inside in self.spec.binds],
            "storage": storage,
            "uid_base": UID_BASE,
            "init_cgroups": [str(path) for path in self._cgroup.child("init")],
            "filter": seccomp.build_filter(platform.machine()).hex(),
        }
        await self._request({"op": "boot", "fds": ["spec"]}, message)
        try:
            fds = await asyncio.wait_for(asyncio.shield(self._booted), limits.boot_timeout_s)
        except TimeoutError:
            raise SandboxBuildFailedError(f"sandbox did not start within {limits.boot_timeout_s:.0f} s{self._log_tail()}") from None
        return socket.socket(fileno=fds[0]) if fds else None

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            text = (self.folder / "supervisor.log").read_text(errors="replace").strip()
            return f": {text[-400:]}" if text else ""
        return ""

    async def _request(self, header: dict[str, Any], spec: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        if self._dead is not None:
            raise self._dead
        if self._channel is None:
            raise RuntimeRequestError("the sandbox is stopped")
        try:
            await self._channel.send(header, spec, fds)
        except OSError as error:
            self._die(f"cannot reach its supervisor: {error}")
            raise self._dead or error from error

    def _dispatch(self, message: dict[str, Any], fds: list[int]) -> None:
        event, call = message["event"], self._calls.get(message.get("id", ""))
        if event == "ready" and self._booted is not None and not self._booted.done():
            self._booted.set_result(fds)
        elif event == "failed" and self._booted is not None and not self._booted.done():
            self._booted.set_exception(SandboxBuildFailedError(f"sandbox cannot start: {message['error']}{self._log_tail()}"))
        elif event == "started" and call is not None and not call.started.done():
            call.started.set_result(fds)
        elif event == "exit" and call is not None and not call.ended.done():
            call.ended.set_result(message)
        else:
            for fd in fds:
                os.close(fd)
            if event == "dead":
                self._die("its first process ended")

    def _die(self, why: str) -> None:
        if self._dead is None:
            out_of_memory = self._cgroup is not None and self._cgroup.oom_kills() > 0
            kind = SandboxLikelyOutOfMemoryError if out_of_memory else RuntimeRequestError
            self._dead = kind(f"the sandbox is gone: {why}{self._log_tail()}")
        if self._booted is not None and not self._booted.done():
            self._booted.set_exception(SandboxBuildFailedError(f"sandbox cannot start: {why}{self._log_tail()}"))
        for call in self._calls.values():
            call.fail(self._dead)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        user: str | int | None = None,
        timeout_s: float | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        file_bytes: int | None = None,
        on_output: OutputCallback | None = None,
    ) -> ExecResult:
        """Run a program (absolute path) and return when it exits; children that it left in the background keep running and hold nothing up.

        On a time-out and on cancellation the command and all that it started are killed. `stdin` and `stdout` are descriptors to use
        instead of /dev/null and the capture; `file_bytes` limits every file that the command writes. Raises RuntimeRequestError when the
        sandbox is dead."""
        limits = self.spec.limits
        name, call, cgroups = self._begin("exec")
        spec = {
            "argv": list(argv), "env": dict(env or {}), "cwd": cwd, "user": user, "cgroups": cgroups, "capture_bytes": limits.output_bytes,
            "rlimits": {} if file_bytes is None else {"FSIZE": file_bytes},
        }  # fmt: skip
        given = [(key, fd) for key, fd in (("stdin", stdin), ("stdout", stdout)) if fd is not None]
        captured: list[int] = []
        timed_out = False
        try:
            await self._request({"op": "exec", "id": name, "fds": ["spec", *(key for key, _fd in given)]}, spec, [fd for _key, fd in given])
            captured = await self._until_started(call)
            try:
                message = await self._wait(call, captured, timeout_s, on_output)
            except TimeoutError:
                timed_out = True
                message = {"code": 124, "error": f"timed out after {timeout_s:g} s"}
            out, err = (_read(fd, limits.output_bytes) for fd in captured)
            truncated = len(out) + len(err) >= limits.output_bytes - 8192
            if message["error"]:
                err += f"harness-rl: {message['error']}\n".encode()
            return ExecResult(message["code"], out, err, timed_out, truncated)
        finally:
            await self._end(name, call, captured)

    async def _until_started(self, call: _Call) -> list[int]:
        try:
            return await asyncio.wait_for(asyncio.shield(call.started), _START_TIMEOUT_S)
        except TimeoutError:
            raise RuntimeRequestError(f"the sandbox did not start a command within {_START_TIMEOUT_S:.0f} s") from None

    async def _wait(self, call: _Call, captured: list[int], timeout_s: float | None, on_output: OutputCallback | None) -> dict[str, Any]:
        if on_output is None:
            return await asyncio.wait_for(asyncio.shield(call.ended), timeout_s)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        offsets = [0, 0]
        while True:
            left = _POLL_OUTPUT_S if end is None else min(_POLL_OUTPUT_S, end - time.monotonic())
            done = bool((await asyncio.wait([call.ended], timeout=max(0.0, left)))[0])
            for index, stream in enumerate(("stdout", "stderr")):
                if chunk := os.pread(captured[index], 1 << 20, offsets[index]):
                    offsets[index] += len(chunk)
                    await on_output(chunk.decode("utf-8", "replace"), stream)
            if done:
                return call.ended.result()
            if end is not None and time.monotonic() >= end:
                raise TimeoutError

    def _begin(self, kind: str) -> tuple[str, _Call, list[str]]:
        if self._dead is not None:
            raise self._dead
        if self._cgroup is None or self._channel is None:
            raise RuntimeRequestError("the sandbox is stopped")
        self._serial += 1
        name = f"{kind}-{self._serial}"
        try:
            cgroups = [str(path) for path in self._cgroup.child(name)]
        except OSError as error:
            raise RuntimeRequestError(f"cannot make a control group for a command: {error}") from error
        call = self._calls[name] = _Call()
        return name, call, cgroups

    async def _end(self, name: str, call: _Call, captured: list[int]) -> None:
        """Forget a call; if it has not ended by itself, end it with everything that it started."""
        if not captured and call.started.done() and call.started.exception() is None:
            captured = call.started.result()
        if call.ended.done() and not call.ended.cancelled():
            call.ended.exception()  # retrieved
        for fd in captured:
            os.close(fd)
        cgroup = self._cgroup
        end = time.monotonic() + _KILL_GRACE_S
        while cgroup is not None and not call.ended.done() and time.monotonic() < end:
            cgroup.kill(name)  # again until it is over: a process that was just being made joins its group late
            await asyncio.wait([call.ended], timeout=0.05)
        self._calls.pop(name, None)
        if cgroup is not None:
            cgroup.release(name)

    async def kill_commands(self) -> int:
        """Kill every process that a command started, the background ones too; returns how many there were."""
        if self._cgroup is None:
            return 0
        killed = self._cgroup.kill_commands(keep="init")
        end = time.monotonic() + _KILL_GRACE_S
        for name in [name for name in self._cgroup.commands() if name != "init"]:
            while not self._cgroup.release(name) and time.monotonic() < end:
                await asyncio.sleep(0.002)
        return killed

    async def clean(self, folders: Sequence[str], *, search: Sequence[str] = (), work: str = "/", limit: int = 100) -> dict[str, Any]:
        """Empty folders with code that nothing in the sandbox can replace (clean.py), and compare programs with the image's (changed.py):
        `search` are the folders of PATH, `work` is the agent's own.

        Returns {"found": paths, "count": n, "replaced": programs, "hindered": what of the agent's doing is in a verifier's way}."""
        name, call, cgroups = self._begin("clean")
        spec = {"folders": list(folders), "limit": limit, "cgroups": cgroups, "search": list(search), "work": work}
        try:
            await self._request({"op": "clean", "id": name, "fds": ["spec"]}, spec)
            message = await asyncio.wait_for(asyncio.shield(call.ended), _CLEAN_S)
            if message["error"] or not message["report"]:
                raise RuntimeRequestError(f"cannot empty {', '.join(folders)}: {message['error'] or 'killed'}")
            return dict(json.loads(message["report"]))
        except TimeoutError:
            raise RuntimeRequestError(f"emptying {', '.join(folders)} took longer than {_CLEAN_S:.0f} s") from None
        finally:
            await self._end(name, call, [])

    @property
    def alive(self) -> bool:
        return self._dead is None and self._channel is not None

    async def stop(self) -> None:
        """Kill everything and reclaim it within `limits.stop_timeout_s`; what resists stays in the ledger for the reaper."""
        if self._stopped is None:
            self._stopped = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopped)

    async def _stop(self) -> None:
        deadline = time.monotonic() + self.spec.limits.stop_timeout_s
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._dead = self._dead or RuntimeRequestError("the sandbox is stopped")
        for call in self._calls.values():
            call.fail(self._dead)
        cgroup, self._cgroup = self._cgroup, None
        if cgroup is not None:
            cgroup.kill()
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), _KILL_GRACE_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGKILL)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), _KILL_GRACE_S)
        gone = await self._remove_groups(cgroup, deadline)
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
        if gone and not self.folder.exists():
            self._ledger.remove(self.id)
        else:
            self._log.warning("sandbox %s did not end within %.0f s; the next start reclaims it", self.id, self.spec.limits.stop_timeout_s)

    async def _remove_groups(self, cgroup: SessionCgroup | None, deadline: float) -> bool:
        directories = cgroup.directories() if cgroup is not None else []
        while True:
            if all([remove_tree(directory) for directory in directories]):
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.005)
            if cgroup is not None:
                cgroup.kill()


async def _hand_over(listener: socket.socket, on_listener: ListenerCallback) -> None:
    try:
        await on_listener(listener)
    except Exception as error:
        listener.close()
        raise SandboxBuildFailedError(f"the sandbox's port could not be handed over: {error}") from error


def _read(fd: int, limit: int) -> bytes:
    data = bytearray()
    while len(data) < limit and (chunk := os.pread(fd, min(1 << 20, limit - len(data)), len(data))):
        data += chunk
    return bytes(data)
