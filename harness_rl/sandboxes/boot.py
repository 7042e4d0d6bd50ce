"""Boot of one sandbox, run inside the supervisor process. Invariant: everything that is mounted lives in the supervisor's private mount
namespace, so that no mount outlives it, however it ends; the sandbox sees nothing of the host's file system but the layers and binds that
its spec names.

Order: private mount namespace, overlay root on size-limited storage, a user namespace with its own uid range, bubblewrap inside it, a
ready line from the sandbox's own first process. Only then is the sandbox entered (bubblewrap reports its child before the new root is in
place)."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from typing import Any, NamedTuple

from . import linux as lx

BASE = "/run"
"""Covered by a tmpfs in the private mount namespace. bubblewrap, already without rights on the host, must be able to walk to its
sources."""
ROOT, STORE, _BINDS = f"{BASE}/root", f"{BASE}/store", f"{BASE}/binds"
"""The sandbox's root, and the storage that takes its writes."""
UPPER = f"{STORE}/upper"
"""What the session has changed of its root."""
IMAGE = f"{BASE}/image"
"""The root as it was before the session, read-only."""
_MASKED_FILES = ("kcore", "keys", "timer_list", "sched_debug", "latency_stats", "kmsg", "sysrq-trigger", "kallsyms", "config.gz")
_MASKED_FOLDERS = ("acpi", "scsi", "asound", "fs/nfsd")
_DEVICE_TMPFS_BYTES = 64 << 20
_BYTES_PER_FILE = 4096
"""A quota in memory allows one file for so many of its bytes: empty files take memory too."""
# As process 1 it cannot be killed from inside; with SIGCHLD ignored the kernel buries the orphans that it inherits. bash, because dash
# catches that signal even when told to ignore it, and a caught signal is back at its default after `exec`.
_INIT = "trap '' CHLD; echo ready; exec sleep infinity </dev/null >/dev/null 2>&1"


class BootFailed(RuntimeError):
    pass


class Entrance(NamedTuple):
    """What a process needs to enter the sandbox."""

    pidfd: int
    root: int
    namespaces: int
    bwrap_pidfd: int
    bwrap_pid: int
    init_pid: int


def prepare(linux: lx.Linux, spec: dict[str, Any]) -> None:
    """Private mount namespace with the sandbox's root mounted at `ROOT`."""
    linux.unshare(lx.CLONE_NEWNS)
    linux.mount("none", "/", "none", lx.MS_REC | lx.MS_PRIVATE)
    # Layers are named by descriptor: the tmpfs below may cover their paths, and mount options have to fit into one page.
    lowers = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in spec["lowers"]]
    storage = spec["storage"]
    source = None if storage["kind"] == "tmpfs" else os.open(storage["path"], os.O_PATH)
    binds = [os.open(host, os.O_PATH) for host, _inside in spec["binds"]]

    marker = f"harness-rl-{spec['id']}"
    linux.mount(marker, BASE, "tmpfs", lx.MS_NOSUID | lx.MS_NODEV, "mode=755,size=1m")
    for folder in (ROOT, STORE, IMAGE, _BINDS):
        os.mkdir(folder, 0o755)
    if source is None:
        linux.mount(
            marker, STORE, "tmpfs", lx.MS_NODEV, f"mode=755,size={storage['bytes']},nr_inodes={storage['bytes'] // _BYTES_PER_FILE}"
        )
    elif storage["kind"] == "loop":
        _mount_loop(source, STORE)
    else:
        linux.mount(f"/proc/self/fd/{source}", STORE, "none", _bind())
    work = f"{STORE}/work"
    for folder in (UPPER, work):
        os.makedirs(folder, 0o755, exist_ok=True)
    os.chown(UPPER, spec["uid_base"], spec["uid_base"])
    layers = ":".join(f"/proc/self/fd/{fd}" for fd in lowers)
    volatile = "" if storage["kind"] == "directory" else ",volatile"
    linux.mount(marker, ROOT, "overlay", lx.MS_NODEV, f"lowerdir={layers},upperdir={UPPER},workdir={work}{volatile}")
    if len(lowers) == 1:  # an overlay without an upper folder needs two
        linux.mount(f"/proc/self/fd/{lowers[0]}", IMAGE, "none", _bind())
    else:
        linux.mount(marker, IMAGE, "overlay", lx.MS_NODEV, f"lowerdir={layers}")
    for index, fd in enumerate(binds):
        target = f"{_BINDS}/{index}"
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        linux.mount(f"/proc/self/fd/{fd}", target, "none", _bind())
    for fd in (*lowers, *binds, *([] if source is None else [source])):
        os.close(fd)


def _bind() -> int:
    return 0x1000 | lx.MS_REC


