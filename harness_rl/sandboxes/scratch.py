"""Short-lived folders of a run under the system's temporary folder. Invariant: a folder's name says which process owns it, so that what a
killed one left is recognised and removed by the next start, and nobody else's is."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from .ledger import start_time

_NAME = re.compile(r"hrl-(\d+)-(\d+)-.+")


def scratch_dir() -> Path:
    """A new folder of this process's, with a short path: a Unix socket's holds about 100 bytes."""
    return Path(tempfile.mkdtemp(prefix=f"hrl-{os.getpid()}-{start_time(os.getpid()) or 0}-"))


def reap_scratch() -> int:
    """Remove the folders of dead processes; returns how many there were."""
    dead = [path for path, alive in _folders() if not alive]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    return len(dead)


def left_scratch() -> list[Path]:
    """Folders of dead processes and of this one."""
    mine = f"hrl-{os.getpid()}-"
    return [path for path, alive in _folders() if not alive or path.name.startswith(mine)]


def _folders() -> list[tuple[Path, bool]]:
    """This user's folders, and whether their owners live."""
    found: list[tuple[Path, bool]] = []
    for path in Path(tempfile.gettempdir()).glob("hrl-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        try:
            ours = path.stat().st_uid == os.geteuid()
        except FileNotFoundError:
            continue
        if ours:
            found.append((path, start_time(int(match[1])) == int(match[2])))
    return found
