"""Reclaim what killed runs left behind, and count what is left. Invariant: only what belongs to a dead owner is touched; a live run of
another process on the same machine never is.

Mounts and namespaces live in a session's supervisor and go with it (boot.py), so what can be left are processes that still die, control
groups, session folders and ledger entries. Every one of them is named by the ledger or by its place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .cgroups import GROUP, CgroupUnavailable, detect, kill_tree, processes, remove_tree
from .ledger import Entry, Ledger, sandboxes_dir, start_time
from .scratch import left_scratch, reap_scratch

_MARKER = "harness-rl-"
_SIOCGSKNS = 0x894C
_YOUNG_S = 60.0
"""A folder or empty group without a ledger entry is removed only when it is older: the ledger was read first, a session may just have
begun."""


@dataclass(frozen=True)
class ReapReport:
    sessions: int = 0
    """Sessions of dead owners that were reclaimed."""
    processes: int = 0
    remaining: int = 0
    """Sessions that could not be reclaimed entirely; the next start tries again."""


@dataclass(frozen=True)
class LeakReport:
    """What is left of sessions whose owner is dead or is the asking process. All zero after a clean end."""

    processes: int = 0
    mounts: int = 0
    cgroups: int = 0
    network_namespaces: int = 0
    listeners: int = 0
    folders: int = 0
    ledger_entries: int = 0
    scratch_folders: int = 0
    """Under the system's temporary folder: sockets of proxy and learner."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in asdict(self).items() if count) or "nothing left behind"


def reap(root: Path | None = None) -> ReapReport:
    """Reclaim the sessions of dead owners. `root` is the cache root. Cheap when there is nothing to do; call it at every start."""
    ledger = Ledger.at(root)
    sessions = killed = remaining = 0
    for entry in ledger.entries():
        if entry.owner_alive():
            continue
        sessions += 1
        killed += _kill(entry)
        if _remove(entry):
            ledger.remove(entry.id)
        else:
            remaining += 1
    known = {entry.id for entry in ledger.entries()}
    for path in _session_groups():
        if path.name not in known and _old(path) and not processes(path):
            remove_tree(path)
    for path in _session_folders(root):
        if path.name not in known and _old(path):
            shutil.rmtree(path, ignore_errors=True)
    reap_scratch(root)
    return ReapReport(sessions, killed, remaining)


def _kill(entry: Entry) -> int:
    killed = 0
    if entry.supervisor_pid and start_time(entry.supervisor_pid) == entry.supervisor_start and entry.boot:
        with contextlib.suppress(ProcessLookupError):
            os.kill(entry.supervisor_pid, signal.SIGKILL)
            killed += 1
    for name in entry.cgroups:
        killed += kill_tree(Path(name), kill_file=Path(name, "cgroup.kill").exists())
    return killed


def _remove(entry: Entry, deadline_s: float = 3.0) -> bool:
    end = time.monotonic() + deadline_s
    while not all([remove_tree(Path(name)) for name in entry.cgroups]):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    shutil.rmtree(entry.folder, ignore_errors=True)
    return not Path(entry.folder).exists()


def _session_groups() -> list[Path]:
    try:
        parents = detect().directories()
    except CgroupUnavailable:
        return []
    return [path for parent in parents if parent.name == GROUP for path in parent.iterdir() if path.is_dir()]


def _session_folders(root: Path | None) -> list[Path]:
    folder = sandboxes_dir(root) / "sessions"
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _old(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > _YOUNG_S
    return False


def audit(root: Path | None = None) -> LeakReport:
    """Count what is left of sessions whose owner is this process or dead. Another live process's sessions are its own business."""
    entries = list(Ledger.at(root).entries())
    theirs = {entry.id for entry in entries if entry.owner_alive() and not entry.owned_by(os.getpid())}
    supervisors = {entry.supervisor_pid for entry in entries if entry.id in theirs}
    folders = [path for path in _session_folders(root) if path.name not in theirs]
    judged = {entry.id for entry in entries if entry.id not in theirs} | {path.name for path in folders}
    groups = [path for path in _session_groups() if path.name in judged]
    pids = {pid for path in groups for pid in processes(path)}
    pids |= {
        entry.supervisor_pid for entry in entries if entry.id not in theirs and start_time(entry.supervisor_pid) == entry.supervisor_start
    }
    ids = {entry.id for entry in entries if entry.id not in theirs}
    return LeakReport(
        processes=len(pids),
        mounts=_mounts(ids, supervisors),
        cgroups=len(groups),
        network_namespaces=len({name for pid in pids if (name := _namespace(pid)) not in (None, _namespace(os.getpid()))}),
        listeners=_foreign_listeners(),
        folders=len(folders),
        ledger_entries=len(ids),
        scratch_folders=len(left_scratch(root)),
    )


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _mounts(ids: set[str], supervisors: set[int]) -> int:
    """Mounts of ours in this mount namespace, and in those of supervisors that no live owner has."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            pid = int(path.parent.name)
            if pid != os.getpid() and (path.read_text().strip() != "hrl-sandbox" or pid in supervisors):
                continue
            lines = (path.parent / "mountinfo").read_text().splitlines()
            count += sum(_MARKER in line and (pid == os.getpid() or any(name in line for name in ids)) for line in lines)
    return count


def _foreign_listeners() -> int:
    """Listening sockets of this process that live in another network namespace: ports of sandboxes that nobody closed."""
    own, count = os.stat("/proc/self/ns/net").st_ino, 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family == socket.AF_INET and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    count += _socket_namespace(sock) != own
    return count


def _socket_namespace(sock: socket.socket) -> int:
    fd = fcntl.ioctl(sock.fileno(), _SIOCGSKNS)
    try:
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)
