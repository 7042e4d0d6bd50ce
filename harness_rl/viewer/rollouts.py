"""Which rollouts a run has, from its folder and its journal; both are only read, so that a running run may be looked at."""

from __future__ import annotations

import difflib
import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from capture_proxy.trace import TrainingTrace
from harness_rl.errors import UserError
from harness_rl.sessions.outcome import OUTCOME_FILE, TRACE_FILE
from harness_rl.viewer.text import UNKNOWN, number, printable

_NEAR = 5
"""Ids offered where the one asked for is unknown or not unique."""


_JOURNAL_QUERY = """
SELECT r.rollout_id, g.task, r.state, r.reward, r.turns, r.cause FROM rollouts r LEFT JOIN groups g USING (group_id) ORDER BY r.started
"""


@dataclass(frozen=True)
class RolloutSummary:
    rollout_id: str
    task: str | None
    state: str | None
    """`running`, `scored`, `failed`, `abandoned`; None where the journal does not know the rollout."""
    reward: float | None
    """After the reward function; without a journal entry, the verifier's. None: no reward."""
    turns: int | None
    trained_tokens: int | None
    cause: str | None
    """Why there is no reward."""


def list_rollouts(run_dir: Path) -> list[RolloutSummary]:
    """Every rollout of the run in the order of their start; raises UserError where `run_dir` is not a run."""
    folders = _folders(run_dir)
    known = _journal(run_dir / "journal.sqlite")
    ids = [*known, *sorted(folders.keys() - known.keys())]
    return [_summary(rollout_id, folders.get(rollout_id), known.get(rollout_id)) for rollout_id in ids]


def find_rollout(run_dir: Path, wanted: str) -> RolloutSummary:
    """The rollout with this id or unique beginning of one."""
    rollouts = {rollout.rollout_id: rollout for rollout in list_rollouts(run_dir)}
    if wanted in rollouts:
        return rollouts[wanted]
    matches = [rollout_id for rollout_id in rollouts if rollout_id.startswith(wanted)]
    if len(matches) == 1:
        return rollouts[matches[0]]
    if matches:
        raise UserError(f"trace: {len(matches)} rollouts begin with {wanted!r}: {_some(matches)}; give more of the id")
    near = difflib.get_close_matches(wanted, rollouts, n=_NEAR, cutoff=0.5)
    hint = f"did you mean {_some(near)}?" if near else f"leave the id out to list the {len(rollouts)} that there are"
    raise UserError(f"trace: no rollout {wanted!r} in {run_dir}; {hint}")


def load_trace(run_dir: Path, rollout: RolloutSummary) -> TrainingTrace:
    """The rollout's trace, with every check of its file; raises UserError where there is none."""
    path = run_dir / "rollouts" / rollout.rollout_id / TRACE_FILE
    try:
        return TrainingTrace.from_bytes(path.read_bytes())
    except FileNotFoundError:
        state = rollout.cause or rollout.state or "not ended"
        raise UserError(f"trace: {rollout.rollout_id} has no {TRACE_FILE} ({state}); see its folder {path.parent}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"trace: {path} cannot be read: {error}") from None


def rollouts_table(rollouts: list[RolloutSummary]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for header in ("rollout", "task"):
        table.add_column(header, overflow="fold")
    for header in ("reward", "turns", "trained tokens"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for rollout in rollouts:
        state = rollout.cause or rollout.state or ""
        table.add_row(
            rollout.rollout_id,
            printable(rollout.task or UNKNOWN),
            number(rollout.reward),
            number(rollout.turns, 0),
            number(rollout.trained_tokens, 0),
            state,
            style="yellow" if rollout.cause else None,
        )
    return table


def _folders(run_dir: Path) -> dict[str, Path]:
    root = run_dir / "rollouts"
    if not root.is_dir():
        raise UserError(f"trace: {run_dir} has no rollouts folder; give the folder of a run, such as runs/NAME")
    return {folder.name: folder for folder in root.iterdir() if folder.is_dir()}


def _summary(rollout_id: str, folder: Path | None, entry: dict[str, Any] | None) -> RolloutSummary:
    record = _outcome(folder) if folder else {}
    entry = entry or {"reward": record.get("env_reward")}
    return RolloutSummary(
        rollout_id=rollout_id,
        task=entry.get("task") or record.get("task_name"),
        state=entry.get("state"),
        reward=entry.get("reward"),
        turns=record.get("turns", entry.get("turns")),
        trained_tokens=record.get("trained_tokens"),
        cause=entry.get("cause") or record.get("cause"),
    )


def _outcome(folder: Path) -> dict[str, Any]:
    """The rollout's record; empty while it runs."""
    path = folder / OUTCOME_FILE
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"trace: {path} cannot be read: {error}") from None
    return record if isinstance(record, dict) else {}


def _journal(path: Path) -> dict[str, dict[str, Any]]:
    """The journal's entry of each rollout by id, the oldest first; empty without a journal."""
    if not path.is_file():
        return {}
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            rows = db.execute(_JOURNAL_QUERY).fetchall()
        finally:
            db.close()
    except sqlite3.Error as error:
        raise UserError(f"trace: {path} cannot be read: {error}") from None
    return {row[0]: dict(zip(("task", "state", "reward", "turns", "cause"), row[1:], strict=True)) for row in rows}


def _some(ids: list[str]) -> str:
    return ", ".join(ids[:_NEAR]) + (", ..." if len(ids) > _NEAR else "")
