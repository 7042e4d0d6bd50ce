"""Short-lived folders of a run under the system's temporary folder. Invariant: a folder's name says which process owns it, so that what a
killed one left is recognised and removed by the next start with the same cache, and nobody else's is."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from .cache import content_key
from .ledger import sandboxes_dir, start_time

_NAME = re.compile(r"hrl-([0-9a-f]{6})-(\d+)-(\d+)-.+")


def scratch_dir() -> Path:
    """A new folder of this process's, with a short path: a Unix socket's holds about 100 bytes."""
    return Path(tempfile.mkdtemp(prefix=f"hrl-{_key(None)}-{os.getpid()}-{start_time(os.getpid()) or 0}-"))


def reap_scratch(root: Path | None = None) -> int:
    """Remove the folders of dead processes that used the cache `root`; returns how many there were."""
    dead = [path for path, _pid, alive in _folders(root) if not alive]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    return len(dead)


def left_scratch(root: Path | None = None) -> list[Path]:
    """Folders of dead processes that used the cache `root`, and of this one."""
    return [path for path, pid, alive in _folders(root) if not alive or pid == os.getpid()]


def _key(root: Path | None) -> str:
    return content_key(str(sandboxes_dir(root)))[:6]


def _folders(root: Path | None) -> list[tuple[Path, int, bool]]:
    """This user's folders: path, owner, whether it lives."""
    found: list[tuple[Path, int, bool]] = []
    for path in Path(tempfile.gettempdir()).glob(f"hrl-{_key(root)}-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        try:
            ours = path.stat().st_uid == os.geteuid()
        except FileNotFoundError:
            continue
        if ours:
            found.append((path, int(match[2]), start_time(int(match[2])) == int(match[3])))
    return found
