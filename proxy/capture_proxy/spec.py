"""What `POST /sessions` accepts.

Invariant: a field we do not honour is refused by name, so that a session never runs under a policy that its creator did not get.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from capture_proxy import volatile
from capture_proxy.roles import RoleRules
from capture_proxy.scripted import ScriptedTurn

Count = Annotated[int, Field(ge=1, strict=True)]


class Sampling(BaseModel):
    """The session's sampling policy; it overrides what the agent asks. Only the temperature is free: top_p is 1 and top_k is off."""

    model_config = ConfigDict(extra="forbid")

    temperature: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 1.0
    """0 samples greedily; such turns are recorded and never trained."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    """From it and the number of the call comes the call's own seed, so that a session can be sampled again; None: a random one."""


class Limits(BaseModel):
    """Bounds of one session; None means no bound of ours."""

    model_config = ConfigDict(extra="forbid")

    max_calls: Count | None = None
    """Answered calls of the session."""
    max_output_tokens_per_call: Count | None = None
    max_conversation_tokens: Count | None = None
    """Prompt + sampled tokens of a call, less the agent's first prompt; of an auxiliary call (`roles`), less its own."""
    max_context_tokens: Count | None = None
    """Prompt + sampled tokens of a call; the model's window bounds it anyway."""
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds after creation from which on every call is refused."""
    max_concurrent_calls: Count | None = None
    """Further calls wait for their turn."""
    max_calls_per_minute: Count | None = None
    """Further calls get a 429 that says when to come again. Counts of tokens are calls here too."""
    max_bytes: Count | None = None
    """Bytes that the session holds: its log (requests, ids, answers) and the request bodies in flight."""


class Template(BaseModel):
    """How the engine renders this session's conversations."""

    model_config = ConfigDict(extra="forbid")

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    control_tokens: Literal["as_engine", "split"] = "as_engine"
    """What becomes of control tokens that a user's or a tool's text quotes: what the engine's tokenizer makes of them, or text."""
    keep_volatile: list[str] = Field(default_factory=list)
    """Rules (`volatile`) whose blocks the model is shown all the same."""

    @field_validator("keep_volatile")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        known = [rule.name for rule in volatile.RULES]
        for name in names:
            if name not in known:
                raise ValueError(f"there is no rule {name!r}; rules: {', '.join(known)}")
        return names


class SessionSpec(BaseModel):
    """Body of `POST /sessions`."""

    model_config = ConfigDict(extra="forbid")

    metadata: dict[str, Any] = Field(default_factory=dict)
    """The creator's own; returned with the status, never interpreted."""
    sampling: Sampling = Field(default_factory=Sampling)
    limits: Limits = Field(default_factory=Limits)
    template: Template = Field(default_factory=Template)
    history: Literal["template", "keep_reasoning"] = "template"
    """`template`: the model sees what template and client show, and text that is unchanged keeps its sampled ids. `keep_reasoning`: it also
    goes on seeing what it thought in the turns that a request continues, where template or client leave that out."""
    roles: RoleRules = Field(default_factory=RoleRules)
    """Which calls are side calls, where the built-in rules are not right."""
    script: list[ScriptedTurn] | None = None
    """Assistant turns to give instead of sampling."""

    @property
    def shows_reasoning(self) -> bool:
        """Whether a request without an answer's reasoning is another conversation."""
        return self.history == "template"
