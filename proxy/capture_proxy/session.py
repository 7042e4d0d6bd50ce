"""One rollout's capture, from its first call to its seal.

Invariant: the session in memory is what its log says: every change is one appended record, and a session rebuilt from the log after
a kill equals the one that was lost, less the calls in flight, which count as abandoned. Every call seen is in flight, a turn, or counted
under a reason. Sealed is final.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Literal

from capture_proxy.bigjson import BIG, off_loop
from capture_proxy.graph import Turn, TurnGraph
from capture_proxy.history import History
from capture_proxy.reasons import Reason
from capture_proxy.records import turn_frame, turn_from_record
from capture_proxy.spec import SessionSpec
from capture_proxy.store import LogContent, SessionLog, StoreError

CANCEL_S = 1.0
"""How long a cancelled call may take to end."""
WRITE_S = 30.0
"""How long the write of a big turn may take that a seal finds under way."""
TRAINED = "trained"
"""Key of the trained turns among the counts by reason."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class RunningCall:
    """A call in flight."""

    seq: int
    started_at: float
    key: str
    """The turn's node id, should it become one; also in the ids of the answer and of its tool calls."""
    task: asyncio.Task[Any] | None = None
    sampling: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the call has passed every check that can refuse it and is being sampled."""
    body_bytes: int = 0
    """Size of its request."""
    writing: asyncio.Task[None] | None = None
    """The write of a big turn, which goes on where the call is cancelled."""
    admitted: bool = False
    """It counts against `max_calls`."""
    cancel_reason: Reason = Reason.ABANDONED
    node_id: str | None = None
    """The turn, once it is stored."""
    delivered: bool = False
    """The answer's last byte has been handed to the client's connection."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing more can happen to the call."""

    @property
    def response_id(self) -> str:
        return f"chatcmpl-{self.key}"

    @property
    def created(self) -> int:
        return int(self.started_at)


