"""Clean-up before verification in a tree that someone else controls. Invariant: no symbolic link is followed, nothing outside the named
folders is removed, and the folders exist afterwards as real directories; what was found is reported.

It runs inside the sandbox, in a fork of the supervisor (launch.py), where the agent may have replaced every program."""

from __future__ import annotations

import os
import stat
import time
from typing import Any

_DEPTH = 100
_CPU_S = 10.0
_SHOWN = 120


def reset_folders(folders: list[str], limit: int) -> dict[str, Any]:
    """Make each of `folders` an empty directory of mode 0777. Returns {"found": at most `limit` paths, "count": entries removed,
    "failed": why a folder could not be emptied, or ""}: only what the agent left there can be the reason."""
    found: list[str] = []
    count, failed = 0, ""
    for folder in folders:
        try:
            fd = _real_directory(folder, found)
            try:
                broom = _Broom(fd, folder, found, limit)
                try:
                    broom.sweep()
                finally:
                    count += broom.count
                os.fchmod(fd, 0o777)
            finally:
                os.close(fd)
        except OSError as error:
            failed = f"{folder} cannot be emptied: {error.strerror or error}"
    count += sum(1 for entry in found if entry.endswith(" (was not a directory)"))
    return {"found": [shown(path) for path in found[:limit]], "count": count, "failed": failed}


def remove_below(root: int, paths: list[str]) -> None:
    """Remove entries of the tree `root` and all that they hold."""
    for path in paths:
        *folders, name = path.split("/")
        fd = os.dup(root)
        for folder in folders:
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = below
        try:
            broom = _Broom(fd, "", [], 0)
            broom.remove(fd, name, name, 0)
            broom.sweep_moved()
        finally:
            os.close(fd)


def shown(path: str) -> str:
    """A path of the agent's as printable text of bounded length: a report has to fit into its message."""
    text = ascii(path)[1:-1]
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 + 3 :]}"


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


class _Broom:
    """Removes what is in the folder `top`. A tree may be deeper than a process can have open files or nest calls, so what is too deep is
    first moved up to `top`, where it has its turn later."""

    def __init__(self, top: int, path: str, found: list[str], limit: int) -> None:
        self.count = 0
        self._top, self._path, self._found, self._limit = top, path, found, limit
        self._moved: list[str] = []
        # Of CPU time, so that a busy host is not taken for a folder without end.
        self._until = time.process_time() + _CPU_S

    def sweep(self) -> None:
        while names := os.listdir(self._top):
            for name in names:
                self.remove(self._top, name, f"{self._path}/{name}", 0)
            self._moved.clear()

    def sweep_moved(self) -> None:
        while self._moved:
            name = self._moved.pop()
            self.remove(self._top, name, name, 0)

    def remove(self, folder: int, name: str, path: str, depth: int) -> None:
        if time.process_time() > self._until:
            raise OSError(f"it holds more than can be removed in {_CPU_S:g} s of CPU time")
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
        elif depth >= _DEPTH:
            self._move_up(folder, name)
            return
        else:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            try:
                for child in os.listdir(below):
                    self.remove(below, child, f"{path}/{child}", depth + 1)
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=folder)
        self.count += 1
        if len(self._found) < self._limit:
            self._found.append(path)

    def _move_up(self, folder: int, name: str) -> None:
        taken = set(os.listdir(self._top))
        free = next(spare for number in range(len(taken) + 1) if (spare := f".deep-{number}") not in taken)
        os.rename(name, free, src_dir_fd=folder, dst_dir_fd=self._top)
        self._moved.append(free)
