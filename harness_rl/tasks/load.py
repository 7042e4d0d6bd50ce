"""Which tasks a folder holds. Reads names and text only: no Harbor, no sandbox, so that every part of the system may import it.

A task is a folder with a `task.toml` and an `instruction.md`. A path names one task or a folder of tasks. Nothing that looks like a task is
skipped silently: a link, a hidden folder or a half-written task is refused by name. Two runs see the same tasks in the same order.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness_rl.errors import UserError

CONFIG = "task.toml"
INSTRUCTION = "instruction.md"
SOLUTION = "solution/solve.sh"


@dataclass(frozen=True)
class TaskRef:
    """A task by name, with what the orchestrator needs before a sandbox exists."""

    name: str
    """The folder's name: unique within its task set."""
    path: Path
    instruction: str
    """Blank space at the ends removed; of a multi-step task the first step's."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The `[metadata]` table of task.toml."""


def list_tasks(path: Path) -> list[TaskRef]:
    """The tasks at `path`, sorted by name. Raises UserError naming the first folder that is no sound task."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"tasks: {path} does not exist; give a Harbor task or a folder of them")
    if not path.is_dir():
        raise UserError(f"tasks: {path} is not a folder; give a Harbor task or a folder of them")
    if (path / CONFIG).is_file():
        return [read_task(path)]
    folders = [child for child in sorted(path.iterdir()) if _looks_like_task(child)]
    if not folders:
        splits = [child.name for child in sorted(path.iterdir()) if child.is_dir() and any(child.glob(f"*/{CONFIG}"))]
        hint = f"; did you mean {path / splits[0]}?" if splits else f"; a task is a folder with {CONFIG}, {INSTRUCTION} and tests/test.sh"
        raise UserError(f"tasks: {path} holds no tasks{hint}")
    return [read_task(folder) for folder in folders]


def read_task(folder: Path) -> TaskRef:
    """The task in `folder`. Raises UserError."""
    if folder.is_symlink():
        raise UserError(f"tasks: {folder} is a symbolic link; put the task's own folder there, or name {folder.resolve()}")
    if folder.name.startswith("."):
        raise UserError(f"tasks: {folder} is a hidden folder with a task in it; rename or remove it")
    config = _read_config(folder)
    steps = config.get("steps") or []
    instruction = folder / INSTRUCTION
    if steps:
        instruction = folder / "steps" / str(steps[0].get("name", "")) / INSTRUCTION
    text = _read(instruction).strip()
    if not text:
        raise UserError(f"tasks: {instruction} is empty; write what the agent is to do")
    metadata = config.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise UserError(f"tasks: {folder / CONFIG}: metadata is not a table; write [metadata] and keys below it")
    return TaskRef(folder.resolve().name, folder.resolve(), text, metadata)


def solution_commands(task: TaskRef) -> str:
    """The body of the task's solution: shell text without comment lines and `set -e` and its like. Raises UserError where there is none."""
    lines = _read(task.path / SOLUTION).splitlines()
    body = "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith(("#", "set -")))
    if not body:
        raise UserError(f"tasks: {task.path / SOLUTION} holds no command; a demonstration needs the task's solution")
    return body


def _looks_like_task(folder: Path) -> bool:
    return folder.is_dir() and any((folder / name).exists() for name in (CONFIG, INSTRUCTION))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read(folder / CONFIG))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"tasks: {folder / CONFIG} is not valid TOML: {error}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"tasks: {path} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"tasks: {path} cannot be read: {error}") from None