class Session:
    """State machine `open` -> `sealed`. All methods run on the event loop's thread."""

    def __init__(self, session_id: str, key_hash: str, spec: SessionSpec, created_at: float, log: SessionLog) -> None:
        self.id = session_id
        self.key_hash = key_hash
        self.spec = spec
        self.created_at = created_at
        self.log = log
        self.cache_salt: str | None = None
        """Of the engine's cached blocks that its calls may use; None: any."""
        self.state: Literal["open", "sealed"] = "open"
        self.graph = TurnGraph()
        self.history = History()
        self.running: dict[int, RunningCall] = {}
        self.ended: Counter[Reason] = Counter()
        """Calls without a turn, by reason."""
        self.late_calls = 0
        self.findings: list[dict[str, Any]] = []
        self.last_call_at: float | None = None
        self.first_prompt_len: int | None = None
        """Of the first turn that no rule calls a side call."""
        self.recent_calls: deque[float] = deque()
        """When the calls of the last minute came (monotonic), where the session has such a limit."""
        limit = spec.limits.max_concurrent_calls
        self.slots: asyncio.Semaphore | None = asyncio.Semaphore(limit) if limit is not None else None
        self._seq = 0
        self._begun: set[int] = set()

    @classmethod
    def create(cls, session_id: str, key_hash: str, spec: SessionSpec, log: SessionLog, cache_salt: str | None = None) -> Session:
        """A new session; its first record holds the key's hash, never the key."""
        session = cls(session_id, key_hash, spec, time.time(), log)
        session.cache_salt = cache_salt
        header = {"t": "session", "session_id": session_id, "key_hash": key_hash, "created_at": session.created_at}
        if cache_salt is not None:
            header["cache_salt"] = cache_salt
        log.append({**header, "spec": spec.model_dump(mode="json")})
        return session

    @classmethod
    def resume(cls, content: LogContent, log: SessionLog) -> Session | None:
        """The session of a log, ready for further calls; None when it was deleted or never came to its first record."""
        session: Session | None = None
        for record in content.records:
            header = record.header
            kind = header["t"]
            if kind == "session":
                spec = SessionSpec.model_validate(header["spec"])
                session = cls(header["session_id"], header["key_hash"], spec, header["created_at"], log)
                session.cache_salt = header.get("cache_salt")
                continue
            if session is None or kind == "delete":
                return None
            if kind == "begin":
                session._seq = max(session._seq, header["call"])
                session._begun.add(header["call"])
                session.last_call_at = header["at"]
            elif kind == "turn":
                session._take(turn_from_record(record, session.graph.turns))
            elif kind == "end":
                session._end(header["call"], Reason(header["reason"]))
            elif kind == "amend":
                session._amend(header["node"], Reason(header["reason"]))
            elif kind == "delivered":
                session.graph.turns[header["node"]].delivered = True
            elif kind == "note":
                session.findings.append(header["finding"])
            elif kind == "late":
                session.late_calls += 1
            elif kind == "seal":
                session.state = "sealed"
        if session is None:
            return None
        if content.torn_bytes:
            session.note("torn_tail", f"{content.torn_bytes} bytes after the last whole record were cut off")
        for seq in sorted(session._begun):
            session.end(seq, Reason.ABANDONED)
        return session

    def begin(self) -> RunningCall:
        """A call has arrived."""
        seq = self._seq + 1
        call = RunningCall(seq, time.time(), key=f"{seq:04x}{secrets.token_hex(6)}")
        self.log.append({"t": "begin", "call": call.seq, "at": call.started_at})
        self._seq = call.seq
        self._begun.add(call.seq)
        self.running[call.seq] = call
        self.last_call_at = call.started_at
        return call

    async def record(self, call: RunningCall, turn: Turn) -> asyncio.Future[None]:
        """Stores a call's turn, of a cancelled call whole or not at all; the future is done when it may be shown to the agent."""
        big = call.body_bytes >= BIG
        frame = await off_loop(call.body_bytes, turn_frame, turn)
        cancelled: asyncio.CancelledError | None = None
        if not big:
            self.log.put(frame)
        else:
            call.writing = writing = asyncio.create_task(asyncio.to_thread(self.log.put, frame))
            while not writing.done():
                try:
                    await asyncio.wait({writing})
                except asyncio.CancelledError as error:
                    cancelled = error
            writing.result()
        self._take(turn)
        call.node_id = turn.node_id
        if cancelled is not None:
            raise cancelled
        return self.log.store.confirm(self.log.fd)

    def end(self, seq: int, reason: Reason, detail: str | None = None) -> None:
        """A call is over without a turn."""
        self._end(seq, reason)
        self.log.append({"t": "end", "call": seq, "reason": reason.value, "detail": detail})

    def amend(self, node_id: str, reason: Reason) -> None:
        """A stored turn is not trained after all. The first reason stays."""
        if self.graph.turns[node_id].reason is None:
            self.log.append({"t": "amend", "node": node_id, "reason": reason.value})
            self._amend(node_id, reason)

    def abandon(self) -> None:
        """Whoever would have used the turns has died: none of them is trained."""
        for node_id in self.graph.turns:
            self.amend(node_id, Reason.ABANDONED)

    def deliver(self, call: RunningCall) -> None:
        """The answer's last byte is out. Without this record, as after a kill, a turn trains only if a later request holds its answer."""
        call.delivered = True
        if call.node_id is None:
            return
        try:
            self.log.append({"t": "delivered", "node": call.node_id})
        except StoreError as error:
            log.error("session %s, call %d: %s", self.id, call.seq, error)
        else:
            self.graph.turns[call.node_id].delivered = True

    def note(self, code: str, detail: str, call: int | None = None) -> None:
        """Something that whoever reads the session should know."""
        finding = {"code": code, "detail": detail, "call": call}
        self.log.append({"t": "note", "finding": finding})
        self.findings.append(finding)

    def late(self) -> None:
        """A call came after the seal."""
        self.log.append({"t": "late", "at": time.time()})
        self.late_calls += 1

    def leave(self, call: RunningCall) -> None:
        """A call is over for good: answered, refused or given up."""
        self.running.pop(call.seq, None)
        call.left.set()

    async def seal(self, grace_s: float) -> None:
        """Closes the door, gives calls in flight `grace_s`, then cancels them as late. Afterwards the trace does not change."""
        if self.state == "open":
            self.log.append({"t": "seal", "at": time.time()})
            self.state = "sealed"
        await self._drain(grace_s)
        for call in self.running.values():
            call.cancel_reason = Reason.LATE
            if call.task is not None:
                call.task.cancel()
        if writing := [call.writing for call in self.running.values() if call.writing is not None]:
            await asyncio.wait(writing, timeout=WRITE_S)
        await self._drain(CANCEL_S)
        for call in self.running.values():
            # A client that reads its answer too slowly does not have it yet.
            if call.node_id is not None and not call.delivered:
                self.amend(call.node_id, Reason.LATE)

    async def delete(self) -> None:
        """Ends the session for good; its log stays until it is purged."""
        await self.seal(0.0)
        self.log.append({"t": "delete", "at": time.time()})
        self.log.close()

    async def _drain(self, timeout_s: float) -> None:
        leaving = [asyncio.create_task(call.left.wait()) for call in self.running.values()]
        if leaving:
            _, slow = await asyncio.wait(leaving, timeout=timeout_s)
            for task in slow:
                task.cancel()

    @property
    def demonstrated(self) -> int:
        """How many turns of the script have been given."""
        return sum(1 for turn in self.graph.turns.values() if turn.meta["origin"] == "demonstration")

    def status(self) -> dict[str, Any]:
        """Counts and findings; `calls_seen` = sum of `calls_by_reason` + `in_flight`."""
        counts: Counter[str] = Counter({reason.value: n for reason, n in self.ended.items()})
        prompt = sampled = 0
        for placed in self.graph.placed():
            demonstration = placed.turn.meta["origin"] == "demonstration"
            counts[placed.reason.value if placed.reason else Reason.DEMONSTRATION.value if demonstration else TRAINED] += 1
            prompt += placed.turn.prompt_len
            sampled += len(placed.turn.completion)
        if self.late_calls:
            counts[Reason.LATE.value] += self.late_calls
        return {
            "session_id": self.id,
            "state": self.state,
            "metadata": self.spec.metadata,
            "calls_seen": self._seq + self.late_calls,
            "turns": len(self.graph.turns),
            "calls_by_reason": dict(counts),
            "findings": self.findings,
            "late_calls": self.late_calls,
            "tokens": {"prompt": prompt, "sampled": sampled},
            "created_at": self.created_at,
            "last_call_at": self.last_call_at,
            "in_flight": len(self._begun),
        }

    def _take(self, turn: Turn) -> None:
        self.graph.add(turn)
        self.history.add(turn)
        if self.first_prompt_len is None and turn.ruled is None:
            self.first_prompt_len = turn.prompt_len
        self._begun.discard(turn.seq)

    def _end(self, seq: int, reason: Reason) -> None:
        self.ended[reason] += 1
        self._begun.discard(seq)

    def _amend(self, node_id: str, reason: Reason) -> None:
        self.graph.turns[node_id].reason = reason
