"""Judges a trace by what the engine was asked and what it answered, without trusting the proxy's own account.

Invariant: an empty list of faults means that every call is recorded once, every trained token was sampled by the engine in exactly the
context that precedes it, every untrained turn says why, and every reply that the agent got reads as the sampled ids do.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from capture_proxy.trace import TrainingTrace
from capture_proxy.trace import TrainingTurn as Turn
from harness_rl.selftest.engine import ScriptedEngine, logprob_of

REWRITTEN = "history_changed"
"""The client did not send back what it was given."""


@dataclass(frozen=True)
class Verdict:
    calls: int
    recorded: int
    trained: int
    """Turns of the agent that train."""
    side: int
    """Calls of another role, none of which trains as the agent's."""
    spliced: int
    """Turns whose prompt keeps sampled ids that the render would have spelled otherwise."""
    forks: tuple[str, ...]
    """Why turns of the agent after its first do not go on from the tokens of an earlier one."""
    faults: tuple[str, ...]


def judge(trace: TrainingTrace, status: dict[str, Any], engine: ScriptedEngine) -> Verdict:
    """`status` is the session's, after its end."""
    turns = list(trace.turns)
    agent = [turn for turn in turns if turn.metadata["role"] == "agent"]
    faults = [*_counts(turns, status), *_tokens(turns, engine), *_masks(turns), *_replies(turns, engine), *_chains(agent)]
    return Verdict(
        calls=status["calls_seen"],
        recorded=len(turns),
        trained=sum(1 for turn in agent if turn.metadata["mask_reason"] is None),
        side=len(turns) - len(agent),
        spliced=sum(1 for turn in turns if turn.metadata["spliced"]),
        forks=tuple(_forks(agent)),
        faults=tuple(faults),
    )


def _counts(turns: list[Turn], status: dict[str, Any]) -> list[str]:
    seen, counted = status["calls_seen"], sum(status["calls_by_reason"].values())
    out = [] if status["in_flight"] == 0 else [f"{status['in_flight']} calls never came to an end"]
    return out if seen == counted == len(turns) else [*out, f"{seen} calls seen, {counted} counted, {len(turns)} recorded"]


def _tokens(turns: list[Turn], engine: ScriptedEngine) -> list[str]:
    """What the trace says was given and sampled is what the engine was given and sampled, each once."""
    asked = Counter((tuple(prompt), tuple(answer)) for prompt, answer in engine.sampled)
    told = Counter((tuple(turn.prompt_token_ids.tolist()), tuple(turn.completion_token_ids.tolist())) for turn in turns)
    out = [] if asked == told else [f"{(asked - told).total()} samples are not in the trace, {(told - asked).total()} are in it only"]
    for turn in turns:
        said = [logprob_of(i, n) for n, i in enumerate(turn.completion_token_ids.tolist())]
        if any(abs(a - b) > 1e-5 for a, b in zip(said, turn.per_token_logps.tolist(), strict=True)):
            out.append(f"turn {turn.node_id}: its logprobs are not the engine's")
    return out


def _masks(turns: list[Turn]) -> list[str]:
    out = []
    for turn in turns:
        reason, trained = turn.metadata["mask_reason"], int(turn.completion_mask.sum())
        if (reason is None) != (trained == len(turn.completion_token_ids)) or (reason is not None and trained):
            out.append(f"turn {turn.node_id}: {trained} of {len(turn.completion_token_ids)} tokens train, and the reason is {reason}")
        if turn.metadata["role"] == "auxiliary" and reason is None:
            out.append(f"turn {turn.node_id}: a side call trains")
    return out


def _replies(turns: list[Turn], engine: ScriptedEngine) -> list[str]:
    """What the agent got reads as the sampled ids do."""
    out = []
    for turn in turns:
        ids = turn.completion_token_ids.tolist()
        message = engine.model.parse(ids[:-1] if ids[-1:] == [engine.model.end] else ids, {"tools": turn.request.get("tools")})
        said = (message["content"] or "", [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]])
        got = READ[turn.metadata["dialect"]](turn.response)
        if got != said:
            out.append(f"turn {turn.node_id}: the agent got {got}, the engine said {said}")
    return out


def _chains(agent: list[Turn]) -> list[str]:
    """Where a turn says that it goes on from another, its prompt starts with the whole of that."""
    by_id = {turn.node_id: turn for turn in agent}
    out = []
    for turn in agent:
        continued = by_id.get(turn.metadata["continues"])
        if continued is None or turn.metadata["fork_cause"]:
            continue
        whole = [*continued.prompt_token_ids.tolist(), *continued.completion_token_ids.tolist()]
        if turn.prompt_token_ids[: len(whole)].tolist() != whole:
            out.append(f"turn {turn.node_id}: its prompt does not start with the turn that it continues")
    return out


def _forks(agent: list[Turn]) -> Iterator[str]:
    for number, turn in enumerate(agent):
        if turn.metadata["fork_cause"]:
            yield turn.metadata["fork_cause"]
        elif number and turn.metadata["continues"] is None:
            yield REWRITTEN


Read = tuple[str, list[tuple[str, dict[str, Any]]]]
"""Text and (name, arguments) of the calls."""


def _chat(reply: dict[str, Any]) -> Read:
    message = reply["choices"][0]["message"]
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls") or ()]
    return message["content"] or "", calls


def _anthropic(reply: dict[str, Any]) -> Read:
    text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
    return text, [(block["name"], block["input"]) for block in reply["content"] if block["type"] == "tool_use"]


def _responses(reply: dict[str, Any]) -> Read:
    text = "".join(part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"])
    return text, [(item["name"], json.loads(item["arguments"])) for item in reply["output"] if item["type"] == "function_call"]


def _gemini(reply: dict[str, Any]) -> Read:
    parts = reply["candidates"][0]["content"]["parts"]
    text = "".join(part.get("text", "") for part in parts if not part.get("thought"))
    return text, [(part["functionCall"]["name"], part["functionCall"]["args"]) for part in parts if "functionCall" in part]


READ = {"chat": _chat, "anthropic": _anthropic, "responses": _responses, "gemini": _gemini}
