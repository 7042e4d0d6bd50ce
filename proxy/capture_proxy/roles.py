"""Which calls of a harness are not its agent at work: explicit rules, one for each side call that a known client makes.

Invariant: a rule names what it looks at, and nothing else decides by the words of a prompt. A call that no rule matches is placed by its
tokens and its tools alone (`graph`). `capture-proxy rules` lists the rules; a session may switch some off and add its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from capture_proxy.messages import AgentCall, text_of

Words = Annotated[str, StringConstraints(min_length=1)]


class Rule(BaseModel):
    """A call that meets every condition that is set has the role."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Words
    role: Literal["auxiliary", "compaction", "subagent"]
    """`auxiliary` calls are recorded and never trained; the others are trained."""
    dialect: Words | None = None
    system: Words | None = None
    """Stands in the leading system message."""
    last_user: Words | None = None
    """Stands in the last message, which is the user's."""
    last_user_is: Words | None = None
    """The last message, which is the user's, is this and no more."""
    header: Words | None = None
    """Is sent with the request; `name=words` asks that its value holds them."""
    tools: bool | None = None
    """Whether the call offers tools."""
    json_answer: bool | None = None
    """Whether the call asks for an answer by a JSON schema."""
    max_tokens: int | None = Field(None, ge=1)
    """Exactly as many are asked for."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_dump(exclude={"name", "role"}, exclude_none=True):
            raise ValueError(f"rule {self.name!r} has no condition: it would match every call")
        return self

    def matches(self, call: AgentCall, headers: Mapping[str, str]) -> bool:
        """Whether every condition that is set holds."""
        if (self.dialect is not None and self.dialect != call.dialect) or (self.tools is not None and self.tools != bool(call.tools)):
            return False
        first, last = call.messages[0], call.messages[-1]
        system = text_of(first["content"]) if first["role"] in ("system", "developer") else ""
        asked = text_of(last["content"]) if last["role"] == "user" else ""
        name, _, words = (self.header or "").partition("=")
        json_answer = (call.response_format or {}).get("type") == "json_schema"
        return (
            (self.system is None or self.system in system)
            and (self.last_user is None or self.last_user in asked)
            and (self.last_user_is is None or self.last_user_is == asked.strip())
            and (self.header is None or (name in headers and words in headers[name]))
            and (self.json_answer is None or self.json_answer == json_answer)
            and (self.max_tokens is None or self.max_tokens == call.max_tokens)
        )


RULES = (
    Rule(name="opencode_title", role="auxiliary", system="You are a title generator", tools=False),
    Rule(name="opencode_compaction", role="compaction", system="context summarization agent", tools=False),
    Rule(name="opencode_subagent", role="subagent", header="x-parent-session-id"),
    Rule(name="claude_quota", role="auxiliary", dialect="anthropic", last_user_is="quota", max_tokens=1),
    Rule(name="claude_compaction", role="compaction", dialect="anthropic", last_user="CRITICAL: Respond with TEXT ONLY"),
    Rule(name="claude_subagent", role="subagent", dialect="anthropic", header="x-claude-code-agent-id"),
    Rule(name="codex_compaction", role="compaction", dialect="responses", last_user="CONTEXT CHECKPOINT COMPACTION", tools=False),
    Rule(name="codex_subagent", role="subagent", dialect="responses", header="x-openai-subagent"),
    Rule(name="qwen_memory", role="auxiliary", system="managed memory extraction subagent"),
    Rule(name="qwen_compaction", role="compaction", last_user="You are the component that summarizes a conversation"),
    Rule(name="gemini_router", role="auxiliary", dialect="gemini", tools=False, json_answer=True),
    Rule(name="pi_compaction", role="compaction", system="context summarization assistant", tools=False),
    Rule(name="aider_commit", role="auxiliary", system="generates concise, one-line Git commit messages"),
)
"""Measured on the clients' pinned versions; the first that matches counts."""


class RoleRules(BaseModel):
    """What a session changes about the rules."""

    model_config = ConfigDict(extra="forbid")

    off: list[str] = Field(default_factory=list)
    """Names of rules that do not count here."""
    add: list[Rule] = Field(default_factory=list)
    """Looked at before the built-in ones."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name in self.off:
            if name not in (known := [rule.name for rule in RULES]):
                raise ValueError(f"roles.off: there is no rule {name!r}; rules: {', '.join(known)}")
        return self

    def find(self, call: AgentCall, headers: Mapping[str, str]) -> Rule | None:
        """The rule that gives this call its role."""
        rules = (*self.add, *(rule for rule in RULES if rule.name not in self.off))
        return next((rule for rule in rules if rule.matches(call, headers)), None)


def listing() -> str:
    """Every rule with its conditions, one a line."""
    lines = []
    for rule in RULES:
        conditions = rule.model_dump(exclude={"name", "role"}, exclude_none=True)
        lines.append(f"{rule.name:20} {rule.role:10} " + ", ".join(f"{key} {value!r}" for key, value in conditions.items()))
    return "\n".join(lines)
