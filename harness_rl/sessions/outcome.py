"""From a sealed trace and a verdict to what a reward function sees, and to the rollout's folder on disk.

A turn that the agent did not use (a retry's first attempt, a late or abandoned call) or that is a side call of the harness is in the
trace, but it is neither counted as a tool call nor taken for the conversation. Files are written whole or not at all.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture_proxy.reasons import Reason
from harness_rl.sessions.base import HarnessRolloutOutcome, RolloutFailure, StopReason, VerifyResult
from harness_rl.sessions.causes import TrialFacts
from harness_rl.sessions.history_search import search_count
from harness_rl.wholefile import write_whole

if TYPE_CHECKING:
    from capture_proxy.trace import TrainingTrace, TrainingTurn

TRACE_FILE = "trace.bin"
OUTCOME_FILE = "outcome.json"

_UNUSED = frozenset({Reason.AUXILIARY, Reason.RETRY, Reason.DISCARDED, Reason.ABANDONED, Reason.LATE, Reason.PROBE})
_RETURN_CODE = re.compile(r"<returncode>\s*(-?\d+)\s*</returncode>")
_FAILURE_WORDS = re.compile(r"error|failed|traceback|exception", re.IGNORECASE)


def build_outcome(trace: TrainingTrace, verdict: VerifyResult, facts: TrialFacts) -> HarnessRolloutOutcome:
    """The outcome of a rollout; `verdict.env_reward` is None where there is no valid reward."""
    used = used_turns(trace)
    names = Counter(call.get("function", {}).get("name") or "?" for turn in used for call in _message(turn).get("tool_calls") or [])
    return HarnessRolloutOutcome(
        env_reward=verdict.env_reward,
        completion=_conversation(used),
        trace=trace,
        tool_call_count=names.total(),
        tool_failure_count=sum(_failed(content) for content in _tool_results(used)),
        tool_calls_by_name=dict(names),
        timed_out=facts.timed_out,
        metrics={**verdict.metrics, **_flags(used, facts)},
        turns=len(trace.turns),
        stop_reason=_stop_reason(facts).value,
    )


def _flags(used: list[TrainingTurn], facts: TrialFacts) -> dict[str, float]:
    """What is counted of every rollout and changes no reward by itself."""
    cut = facts.limit_reached or (bool(used) and used[-1].metadata.get("finish_reason") == "length")
    return {"rollout/history_search": float(search_count(map(_message, used)) > 0), "rollout/truncated": float(cut)}


def used_turns(trace: TrainingTrace) -> list[TrainingTurn]:
    """The turns whose answers the agent used."""
    return [turn for turn in trace.turns if turn.metadata.get("mask_reason") not in _UNUSED]


def rollout_record(
    about: dict[str, Any],
    outcome: HarnessRolloutOutcome | None,
    failure: RolloutFailure | None,
    *,
    result: Any = None,
    status: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `outcome.json` holds: where the rollout came from, how it ended, how long each phase took. Plain JSON data.

    `result` is Harbor's TrialResult, `status` the proxy's final status of the capture session.
    """
    record: dict[str, Any] = {"schema": 1, **about}
    record["cause"] = failure.cause.value if failure else None
    record["message"] = failure.message if failure else None
    if outcome is not None:
        record |= {name: value for name, value in vars(outcome).items() if name != "trace"}
        record["trained_tokens"] = sum(int(turn.loss_mask.sum()) for turn in outcome.trace.turns)
    if result is not None:
        record["seconds"] = _phase_seconds(result)
        entries = (holder.exception_info for holder in (result, *(result.step_results or [])))
        record["exceptions"] = [f"{entry.exception_type}: {entry.exception_message[:500]}" for entry in entries if entry is not None]
    record["capture"] = status
    return record


def write_record(folder: Path, record: dict[str, Any], trace: TrainingTrace | None) -> None:
    """Write `trace.bin`, where there is one, then `outcome.json`: where that exists, the trace is whole. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if trace is not None:
        write_whole(folder / TRACE_FILE, trace.to_bytes())
    write_whole(folder / OUTCOME_FILE, json.dumps(record, indent=1, allow_nan=False))


def read_outcome(folder: Path) -> HarnessRolloutOutcome:
    """What `write_record` wrote of a scored rollout. Raises OSError or ValueError: it is missing or not whole."""
    from capture_proxy.trace import TrainingTrace

    record = json.loads((folder / OUTCOME_FILE).read_text())
    names = {field.name for field in fields(HarnessRolloutOutcome)} - {"trace"}
    if not isinstance(record, dict) or not names <= record.keys():
        raise ValueError(f"{folder / OUTCOME_FILE} lacks {', '.join(sorted(names - set(record)))}")
    trace = TrainingTrace.from_bytes((folder / TRACE_FILE).read_bytes())
    return HarnessRolloutOutcome(trace=trace, **{name: record[name] for name in names})


def _phase_seconds(result: Any) -> dict[str, float]:
    """Seconds of each of Harbor's phases; those of a multi-step task's steps are added up."""
    seconds: dict[str, float] = {}
    for holder in (result, *(result.step_results or [])):
        for phase in ("environment_setup", "agent_setup", "agent_execution", "verifier"):
            timing = getattr(holder, phase, None)
            if timing is not None and timing.started_at is not None and timing.finished_at is not None:
                seconds[phase] = seconds.get(phase, 0.0) + (timing.finished_at - timing.started_at).total_seconds()
    return {phase: round(value, 3) for phase, value in seconds.items()}


def _message(turn: TrainingTurn) -> dict[str, Any]:
    """The assistant message that the agent got, or an empty one."""
    choices = turn.response.get("choices") or [{}]
    message = choices[0].get("message")
    return message if isinstance(message, dict) else {}


def _conversation(used: list[TrainingTurn]) -> list[dict[str, Any]]:
    """Messages of the last branch: the last main turn's request and the answer to it."""
    main = [turn for turn in used if turn.metadata.get("role", "agent") == "agent"] or used
    if not main:
        return []
    answer = _message(main[-1])
    return [*(main[-1].request.get("messages") or []), *([answer] if answer else [])]


def _tool_results(used: list[TrainingTurn]) -> Iterator[str]:
    """Text of each tool result once, though every later request repeats it."""
    seen: set[tuple[str, str]] = set()
    for turn in used:
        for message in turn.request.get("messages") or []:
            if message.get("role") != "tool":
                continue
            content = message.get("content")
            text = content if isinstance(content, str) else json.dumps(content)
            key = (str(message.get("tool_call_id")), text[:200])
            if key not in seen:
                seen.add(key)
                yield text


def _failed(text: str) -> bool:
    """A result that states its return code is judged by it; any other by the words that TRL and OpenEnv look for."""
    code = _RETURN_CODE.search(text)
    return int(code.group(1)) != 0 if code else _FAILURE_WORDS.search(text) is not None


def _stop_reason(facts: TrialFacts) -> StopReason:
    if facts.timed_out:
        return StopReason.AGENT_TIMEOUT
    if facts.limit_reached:
        return StopReason.LIMIT
    return StopReason.AGENT_EXIT if facts.agent_exited_badly else StopReason.FINISHED
