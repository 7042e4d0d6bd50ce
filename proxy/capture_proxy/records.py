"""A turn as a store record, and a session's trace from its graph or from its log.

Invariant: `turn_from_record(turn_to_record(turn))` is the turn, bit for bit, and the trace is a function of the records alone: what the
proxy answers while it runs and what is rebuilt from the log later are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from capture_proxy.graph import Placed, Turn, TurnGraph
from capture_proxy.reasons import Reason
from capture_proxy.store import Record, StoreError, frame, read_log
from capture_proxy.trace import TrainingTrace, TrainingTurn, hash_sample

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLAIN = (
    "node_id", "seq", "parent", "base", "keep", "request", "response", "meta", "rendered_len", "rendered_hash", "continues",
    "has_tools", "retry_mark",
)  # fmt: skip
_KEYS = ("chain", "reply_key", "system_key")


def turn_to_record(turn: Turn) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Header and arrays of a turn's record: its ids as what they add to its base."""
    header: dict[str, Any] = {"t": "turn", **{name: getattr(turn, name) for name in _PLAIN}}
    header |= {name: getattr(turn, name).hex() for name in _KEYS}
    header["reason"] = turn.reason.value if turn.reason else None
    header["ruled"] = turn.ruled
    header["delivered"] = turn.delivered
    header["tool_call_ids"] = list(turn.tool_call_ids)
    return header, {"tail": turn.prompt[turn.keep :], "completion": turn.completion, "logps": turn.logps}


def turn_frame(turn: Turn) -> bytes:
    """A turn's record as it stands in the log."""
    return frame(*turn_to_record(turn))


def turn_from_record(record: Record, known: Mapping[str, Turn]) -> Turn:
    """The turn of a record; `known` holds the turns recorded before it."""
    header = record.header
    head = known[header["base"]].total[: header["keep"]] if header["base"] is not None else np.empty(0, np.int32)
    tail, completion = record.arrays["tail"], record.arrays["completion"]
    fields: dict[str, Any] = {name: header[name] for name in _PLAIN} | {name: bytes.fromhex(header[name]) for name in _KEYS}
    return Turn(
        **fields,
        prompt_len=len(head) + len(tail),
        total=np.concatenate([head, tail, completion]),
        logps=record.arrays["logps"],
        reason=Reason(header["reason"]) if header["reason"] else None,
        ruled=header.get("ruled"),  # logs from before there were rules have none
        delivered=header.get("delivered", True),  # nor did logs always say so
        tool_call_ids=tuple(header["tool_call_ids"]),
    )


@dataclass(frozen=True)
class Snapshot:
    """A session's turns at one moment; its trace can be built in another thread while the session goes on."""

    placed: list[Placed]
    bodies: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, graph: TurnGraph) -> Snapshot:
        return cls(graph.placed(), graph.bodies())

    def trace(self) -> TrainingTrace:
        """All turns, in order of arrival."""
        return TrainingTrace(turns=[_training_turn(placed, self.bodies[placed.turn.node_id]) for placed in self.placed])


def trace_from_log(path: Path) -> TrainingTrace:
    """The trace that a log holds, without a proxy. Raises `StoreError` when it is not a session's log."""
    graph = TurnGraph()
    records = read_log(path).records
    if not records or records[0].header["t"] != "session":
        raise StoreError(f"{path} holds no session")
    for record in records:
        if record.header["t"] == "turn":
            graph.add(turn_from_record(record, graph.turns))
        elif record.header["t"] == "amend":
            graph.turns[record.header["node"]].reason = Reason(record.header["reason"])
        elif record.header["t"] == "delivered":
            graph.turns[record.header["node"]].delivered = True
    return Snapshot.of(graph).trace()


def _training_turn(placed: Placed, request: dict[str, Any]) -> TrainingTurn:
    turn = placed.turn
    proven = len(turn.logps) == len(turn.completion)
    # Ids without valid logprobs are context for what follows, not a sample: they stay visible in the metadata only.
    completion = turn.completion if proven else turn.completion[:0]
    trained = placed.reason is None
    mask = np.zeros(turn.prompt_len + len(completion), dtype=np.uint8)
    mask[turn.prompt_len :] = trained
    metadata = {
        **turn.meta,
        "parent": turn.parent,
        "branch": placed.branch,
        "role": placed.role,
        "mask_reason": placed.reason.value if placed.reason else None,
        "continues": turn.continues,
        "call": turn.seq,
        "weight_versions": turn.meta["weight_versions"] if proven else [],
        "sample_hash": hash_sample(completion, turn.logps, mask[turn.prompt_len :]),
    }
    if not proven:
        metadata["untrained_token_ids"] = turn.completion.tolist()
    return TrainingTurn(
        node_id=turn.node_id,
        prompt_token_ids=turn.prompt,
        completion_token_ids=completion,
        per_token_logps=turn.logps,
        loss_mask=mask,
        request=request,
        response=turn.response,
        metadata=metadata,
    )
