"""From a fork of the supervisor to a command inside the sandbox. Invariant: nothing of the agent's runs before the process has entered
every namespace, lost every capability that a container does not need, and carries the seccomp filter; whatever fails on the way ends the
process, never runs it anyway.

Between entering the namespaces and `execve` the process is undumpable and its memory belongs to the host's user namespace, so nothing
inside can trace it. It reads files of the sandbox as data only and imports nothing."""

from __future__ import annotations

import os
import resource
import signal
import stat
from typing import Any, NamedTuple

from . import linux as lx
from .boot import Entrance, join

CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL = 0, 1, 3, 4, 5
CAP_SETGID, CAP_SETUID, CAP_NET_BIND_SERVICE, CAP_SYS_CHROOT, CAP_SETFCAP = 6, 7, 10, 18, 31
ROOT_CAPABILITIES = frozenset(
    {
        CAP_CHOWN,
        CAP_DAC_OVERRIDE,
        CAP_FOWNER,
        CAP_FSETID,
        CAP_KILL,
        CAP_SETGID,
        CAP_SETUID,
        CAP_NET_BIND_SERVICE,
        CAP_SYS_CHROOT,
        CAP_SETFCAP,
    }
)
"""What root in the sandbox keeps: enough for package managers, `su` and servers; no mounting, tracing, raw sockets or device nodes."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_USER_FILE_LIMIT = 1 << 20
_OPEN_FILES = 20_000


class LaunchFailed(RuntimeError):
    """The command was not started; the message goes to its standard error."""


class User(NamedTuple):
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def enter(linux: lx.Linux, entrance: Entrance, cgroups: list[str], seccomp: bytes, user: str | int | None, last_capability: int) -> User:
    """Move the calling (freshly forked) process into the sandbox as `user`, without privileges."""
    for path in cgroups:
        join(path)
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(fd, b"500")
    os.close(fd)
    os.setsid()
    linux.setns(entrance.pidfd, entrance.namespaces)
    os.fchdir(entrance.root)
    os.chroot(".")
    os.chdir("/")
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    found = resolve_user(user)
    keep = ROOT_CAPABILITIES if found.uid == 0 else frozenset()
    linux.drop_bounding(keep, last_capability)
    os.setgroups(list(found.groups))
    os.setresgid(found.gid, found.gid, found.gid)
    os.setresuid(found.uid, found.uid, found.uid)
    linux.set_capabilities(keep)
    linux.no_new_privileges()
    linux.install_filter(seccomp)
    os.umask(0o022)
    return found


def execute(request: dict[str, Any], user: User) -> None:
    """Replace the calling process by the command. Returns only by raising LaunchFailed."""
    limits = {"CORE": 0, "NOFILE": _OPEN_FILES, "MSGQUEUE": 1 << 20, "MEMLOCK": 1 << 23, **request["rlimits"]}
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _soft, hard = resource.getrlimit(kind)
        ceiling = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (ceiling, ceiling))
    environment = {
        "PATH": DEFAULT_PATH,
        "HOME": user.home,
        "USER": user.name,
        "LOGNAME": user.name,
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        **request["env"],
    }
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        raise LaunchFailed(f"cannot change to directory {request['cwd']}: {error.strerror}") from error
    argv = request["argv"]
    try:
        os.execve(argv[0], argv, environment)
    except OSError as error:
        raise LaunchFailed(f"cannot run {argv[0]}: {error.strerror}") from error


def resolve_user(user: str | int | None) -> User:
    """Look `user` ("name", "uid", "name:group", uid) up in the sandbox's own files, which are data of the agent's."""
    wanted, _, wanted_group = str(0 if user is None else user).partition(":")
    name, uid, gid, home = wanted, int(wanted) if wanted.isdigit() else -1, 0, "/"
    for row in _rows("/etc/passwd", 7):
        if row[0] == wanted or (uid >= 0 and row[2] == str(uid)):
            name, uid, gid, home = row[0], int(row[2]), int(row[3]), row[5] or "/"
            break
    if uid < 0:
        raise LaunchFailed(f"no user {wanted!r} in the sandbox")
    groups = []
    for row in _rows("/etc/group", 4):
        if name in row[3].split(","):
            groups.append(int(row[2]))
        if wanted_group and wanted_group in (row[0], row[2]):
            gid = int(row[2])
    if not all(0 <= value < 65536 for value in (uid, gid, *groups)):
        raise LaunchFailed(f"user {wanted!r} has ids outside 0-65535")
    return User(name, uid, gid, tuple(groups[:64]), home)


def _rows(path: str, width: int) -> list[list[str]]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        rows = [line.split(":") for line in os.read(fd, _USER_FILE_LIMIT).decode("utf-8", "replace").splitlines()]
    finally:
        os.close(fd)
    return [row for row in rows if len(row) == width and row[2].isdigit() and (width != 7 or row[3].isdigit())]
