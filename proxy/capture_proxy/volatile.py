"""What clients put into prompts that says nothing to a model and changes from call to call: named rules, one for each such block.

Invariant: only whole text blocks are left out, never a part of one; whether one is does not depend on what comes after it, so that a
history stays what it was; the request as it came is in the record. `capture-proxy rules` lists the rules; a session may keep what one would
leave out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from capture_proxy.dialects.wire import folded
from capture_proxy.messages import AgentCall, Message


@dataclass(frozen=True)
class Volatile:
    """A text block in a message of this role, in this dialect, that is all `pattern`."""

    name: str
    dialect: str
    role: str
    pattern: re.Pattern[str]

    def matches(self, dialect: str, role: str, part: dict[str, Any]) -> bool:
        return (dialect, role) == (self.dialect, self.role) and part["type"] == "text" and self.pattern.fullmatch(part["text"]) is not None


def _reminder(text: str) -> re.Pattern[str]:
    return re.compile(rf"\s*<system-reminder>\s*{text}\s*</system-reminder>\s*")


RULES = (
    Volatile("claude_billing_line", "anthropic", "system", re.compile(r"x-anthropic-billing-header: [^\n]*\s*")),
    Volatile("claude_token_usage", "anthropic", "user", _reminder(r"Token usage: -?\d+/\d+; -?\d+ remaining")),
    Volatile("claude_usd_budget", "anthropic", "user", _reminder(r"USD budget: \$-?[\d.]+/\$[\d.]+; \$-?[\d.]+ remaining")),
)
"""Of the clients' pinned versions."""


def without(call: AgentCall, keep: Sequence[str] = ()) -> AgentCall:
    """The call without its volatile blocks, which `left_out` then names; those of the rules in `keep` stay.

    A message of nothing else goes whole where it only follows what the client sent before it; one that opens the client's turn stays.
    """
    rules = [rule for rule in RULES if rule.dialect == call.dialect and rule.name not in keep]
    messages: list[Message] = []
    names: list[str] = []
    for at, message in enumerate(call.messages):
        parts = _parts(message["content"])
        found = [next((rule.name for rule in rules if rule.matches(call.dialect, message["role"], part)), None) for part in parts]
        kept = [part for part, name in zip(parts, found, strict=True) if name is None]
        opens = message["role"] == "user" and (at == 0 or call.messages[at - 1]["role"] == "assistant")
        if len(kept) == len(parts) or (opens and not kept):
            messages.append(message)
            continue
        names += [name for name in found if name is not None]
        if kept:
            messages.append({**message, "content": folded(kept)})
    return call if not names else replace(call, messages=messages, left_out=(*dict.fromkeys(names), *call.left_out))


def listing() -> str:
    """Every rule with what it looks at, one a line."""
    return "\n".join(f"{rule.name:20} left out   dialect {rule.dialect!r}, {rule.role} block {rule.pattern.pattern!r}" for rule in RULES)


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content or []
