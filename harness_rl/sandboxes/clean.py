"""Clean-up before verification in a tree that someone else controls. Invariant: no symbolic link is followed, nothing outside the named
folders is removed, and the folders exist afterwards as real directories; what was found is reported.

`reset_folders` runs inside the sandbox, in a fork of the supervisor (launch.py), where the agent may have replaced every program.
`replaced_tools` runs outside, on the folder that holds what the session changed."""

from __future__ import annotations

import os
import stat
from typing import Any

_DEPTH = 256
_TOOLS = (
    "bash", "sh", "dash", "env", "python3", "python3.11", "python", "cat", "cp", "mv", "rm", "mkdir", "chmod", "ls", "test", "grep",
    "sed", "awk", "mawk", "find", "tar", "sort", "diff", "cmp", "wc", "head", "tail", "git", "curl",
)  # fmt: skip
_SEARCHED = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin")
_LOADED = (
    "etc/ld.so.preload", "etc/ld.so.cache", "etc/profile", "etc/bash.bashrc", "usr/lib/python3.11/sitecustomize.py",
    "usr/lib/python3/dist-packages/sitecustomize.py", "usr/local/lib/python3.11/dist-packages/sitecustomize.py",
)  # fmt: skip


def reset_folders(folders: list[str], limit: int) -> dict[str, Any]:
    """Make each of `folders` an empty directory of mode 0777. Returns {"found": at most `limit` paths, "count": entries removed}."""
    found: list[str] = []
    count = 0
    for folder in folders:
        fd = _real_directory(folder, found)
        try:
            count += _empty(fd, folder, found, limit, 0)
            os.fchmod(fd, 0o777)
        finally:
            os.close(fd)
    return {"found": found[:limit], "count": count + sum(1 for entry in found if entry.endswith(" (was not a directory)"))}


def _real_directory(path: str, found: list[str]) -> int:
    """Open `path` component by component, replacing everything on the way that is not a directory."""
    fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    walked = ""
    for name in path.strip("/").split("/"):
        walked += f"/{name}"
        try:
            mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
        except FileNotFoundError:
            mode = 0
        if mode and not stat.S_ISDIR(mode):
            os.unlink(name, dir_fd=fd)
            found.append(f"{walked} (was not a directory)")
            mode = 0
        if not mode:
            os.mkdir(name, 0o755, dir_fd=fd)
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        os.close(fd)
        fd = below
    return fd


def _empty(fd: int, path: str, found: list[str], limit: int, depth: int) -> int:
    count = 0
    for name in os.listdir(fd):
        count += 1
        if len(found) < limit:
            found.append(f"{path}/{name}")
        if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            if depth >= _DEPTH:
                raise OSError(f"{path} is nested too deeply to be emptied")
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            try:
                count += _empty(below, f"{path}/{name}", found, limit, depth + 1)
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=fd)
        else:
            os.unlink(name, dir_fd=fd)
    return count


def replaced_tools(upper: str) -> list[str]:
    """Programs that verifiers run, and files that those load by themselves, which the session wrote over or put in front of in PATH."""
    changed: list[str] = []
    for path in [*_LOADED, *(f"{folder}/{tool}" for folder in _SEARCHED for tool in _TOOLS)]:
        *folders, name = path.split("/")
        fd = os.open(upper, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for folder in folders:
                below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = below
            os.stat(name, dir_fd=fd, follow_symlinks=False)
            changed.append(f"/{path}")
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            changed.append(f"/{'/'.join(folders)} (was not a directory)")
        finally:
            os.close(fd)
    return list(dict.fromkeys(changed))
