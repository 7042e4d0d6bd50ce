"""The conversations that the capture bench holds, as arithmetic that the client and the engine share.

Invariant: which ids a turn is given and which it samples follows from the first words of its first message and the number of its
messages alone, so the engine keeps no state and parses nothing. All conversations read one stream of ids from its start: a turn's prompt
is the first `base + turn * step` of them (the very first replaced by the conversation's mark), its answer the `sampled` that follow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONGEST = 200_000
"""Ids in the stream."""
STREAM: NDArray[np.int32] = np.random.default_rng(0).integers(1000, 150_000, LONGEST, dtype=np.int32)
"""As many digits as a vocabulary of 150,000 has."""
MARK = 151_000
"""Id at the start of a prompt whose head is 0; another head is another id there."""

_TAG = re.compile(rb"bench base=(\d+) step=(\d+) sampled=(\d+) hold=([0-9.]+) head=(\d+);")
WORD = "abc "
"""Four characters for one id, about what a tokenizer makes of prose and code."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "What this tool does, when to use it, and what it answers. " * 12,
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "The command."}, "timeout": {"type": "integer"}},
                "required": ["command"],
            },
        },
    }
    for name in ("bash", "read", "write", "edit", "glob", "grep", "todo", "fetch")
]
"""About what a coding agent sends with every call."""


@dataclass(frozen=True)
class Plan:
    """One conversation of an agent that calls a tool at every turn."""

    base: int
    """Ids of the first prompt."""
    step: int = 420
    """Ids that a turn adds: its answer and the tool's output."""
    sampled: int = 200
    """Ids of an answer."""
    hold_s: float = 0.0
    """How long the engine samples."""
    head: int = 0
    """Conversations with other heads share no prefix."""

    @property
    def tag(self) -> str:
        return f"bench base={self.base} step={self.step} sampled={self.sampled} hold={self.hold_s:g} head={self.head};"

    def prompt_len(self, turn: int) -> int:
        return self.base + turn * self.step

    def prompt(self, turn: int) -> NDArray[np.int32]:
        """int32: what the engine is given at `turn`."""
        ids = STREAM[: self.prompt_len(turn)].copy()
        ids[0] = MARK + self.head
        return ids

    def answer(self, turn: int) -> NDArray[np.int32]:
        """int32 [sampled]."""
        return answer_ids(self.prompt_len(turn), self.sampled)

    def opening(self) -> list[dict[str, Any]]:
        """The messages of turn 0."""
        filler = WORD * max(0, self.base - 1500)
        return [{"role": "system", "content": f"{self.tag} {WORD * 500}"}, {"role": "user", "content": filler}]

    def tool_output(self, call_id: str) -> dict[str, Any]:
        """What the agent adds after an answer."""
        return {"role": "tool", "tool_call_id": call_id, "content": WORD * (self.step - self.sampled)}


def plan_of(request: bytes) -> Plan | None:
    """The plan that a request's body names near its start."""
    found = _TAG.search(request, 0, 100_000)
    if found is None:
        return None
    base, step, sampled, head = (int(found[i]) for i in (1, 2, 3, 5))
    return Plan(base, step, sampled, float(found[4]), head)


def turn_of(request: bytes) -> int:
    """Which turn a chat request asks for: two messages at first, two more with every turn."""
    return request.count(b'"role"') // 2 - 1


def answer_ids(prompt_len: int, sampled: int) -> NDArray[np.int32]:
    """int32 [sampled]: the answer to a prompt of that length."""
    return STREAM[prompt_len : prompt_len + sampled]


def logprob(token: int) -> float:
    return -(1 + token % 97) / 64


def answer_message(sampled: int) -> dict[str, Any]:
    """The answer as the engine's parsers read it."""
    arguments = '{"command": "' + WORD * max(1, sampled - 60) + '", "timeout": 30}'
    call = {"id": "call_of_the_engine", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return {"role": "assistant", "content": "I look. " * 5, "reasoning": None, "tool_calls": [call]}