def _mount_loop(image: int, target: str) -> None:
    argv = ["mount", "-t", "ext4", "-o", "loop,nosuid,nodev,noatime", f"/proc/{os.getpid()}/fd/{image}", target]
    pid = os.posix_spawnp("mount", argv, os.environ)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise BootFailed(
            "cannot mount the session's disk image: the host has no free loop device (lower sandbox.storage_mb to half of its memory)"
        )


def start(linux: lx.Linux, spec: dict[str, Any]) -> Entrance:
    """Start bubblewrap in a new user namespace and wait until the sandbox is whole. Raises BootFailed."""
    info_read, info_write = os.pipe()
    ready_read, ready_write = os.pipe()
    mapped_read, mapped_write = os.pipe()
    wait_read, wait_write = os.pipe()
    filter_read, filter_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for path in spec["init_cgroups"]:
                join(path)
            linux.unshare(lx.CLONE_NEWUSER)
            os.write(mapped_write, b"u")
            if os.read(wait_read, 1) != b"m":
                os._exit(125)
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            os.dup2(ready_write, 1)
            for fd in (info_write, filter_read):
                os.set_inheritable(fd, True)
            os.execve(spec["bwrap"], _arguments(spec, info_write, filter_read), {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
        except OSError as error:
            os.write(2, f"boot: {error}\n".encode())
            os._exit(125)
    for fd in (info_write, ready_write, mapped_write, wait_read, filter_read):
        os.close(fd)
    bwrap_pidfd = os.pidfd_open(pid)
    deadline = time.monotonic() + spec["boot_timeout_s"]
    _expect(mapped_read, deadline, "a user namespace")
    for kind in ("uid_map", "gid_map"):
        with open(f"/proc/{pid}/{kind}", "wb", buffering=0) as file:
            file.write(f"0 {spec['uid_base']} 65536\n".encode())
    os.write(filter_write, spec["filter"])
    os.close(filter_write)
    os.write(wait_write, b"m")
    info = b""
    while b"}" not in info:
        info += _expect(info_read, deadline, "bubblewrap")
    _expect(ready_read, deadline, "the sandbox's first process")
    for fd in (info_read, ready_read, mapped_read, wait_write):
        os.close(fd)

    init_pid = int(json.loads(info)["child-pid"])
    namespaces = lx.CLONE_NEWUSER | lx.CLONE_NEWNS | lx.CLONE_NEWIPC | lx.CLONE_NEWUTS | lx.CLONE_NEWCGROUP
    entrance = Entrance(
        os.pidfd_open(init_pid), os.open(f"/proc/{init_pid}/root", os.O_PATH | os.O_DIRECTORY), namespaces, bwrap_pidfd, pid, init_pid
    )
    # Children of this process are born into the sandbox's process and network namespaces; it needs neither of the host's any more.
    linux.setns(entrance.pidfd, lx.CLONE_NEWPID | (lx.CLONE_NEWNET if spec["network"] == "none" else 0))
    return entrance


def listen(port: int) -> socket.socket:
    """The one port that leads out; called after `start`, when this process is in the sandbox's network namespace."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def join(procs_file: str) -> None:
    """Move the calling process into a control group."""
    fd = os.open(procs_file, os.O_WRONLY)
    try:
        os.write(fd, b"0")
    finally:
        os.close(fd)


def _expect(fd: int, deadline: float, what: str) -> bytes:
    if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise BootFailed(f"{what} did not start in time")
    data = os.read(fd, 4096)
    if not data:
        raise BootFailed(f"{what} failed to start")
    return data


def _arguments(spec: dict[str, Any], info_fd: int, filter_fd: int) -> list[str]:
    argv = [spec["bwrap"], "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup", "--hostname", spec["hostname"]]
    if spec["network"] == "none":
        argv.append("--unshare-net")
    argv += [
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--cap-drop",
        "ALL",
        "--info-fd",
        str(info_fd),
        "--seccomp",
        str(filter_fd),
    ]
    argv += ["--bind", ROOT, "/", "--proc", "/proc", "--dev", "/dev"]
    argv += [
        "--perms",
        "1777",
        "--size",
        str(_DEVICE_TMPFS_BYTES),
        "--tmpfs",
        "/dev/shm",
        "--size",
        str(_DEVICE_TMPFS_BYTES),
        "--tmpfs",
        "/run",
    ]
    argv += ["--remount-ro", "/dev"]
    for name in _MASKED_FILES:
        if os.path.exists(f"/proc/{name}"):
            argv += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    for name in _MASKED_FOLDERS:
        if os.path.isdir(f"/proc/{name}"):
            argv += ["--tmpfs", f"/proc/{name}", "--remount-ro", f"/proc/{name}"]
    for index, (_host, inside) in enumerate(spec["binds"]):
        argv += ["--ro-bind", f"{_BINDS}/{index}", inside]
    argv += ["--chdir", "/", "--clearenv", "--setenv", "PATH", "/usr/sbin:/usr/bin:/sbin:/bin", "/bin/bash", "-c", _INIT]
    return argv
