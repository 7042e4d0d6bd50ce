"""One call's view of its engine: its messages rendered with its tools and template arguments, its answers read by the same parsers.

Invariant: every render that takes part in one call treats quoted control tokens alike (`control`), so that two of them can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from capture_proxy import images
from capture_proxy.codec import Ids
from capture_proxy.control import ControlTokens
from capture_proxy.engine import Engine, Rendered
from capture_proxy.messages import AgentCall, Message
from capture_proxy.sample import Parsed
from capture_proxy.upstream import EngineError


@dataclass(frozen=True)
class View:
    engine: Engine
    fields: dict[str, Any]
    """What the engine has to know of a call besides its messages (`chat_fields`)."""
    split: ControlTokens | None = None
    """Encodes control tokens that a message quotes as the text that they are; None: as the engine does."""

    async def render(self, messages: list[Message], known: Ids | None = None, **more: Any) -> Rendered:
        """Token ids of a conversation as the engine's template gives them, probably `known` first. Raises `EngineError`."""
        if self.split is None:
            return await self.engine.render({"messages": messages, **self.fields, **more}, known)
        hidden = self.split.hide(messages)
        marked = await self.engine.render({"messages": hidden.messages, **self.fields, **more})
        restored = self.split.restore(marked, hidden)
        if restored.features is None:
            return restored
        features = images.moved(restored.features, marked.ids, restored.ids)
        if features is None:
            raise EngineError("control_tokens = split: a quoted control token is one that stands for an image")
        return replace(restored, features=features)

    async def derender(self, sampled: Ids, before: Ids, finish_reason: str) -> Parsed:
        """What the engine's parsers make of ids that follow `before`. Raises `EngineError`."""
        return await self.engine.derender(sampled, before, self.fields, finish_reason) if len(sampled) else Parsed("", None, ())


def chat_fields(call: AgentCall, template_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the engine has to know of a call besides its messages, to render it and to read its answer."""
    fields: dict[str, Any] = {}
    if call.tools:
        fields["tools"] = call.tools
    if call.tools and call.tool_choice is not None:  # a choice without tools is refused by the engine
        fields["tool_choice"] = call.tool_choice
    if call.response_format is not None:
        fields["response_format"] = call.response_format
    if template_kwargs:
        fields["chat_template_kwargs"] = template_kwargs
    return fields
