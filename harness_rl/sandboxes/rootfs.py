"""The root file system below every session: a small Debian, built once from the machine's own package source. Invariant: it belongs to
the sandboxes' uid range, so that even a process that left its namespaces would own nothing on the host.

`ensure_rootfs()` takes one to two minutes the first time (mmdebstrap) and nothing afterwards; the name carries a hash of the recipe.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

from harness_rl.paths import cache_dir

from .cache import building_sync, content_key
from .errors import SandboxBuildFailedError
from .sandbox import UID_BASE

SUITE = "bookworm"
PYTHON = "3.11"
"""The suite's Python: agent layers are built for it."""
PACKAGES = ("ca-certificates", "curl", "git", "patch", "procps", "python3", "python3-pip", "python3-venv", "python-is-python3")
KNOWN_IMAGES = ("debian:bookworm", "debian:bookworm-slim", "debian:12", "debian:12-slim", "harness-rl/base")
"""Image names (FROM, docker_image) that this root file system stands for."""
_LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/lintian/*")
_FORMAT = 1
"""Raised when the steps below change."""
_FOLDERS = ("logs/agent", "logs/verifier", "logs/artifacts", "installed-agent", "tests", "solution")
_FILES = {
    "etc/hostname": "sandbox\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/resolv.conf": "",
    "etc/default/locale": "LANG=C.UTF-8\n",
}

Log = Callable[[str], None]


def rootfs_path() -> Path:
    """Where the root file system is, or will be."""
    key = content_key([_FORMAT, SUITE, PACKAGES, _LEFT_OUT, _FOLDERS, _FILES, UID_BASE, platform.machine()])
    return cache_dir("rootfs", f"{SUITE}-{key}")


def ensure_rootfs(log: Log = lambda _line: None) -> Path:
    """Build the root file system if it is not in the cache. Raises SandboxBuildFailedError with what to change."""
    target = rootfs_path()
    with building_sync(target) as draft:
        if draft is not None:
            log(f"building the sandbox root file system (Debian {SUITE}, one to two minutes)")
            tree = draft / "tree"
            _mmdebstrap(tree)
            finish(tree)
            tree.rename(target)
    return target


def _mmdebstrap(target: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        raise SandboxBuildFailedError("mmdebstrap is not installed: apt-get install mmdebstrap")
    if os.geteuid() != 0:
        raise SandboxBuildFailedError("building the root file system needs root")
    command = ["mmdebstrap", "--variant=apt", "--mode=root", f"--include={','.join(PACKAGES)}", '--aptopt=Apt::Install-Recommends "false"']
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT]
    mirror = os.environ.get("HARNESS_RL_DEBIAN_MIRROR")
    result = subprocess.run(
        [*command, SUITE, str(target), *([mirror] if mirror else [])], capture_output=True, text=True, errors="replace", check=False
    )
    if result.returncode != 0:
        tail = " | ".join(result.stderr.strip().splitlines()[-4:])
        raise SandboxBuildFailedError(f"mmdebstrap failed ({tail}); check that apt-get update works here, or set HARNESS_RL_DEBIAN_MIRROR")


def finish(tree: Path) -> None:
    """Turn a bare Debian tree into ours: fixed files, folders that Harbor expects, no device nodes, no caches, shifted owners."""
    for folder in ("var/cache/apt", "var/lib/apt/lists", "dev"):
        for entry in (tree / folder).iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    for name, text in _FILES.items():
        path = tree / name
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in _FOLDERS:
        shared = tree / name
        shared.mkdir(parents=True, exist_ok=True)
        shared.chmod(0o777)
    (tree / "tmp").chmod(0o1777)
    shift_owners(tree)


def shift_owners(tree: Path, base: int = UID_BASE) -> None:
    """Move every owner of `tree` from 0.. to base.., in place; owners already in the range stay."""

    def shift(path: str, info: os.stat_result) -> None:
        uid, gid = (value if value >= base else value + base for value in (info.st_uid, info.st_gid))
        os.chown(path, uid, gid, follow_symlinks=False)
        if not stat.S_ISLNK(info.st_mode) and info.st_mode & (stat.S_ISUID | stat.S_ISGID):
            os.chmod(path, stat.S_IMODE(info.st_mode))  # chown clears the set-id bits

    seen: set[int] = set()
    for folder, folders, files in os.walk(tree):
        shift(folder, os.lstat(folder))
        for name in files + [name for name in folders if os.path.islink(os.path.join(folder, name))]:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            if info.st_nlink > 1 and info.st_ino in seen:
                continue
            seen.add(info.st_ino)
            shift(path, info)
