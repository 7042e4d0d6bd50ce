"""Folders that are built once and shared by every session. Invariant: a folder under its final name is complete, and two builders never
work on one name.

The name carries a hash of the recipe; the builder works in a draft folder beside it under a file lock and renames it when it is done. A
draft of a builder that was killed is removed by the next one."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any


def content_key(recipe: Any) -> str:
    """Hash of a JSON-able recipe."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:16]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; it is freed when the process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def building_sync(target: Path) -> Iterator[Path | None]:
    """Under the lock of `target`: an empty folder, out of which the block renames the finished one to `target`; None if that is there."""
    if target.is_dir():
        yield None
        return
    draft = target.parent / f".{target.name}.draft"
    with locked(target.parent / f".{target.name}.lock"):
        if target.is_dir():
            yield None
            return
        remove(draft)
        draft.mkdir()
        try:
            yield draft
        finally:
            remove(draft)


@asynccontextmanager
async def building(target: Path) -> AsyncIterator[Path | None]:
    """`building_sync` for coroutines: waiting for the lock blocks a thread, not the event loop."""
    manager = building_sync(target)
    draft = await asyncio.to_thread(manager.__enter__)
    try:
        yield draft
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


def remove(folder: Path) -> None:
    """Remove a tree that a build made; links in it are not followed."""
    if folder.exists() or folder.is_symlink():
        shutil.rmtree(folder)
