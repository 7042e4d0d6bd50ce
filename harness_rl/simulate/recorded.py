"""The workload of a run that was made: its journal, its traces and its metrics lines.

A call's own seconds are what the proxy saw less the time for which an update held it. They are of the load that the run had: as many calls
as were under way at once on an engine count as what it can run at that speed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from capture_proxy.trace import TrainingTrace
from harness_rl.errors import UserError
from harness_rl.metrics import read_metrics
from harness_rl.sessions.outcome import TRACE_FILE
from harness_rl.simulate.workload import Call, Play, Workload

_TRAINING = ("perf/forward_s", "perf/backward_s", "perf/optimizer_s", "perf/pack_s")
"""Parts of a step that a learner cannot do while it waits."""


@dataclass(frozen=True)
class Hold:
    """An update of the weights, in wall-clock seconds."""

    held: float
    released: float
    stopped_s: float


def recorded(run: Path) -> Workload:
    """Raises UserError where the folder has no scored rollout or no step."""
    if not (run / "journal.sqlite").is_file() or not (run / "metrics.jsonl").is_file():
        raise UserError(f"simulate: {run} is not the folder of a run that trained (it has no journal.sqlite or no metrics.jsonl)")
    lines = list(read_metrics(run / "metrics.jsonl"))
    with closing(sqlite3.connect(f"file:{run / 'journal.sqlite'}?mode=ro", uri=True)) as journal:
        try:
            holds = [Hold(*row) for row in journal.execute("SELECT held, released, stopped_s FROM holds ORDER BY held")]
        except sqlite3.OperationalError as error:
            raise UserError(f"simulate: the journal of {run} does not tell when updates held calls ({error}); take a newer run") from None
        found = journal.execute(
            "SELECT r.rollout_id, r.started, r.ended, g.task FROM rollouts r JOIN groups g USING (group_id) "
            "WHERE r.state = 'scored' AND r.ended IS NOT NULL ORDER BY r.rowid"
        ).fetchall()
        states = journal.execute("SELECT state, COALESCE(reason, ''), COUNT(*) FROM groups GROUP BY 1, 2").fetchall()
    plays: dict[str, list[Play]] = {}
    spans: list[tuple[float, float]] = []
    for rollout_id, started, ended, task in found:
        path = run / "rollouts" / rollout_id / TRACE_FILE
        if path.is_file():
            calls = list(calls_of(TrainingTrace.from_bytes(path.read_bytes())))
            spans += [(a, b) for a, b, _ in calls]
            plays.setdefault(task, []).append(play_of(started, ended, calls, holds))
    if not plays or not lines:
        raise UserError(f"simulate: {run} has no scored rollout with a trace, or no step; let it train for some steps first")
    flat = sum(count for state, reason, count in states if state == "dropped" and reason == "zero_variance")
    used = sum(count for state, _, count in states if state in ("scored", "leased", "trained", "durable"))
    return Workload(
        plays=plays,
        usable=used / max(1, used + flat),
        step_s=[sum(line.get(name, 0.0) for name in _TRAINING) for line in lines],
        stopped_s=[hold.stopped_s for hold in holds] or [0.0],
        probe_s=_probe_s(holds, lines),
        calls_per_engine=float(most_at_once(spans)),
    )


def _probe_s(holds: Sequence[Hold], lines: Sequence[Mapping[str, float]]) -> list[float]:
    """What an update takes beside its stop. Where policies are adapters only the first holds anything: there it is all of an update."""
    if loaded := [line["perf/sync_s"] for line in lines if "perf/sync_load_s" in line]:
        return loaded
    return [max(0.0, hold.released - hold.held - hold.stopped_s) for hold in holds] or [0.0]


def calls_of(trace: TrainingTrace) -> Iterator[tuple[float, float, int]]:
    """(start, end, sampled tokens) in wall-clock seconds, by start; calls that overlap are one."""
    pending: tuple[float, float, int] | None = None
    for turn in sorted(trace.turns, key=lambda turn: float(turn.metadata["started_at"])):
        began, ended = float(turn.metadata["started_at"]), float(turn.metadata["ended_at"])
        tokens = len(turn.completion_token_ids)
        if pending is not None and began < pending[1]:
            pending = (pending[0], max(pending[1], ended), pending[2] + tokens)
            continue
        if pending is not None:
            yield pending
        pending = (began, ended, tokens)
    if pending is not None:
        yield pending


def play_of(started: float, ended: float, calls: Sequence[tuple[float, float, int]], holds: Iterable[Hold]) -> Play:
    at, made, holds = started, [], list(holds)
    for began, done, tokens in calls:
        own = max(0.0, done - began - sum(_held(began, done, hold) for hold in holds))
        made.append(Call(max(0.0, began - at), own, tokens))
        at = done
    return Play(tuple(made), max(0.0, ended - at))


def _held(began: float, done: float, hold: Hold) -> float:
    """Of a call from `began` to `done`: one that ran already stood while the engine did, a new one waited for the release."""
    overlap = max(0.0, min(done, hold.released) - max(began, hold.held))
    return min(overlap, hold.stopped_s) if began < hold.held else overlap


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """Calls under way together, at most; 1 for none."""
    running, most = 0, 1
    for _, change in sorted((at, change) for began, ended in spans for at, change in ((began, 1), (ended, -1))):
        running += change
        most = max(most, running)
    return most
