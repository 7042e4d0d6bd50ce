"""Checkpoints that are whole or do not count: `checkpoints/step-N/` with a marker, `COMPLETE`, written last.

Everything is written under a temporary name, at last the marker, which lists every file with size and hash; flushed to disk; and renamed,
so that a kill at any moment leaves a whole checkpoint or none. What it replaces or outlives is deleted after that: until the new one
counts, the previous one does; and one that somebody reads (`held`) stays until a later time. A folder without a marker, or that disagrees
with it, is skipped by name. The folder itself is a model in Hugging Face format; `optimizer/` in it is torch's distributed checkpoint of
the optimizer's state, and `trainer.pt` the rest.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness_rl.errors import LearnerError, UserError

MARKER = "COMPLETE"
FORMAT = 2
STATE = "trainer.pt"
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    version: str


@dataclass
class Found:
    newest: Checkpoint | None = None
    skipped: list[str] = field(default_factory=list)
    """One line for each folder that does not count: which, and why."""


def seal(temporary: Path, step: int, version: str, keep: int) -> Checkpoint:
    """Make what was written to `temporary` count as `step-<step>` beside it, and delete the oldest complete ones beyond `keep`.

    Raises OSError; an older checkpoint is never touched before the new one counts.
    """
    root = temporary.parent
    written = sorted(path for path in temporary.rglob("*") if path.is_file())
    files = {str(path.relative_to(temporary)): {"bytes": path.stat().st_size, "blake2b": _flushed_hash(path)} for path in written}
    marker = {"format": FORMAT, "step": step, "version": version, "files": files}
    (temporary / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
    _flushed_hash(temporary / MARKER)
    for folder in {path.parent for path in written} | {temporary}:
        _sync_folder(folder)
    final, aside = root / f"step-{step}", root / f".step-{step}.{os.getpid()}.old"
    if final.exists():  # of a line that a crash took back
        final.rename(aside)
    temporary.rename(final)
    shutil.rmtree(aside, ignore_errors=True)
    _sync_folder(root)
    _forget(root, step, keep)
    return Checkpoint(final, step, version)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """While the block runs, the checkpoint at `path` is not deleted, whoever saves newer ones. Raises LearnerError when it is not there.

    By a lock on the marker, so that a reader's death gives it back.
    """
    try:
        with (path / MARKER).open("rb") as marker:
            fcntl.flock(marker, fcntl.LOCK_SH)
            if not (path / MARKER).exists():  # deleted while we waited
                raise FileNotFoundError(path)
            yield
    except FileNotFoundError:
        raise LearnerError(f"checkpoint {path} is not there any more") from None


def find(root: Path) -> Found:
    """The newest complete checkpoint under `root`. Raises UserError, with what is wrong with each, when folders exist but none counts."""
    found = Found()
    folders = sorted(_folders(root), key=lambda item: item[0], reverse=True)
    for step, path in folders:
        try:
            marker = _read_marker(path, step)
        except LearnerError as error:
            found.skipped.append(str(error))
            continue
        found.newest = Checkpoint(path, step, marker["version"])
        return found
    if folders:
        raise UserError(f"no checkpoint in {root} is complete: {'; '.join(found.skipped)}")
    return found


def clean(root: Path) -> None:
    """Remove what a killed `save` left behind; what it had put aside goes back if nothing took its place."""
    if not root.is_dir():
        return
    for path in root.glob(".step-*.old"):
        final = root / path.name.split(".")[1]
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(final)
    for path in root.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _folders(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    named = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in root.iterdir() if path.is_dir())
    return [(int(match[1]), path) for match, path in named if match]


def _read_marker(path: Path, step: int) -> dict[str, Any]:
    try:
        marker: dict[str, Any] = json.loads((path / MARKER).read_text())
    except FileNotFoundError:
        raise LearnerError(f"{path.name}: no {MARKER} marker, so its save did not end") from None
    except (OSError, ValueError) as error:
        raise LearnerError(f"{path.name}: the {MARKER} marker cannot be read ({error})") from None
    if marker.get("format") != FORMAT or marker.get("step") != step:
        raise LearnerError(f"{path.name}: the marker is of format {marker.get('format')}, step {marker.get('step')}")
    for name, expected in marker["files"].items():
        file = path / name
        if not file.is_file():
            raise LearnerError(f"{path.name}: {name} is missing")
        if file.stat().st_size != expected["bytes"] or _hash(file) != expected["blake2b"]:
            raise LearnerError(f"{path.name}: {name} is not the file that was saved")
    return marker


def _forget(root: Path, newest: int, keep: int) -> None:
    complete = sorted((step, path) for step, path in _folders(root) if (path / MARKER).is_file() and step <= newest)
    for _, path in complete[:-keep]:
        with (path / MARKER).open("rb") as marker:
            try:
                fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # somebody reads it; the next save sees to it
            (path / MARKER).unlink()  # first, so that a half-deleted folder does not count
        shutil.rmtree(path, ignore_errors=True)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _flushed_hash(path: Path) -> str:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return _hash(path)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
