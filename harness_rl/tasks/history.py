"""Answers that lie in a task's own version control: commits that its checkout does not show, but its object store holds.

Invariant: what is looked at is every commit of the store, packed or loose, named or not; a store that cannot be read counts as one that may
hold an answer. Nothing of the task is run: git is asked to list objects, with no configuration but its own.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_ASK_S = 60.0


class Unreadable(Exception):
    """A store that could not be listed; the message says why."""


def stores(folder: Path) -> Iterator[Path]:
    """The git folders below `folder`: bare ones and those of working copies and submodules."""
    for root, folders, files in os.walk(folder):
        if "HEAD" in files and {"objects", "refs"} <= set(folders):
            yield Path(root)


def hidden_commits(store: Path) -> list[str]:
    """Ids of the commits that are in the store and not in the history of what is checked out. Raises Unreadable."""
    objects = _git(store, "cat-file", "--batch-all-objects", "--batch-check=%(objecttype) %(objectname)", "--unordered")
    commits = {line.split()[1] for line in objects.splitlines() if line.startswith("commit ")}
    if not commits:
        return []
    shown = set(_git(store, "rev-list", "HEAD").split())
    return sorted(commits - shown)


def _git(store: Path, *arguments: str) -> str:
    quiet = {"PATH": os.defpath, "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    argv = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", f"--git-dir={store}", *arguments]
    try:
        done = subprocess.run(argv, env=quiet, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreadable(f"git {arguments[0]}: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise Unreadable(f"git {arguments[0]}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout
