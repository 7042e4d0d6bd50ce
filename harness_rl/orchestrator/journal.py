"""The journal: what a run has dispatched, scored, trained and made durable, in one SQLite file (WAL).

A group moves one way, `running -> scored -> leased(step) -> trained(step) -> durable(checkpoint)`, or ends as `dropped(reason)`; only a
resume takes groups back, to what the newest checkpoint holds. A rollout is written before it is dispatched, so that a killed control
process leaves no work that nobody knows of. Every rollout ends in exactly one state.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness_rl.errors import Cause, HarnessRLError, UserError
from harness_rl.metrics import strict_json

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
  group_id TEXT PRIMARY KEY, position INTEGER NOT NULL, task TEXT NOT NULL, state TEXT NOT NULL, reason TEXT, step INTEGER, updated REAL NOT
  NULL);
CREATE TABLE IF NOT EXISTS rollouts (
  rollout_id TEXT PRIMARY KEY, group_id TEXT NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL, state TEXT NOT NULL,
  cause TEXT, message TEXT, reward REAL, turns INTEGER, started REAL NOT NULL, ended REAL);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, version TEXT NOT NULL, checkpoint TEXT, rows TEXT NOT NULL, ended REAL NOT
NULL);
CREATE TABLE IF NOT EXISTS holds (version TEXT NOT NULL, held REAL NOT NULL, released REAL NOT NULL, stopped_s REAL NOT NULL);
CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts (group_id);
"""


RUN_ENDED = "run_ended"
DEMONSTRATION = "demo-"
"""Beginning of the group ids of a warm start's demonstrations, which no group of the journal is."""


class GroupState(StrEnum):
    RUNNING = "running"
    SCORED = "scored"
    LEASED = "leased"
    TRAINED = "trained"
    DURABLE = "durable"
    DROPPED = "dropped"


class RolloutState(StrEnum):
    RUNNING = "running"
    SCORED = "scored"
    FAILED = "failed"
    """No reward; `cause` says why. A retry is a row of its own."""


@dataclass(frozen=True)
class GroupEntry:
    group_id: str
    position: int
    task: str


@dataclass(frozen=True)
class RolloutEntry:
    """A group member's last attempt."""

    rollout_id: str
    member: int
    attempt: int
    reward: float | None
    causes: list[Cause]
    """Of the member's failed attempts, in order."""
    seconds: float


@dataclass(frozen=True)
class RolloutFate:
    """One attempt, and what became of its group; an evaluation's rollouts have no group in the journal."""

    rollout_id: str
    group_id: str
    cause: Cause | None
    """Of a failed attempt."""
    group_state: GroupState | None
    group_reason: str | None


class _Connection(sqlite3.Connection):
    """A full disk or a broken one is the run's end, by name; what is committed stays whole."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        try:
            return super().execute(sql, parameters)
        except sqlite3.OperationalError as error:
            raise HarnessRLError(
                f"the journal cannot be written: {error}; make room or mend it, then go on with harness-rl train --resume"
            ) from error


class Journal:
    """The only writer of RUN/journal.sqlite. Calls are short and synchronous; each is one transaction."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, factory=_Connection)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise UserError(f"journal: {path} is not a journal of a run: {error}; give another run.name or move the file away") from None

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            with suppress(HarnessRLError):  # where the disk is full, SQLite has rolled back already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def set_meta(self, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(strict_json(value), allow_nan=False)))

    def meta(self, key: str) -> Any:
        found = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return json.loads(found[0]) if found else None

    def open_group(self, group_id: str, position: int, task: str) -> None:
        """`position`: place in the task order, for resuming there."""
        self._db.execute(
            "INSERT INTO groups VALUES (?, ?, ?, ?, NULL, NULL, ?)", (group_id, position, task, GroupState.RUNNING, time.time())
        )

    def move_groups(self, group_ids: Iterable[str], state: GroupState, *, step: int | None = None, reason: str | None = None) -> None:
        with self._transaction() as db:
            for group_id in group_ids:
                db.execute(
                    "UPDATE groups SET state = ?, step = COALESCE(?, step), reason = ?, updated = ? WHERE group_id = ?",
                    (state, step, reason, time.time(), group_id),
                )

    def make_durable(self, step: int, checkpoint: str) -> None:
        """A checkpoint holds the weights after optimizer step `step` (from 1): every group trained up to it is covered."""
        with self._transaction() as db:
            db.execute(
                "UPDATE groups SET state = ?, updated = ? WHERE state = ? AND step <= ?",
                (GroupState.DURABLE, time.time(), GroupState.TRAINED, step),
            )
            db.execute("UPDATE steps SET checkpoint = ? WHERE step = ?", (checkpoint, step))

    def open_rollout(self, rollout_id: str, group_id: str, member: int, attempt: int) -> None:
        self._db.execute(
            "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, NULL, NULL, NULL, NULL, ?, NULL)",
            (rollout_id, group_id, member, attempt, RolloutState.RUNNING, time.time()),
        )

    def held(self, version: str, since: float, stopped_s: float) -> None:
        """An update that held agents' calls from `since` (wall clock) until now, and for `stopped_s` of it the engines."""
        self._db.execute("INSERT INTO holds VALUES (?, ?, ?, ?)", (version, since, time.time(), stopped_s))

    def attempts(self, group_id: str, member: int) -> int:
        """How many attempts of this member were begun so far."""
        query = "SELECT COUNT(*) FROM rollouts WHERE group_id = ? AND member = ?"
        (count,) = self._db.execute(query, (group_id, member)).fetchone()
        return int(count)

    def end_rollout(
        self,
        rollout_id: str,
        state: RolloutState,
        *,
        reward: float | None = None,
        turns: int | None = None,
        cause: str | None = None,
        message: str | None = None,
    ) -> None:
        self._db.execute(
            "UPDATE rollouts SET state = ?, cause = ?, message = ?, reward = ?, turns = ?, ended = ? WHERE rollout_id = ?",
            (state, cause, message, reward, turns, time.time(), rollout_id),
        )

    def end_step(self, step: int, version: str, rows: dict[str, int]) -> None:
        """`rows`: number of rows by state and cause."""
        self._db.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, NULL, ?, ?)", (step, version, json.dumps(rows), time.time()))

    def counts(self) -> dict[str, dict[str, int]]:
        """Totals by state: `groups`, `rollouts`, and `causes` of the failed rollouts."""
        tables = {
            "groups": "SELECT state, COUNT(*) FROM groups GROUP BY state",
            "rollouts": "SELECT state, COUNT(*) FROM rollouts GROUP BY state",
            "causes": "SELECT cause, COUNT(*) FROM rollouts WHERE cause IS NOT NULL GROUP BY cause",
        }
        return {name: dict(self._db.execute(query).fetchall()) for name, query in tables.items()}

    def drop_running(self) -> None:
        """Groups that the end of the run left unfinished."""
        self._db.execute(
            "UPDATE groups SET state = ?, reason = ?, updated = ? WHERE state = ?",
            (GroupState.DROPPED, RUN_ENDED, time.time(), GroupState.RUNNING),
        )

    def groups(self, state: GroupState) -> list[GroupEntry]:
        """In order of their opening."""
        found = self._db.execute("SELECT group_id, position, task FROM groups WHERE state = ? ORDER BY rowid", (state,))
        return [GroupEntry(*row) for row in found]

    def rollouts(self, group_id: str) -> list[RolloutEntry]:
        """The last attempt of each member, by member."""
        last: dict[int, RolloutEntry] = {}
        causes: dict[int, list[Cause]] = {}
        query = (
            "SELECT rollout_id, member, attempt, cause, reward, COALESCE(ended, started) - started FROM rollouts WHERE group_id = ? "
            "ORDER BY member, attempt"
        )
        for rollout_id, member, attempt, cause, reward, seconds in self._db.execute(query, (group_id,)):
            if cause is not None:
                causes.setdefault(member, []).append(Cause(cause))
            last[member] = RolloutEntry(rollout_id, member, attempt, reward, causes.get(member, []), seconds)
        return list(last.values())

    def running(self) -> set[str]:
        """Attempts without an end: under way, or of a process that died."""
        found = self._db.execute("SELECT rollout_id FROM rollouts WHERE state = ?", (RolloutState.RUNNING,))
        return {rollout_id for (rollout_id,) in found}

    def fates(self) -> list[RolloutFate]:
        """Every ended attempt of the run."""
        query = (
            "SELECT r.rollout_id, r.group_id, r.cause, g.state, g.reason FROM rollouts r LEFT JOIN groups g USING (group_id) "
            "WHERE r.state != ? ORDER BY r.rowid"
        )
        found = self._db.execute(query, (RolloutState.RUNNING,)).fetchall()
        return [
            RolloutFate(rollout_id, group_id, Cause(cause) if cause else None, GroupState(state) if state else None, reason)
            for rollout_id, group_id, cause, state, reason in found
        ]

    def rows_by_state(self) -> Counter[str]:
        """Rows of all steps that count."""
        totals: Counter[str] = Counter()
        for (rows,) in self._db.execute("SELECT rows FROM steps"):
            totals.update(json.loads(rows))
        return totals

    def newest_checkpoint(self) -> str | None:
        found = self._db.execute("SELECT checkpoint FROM steps WHERE checkpoint IS NOT NULL ORDER BY step DESC LIMIT 1").fetchone()
        return found[0] if found else None

    def next_places(self) -> tuple[int, int]:
        """(number of the next group, next position in the task order)."""
        (groups, position) = self._db.execute("SELECT COUNT(*), COALESCE(MAX(position) + 1, 0) FROM groups").fetchone()
        return groups, position

    def positions_given_up(self) -> list[int]:
        """Positions of which every group so far was dropped because its process or its run ended."""
        query = (
            "SELECT position FROM groups GROUP BY position "
            "HAVING SUM(state = ? AND COALESCE(reason, '') IN (?, ?)) = COUNT(*) ORDER BY position"
        )
        return [position for (position,) in self._db.execute(query, (GroupState.DROPPED, Cause.ABANDONED, RUN_ENDED))]

    def take_back(self, step: int) -> None:
        """The weights are those after `step` again, and nobody plays any rollout: later steps are forgotten, their groups only scored."""
        now = time.time()
        trained = (GroupState.LEASED, GroupState.TRAINED, GroupState.DURABLE)
        with self._transaction() as db:
            db.execute("UPDATE groups SET state = ?, updated = ? WHERE state IN (?, ?, ?) AND step <= ?", (trained[2], now, *trained, step))
            db.execute(
                "UPDATE groups SET state = ?, step = NULL, updated = ? WHERE state IN (?, ?, ?) AND step > ?",
                (GroupState.SCORED, now, *trained, step),
            )
            db.execute(
                "UPDATE groups SET state = ?, reason = ?, updated = ? WHERE state = ?",
                (GroupState.DROPPED, Cause.ABANDONED, now, GroupState.RUNNING),
            )
            db.execute(
                "UPDATE rollouts SET state = ?, cause = ?, ended = ? WHERE state = ?",
                (RolloutState.FAILED, Cause.ABANDONED, now, RolloutState.RUNNING),
            )
            db.execute("DELETE FROM steps WHERE step > ?", (step,))
