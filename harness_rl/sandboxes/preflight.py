"""Whether this machine can run the local sandbox. Invariant: each reason against it is named before a rollout starts, with what to
change; a machine that cannot isolate runs nothing."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness_rl.doctor import Check
from harness_rl.errors import UserError
from harness_rl.paths import cache_dir

from . import seccomp
from .cgroups import CgroupUnavailable, detect
from .linux import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MS_PRIVATE,
    MS_REC,
    load,
)
from .rootfs import rootfs_path

_KERNEL = (5, 11)
"""Joining all namespaces through a pidfd, and `close_range`."""
_FREE_BYTES = 2 << 30


def sandbox_checks() -> list[Check]:
    """Everything that a sandbox needs of this machine, in the order in which it would fail."""
    return [_root(), _kernel(), _programs(), _architecture(), _cgroups(), _namespaces(), _disk(), _rootfs()]


def refuse_unless_able() -> None:
    """Raise UserError with every failed check in one line each."""
    if failed := [check for check in sandbox_checks() if not check.ok]:
        raise UserError(
            "this machine cannot run the local sandbox: " + "; ".join(f"{check.name}: {check.detail} ({check.remedy})" for check in failed)
        )


def _check(name: str, ok: bool, detail: str, remedy: str = "") -> Check:
    return Check(f"sandbox: {name}", ok, detail, "" if ok else remedy)


def _root() -> Check:
    return _check("root", os.geteuid() == 0, f"user id {os.geteuid()}", "run as root, or use a remote sandbox")


def _kernel() -> Check:
    release = platform.release()
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    needed = ".".join(map(str, _KERNEL))
    return _check("kernel", version >= _KERNEL, release, f"needs Linux {needed} or later")


def _programs() -> Check:
    packages = {"bwrap": "bubblewrap", "mkfs.ext4": "e2fsprogs", "mount": "mount"}
    if not rootfs_path().is_dir():
        packages["mmdebstrap"] = "mmdebstrap"
    missing = [package for program, package in packages.items() if shutil.which(program) is None]
    return _check(
        "programs", not missing, f"missing: {', '.join(missing)}" if missing else "bubblewrap found", f"apt-get install {' '.join(missing)}"
    )


def _architecture() -> Check:
    machine = platform.machine()
    return _check("seccomp", machine in seccomp.ARCHITECTURES, machine, f"only on {', '.join(seccomp.ARCHITECTURES)}")


def _cgroups() -> Check:
    try:
        found = detect()
    except CgroupUnavailable as error:
        return _check("cgroups", False, str(error), "see the message")
    kind = "v2" if found.unified else "v1" + (" with a v2 tree for killing" if found.kill_file else "")
    return _check("cgroups", True, kind)


def _namespaces() -> Check:
    remedy = (
        "enable user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0); "
        "in a container: --privileged"
    )
    problem = _in_child(_try_namespaces)
    return _check("namespaces", problem is None, problem or "user, mount, pid, network, ipc, uts, cgroup and overlayfs", remedy)


def _try_namespaces() -> None:
    linux = load()
    linux.unshare(CLONE_NEWNS)
    linux.mount("none", "/", "none", MS_REC | MS_PRIVATE)
    linux.mount("harness-rl-check", "/run", "tmpfs", 0, "size=1m")
    for name in ("lower", "upper", "work", "root"):
        os.mkdir(f"/run/{name}")
    linux.mount("harness-rl-check", "/run/root", "overlay", 0, "lowerdir=/run/lower,upperdir=/run/upper,workdir=/run/work")
    linux.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)


def _in_child(work: Callable[[], None]) -> str | None:
    """Run `work` in a fork; returns the reason why it failed, or None."""
    with tempfile.TemporaryFile() as report:
        pid = os.fork()
        if pid == 0:
            try:
                work()
            except OSError as error:
                os.write(report.fileno(), str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        report.seek(0)
        return report.read().decode("utf-8", "replace") or None


def _disk() -> Check:
    place = cache_dir()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    return _check(
        "disk", free >= _FREE_BYTES, f"{free >> 20} MiB free at {place}", "free disk space, or move the cache with HARNESS_RL_CACHE"
    )


def _rootfs() -> Check:
    path: Path = rootfs_path()
    ready = path.is_dir()
    return _check("root file system", True, str(path) if ready else "not built yet (one to two minutes, once)")
