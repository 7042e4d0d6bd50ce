"""Where everything of a run went, read from its folder alone: each rollout, call, sampled token and row is counted in exactly one place.

The figures survive kills and resumes, because the folder does: a run's accounts are those of all its processes.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness_rl.orchestrator.journal import DEMONSTRATION, GroupState, Journal, RolloutFate
from harness_rl.sessions.base import StopReason
from harness_rl.sessions.outcome import OUTCOME_FILE
from harness_rl.wholefile import write_whole

log = logging.getLogger(__name__)

TRAINED = "trained"
EVALUATED = "evaluated"
"""Of an evaluation or a warm start's check: scored, and in no group of the run."""
DEMONSTRATED = "demonstrated"
"""A task's own solution, captured for a warm start."""
_CUT = frozenset({StopReason.LIMIT, StopReason.AGENT_TIMEOUT})

WAITING = "waiting"
"""Scored, in a group that no update used yet."""


@dataclass
class Accounts:
    rollouts: Counter[str] = field(default_factory=Counter)
    """Every attempt, by what became of it: `trained`, `evaluated`, `demonstrated`, `waiting`, the reason for which its group was
    dropped, or the cause of its failure."""
    failures: Counter[str] = field(default_factory=Counter)
    """The failed attempts among them, by whose fault it was."""
    calls: Counter[str] = field(default_factory=Counter)
    """Every model call that a recorded session saw, by what became of it; calls that could train share their rollout's fate."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Sampled tokens of recorded sessions, by the fate of their rollout."""
    rows: Counter[str] = field(default_factory=Counter)
    """Rows given to the learner in steps that count, by their state; rejected ones also by their cause."""
    cut: int = 0
    """Scored attempts that a limit or the agent's time ended: the model's doing, which keeps its reward and is no failure."""
    unrecorded: int = 0
    """Attempts without a record in rollouts/: their process was killed, or they failed before a session was open."""

    def as_dict(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}


def settle(journal: Journal, rollouts_dir: Path) -> Accounts:
    accounts = Accounts(rows=journal.rows_by_state())
    for rollout in journal.fates():
        fate = _fate(rollout)
        accounts.rollouts[fate] += 1
        if rollout.cause is not None:
            accounts.failures[rollout.cause.fault] += 1
        record = _record(rollouts_dir / rollout.rollout_id)
        if rollout.cause is None and record.get("stop_reason") in _CUT:
            accounts.cut += 1
        capture = record.get("capture")
        if capture is None:
            accounts.unrecorded += 1
            continue
        for reason, count in capture["calls_by_reason"].items():
            accounts.calls[fate if reason == TRAINED else reason] += count
        accounts.tokens[fate] += capture["tokens"]["sampled"]
    return accounts


def write_accounts(accounts: Accounts, run_dir: Path) -> None:
    write_whole(run_dir / "accounts.json", json.dumps(accounts.as_dict(), indent=1) + "\n")


def row_fates(states: Mapping[str, str], reasons: Mapping[str, str]) -> Counter[str]:
    """A step's rows by state; where the learner gives a row's reason, also by that, without the row's own name."""
    fates: Counter[str] = Counter()
    for row_id, state in states.items():
        reason = reasons.get(row_id, "")
        cause = reason.partition(": ")[2] or reason
        fates[f"{state} ({cause:.60})" if cause else str(state)] += 1
    return fates


def _fate(rollout: RolloutFate) -> str:
    if rollout.cause is not None:
        return rollout.cause
    match rollout.group_state:
        case None:
            return DEMONSTRATED if rollout.group_id.startswith(DEMONSTRATION) else EVALUATED
        case GroupState.TRAINED | GroupState.DURABLE:
            return TRAINED
        case GroupState.DROPPED:
            return rollout.group_reason or GroupState.DROPPED
        case _:
            return WAITING


def _record(folder: Path) -> dict[str, Any]:
    """What the rollout left; `capture` in it is the proxy's last word on its session. Empty: nothing that can be read."""
    try:
        found = json.loads((folder / OUTCOME_FILE).read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        log.warning("%s cannot be read: %r", folder / OUTCOME_FILE, error)
        return {}
    return found if isinstance(found, dict) else {}
