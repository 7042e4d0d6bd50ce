"""Assistant turns from a script instead of the engine: demonstrations.

Invariant: a scripted turn's ids are the engine's own tokenisation of the scripted message in its place in the conversation, its logprobs
are scored by the engine under the weights it has now, and the turn is marked `origin = demonstration`; nothing about it is invented.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from capture_proxy.codec import Ids
from capture_proxy.messages import Message
from capture_proxy.sample import Sample
from capture_proxy.splice import Fork, closing_token
from capture_proxy.upstream import EngineError
from capture_proxy.view import View


class ScriptedCall(BaseModel):
    """A tool call of a scripted turn."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, Any] = Field(default_factory=dict)


class ScriptedTurn(BaseModel):
    """One assistant turn of a script."""

    model_config = ConfigDict(extra="forbid")

    content: str | None = None
    tool_calls: list[ScriptedCall] = Field(default_factory=list)

    def message(self) -> Message:
        """The turn as a message of the history, which the engine renders."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": f"call_{i}", "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
                for i, call in enumerate(self.tool_calls)
            ]
        return message


async def demonstrate(view: View, messages: list[Message], turn: ScriptedTurn, rendered: Ids, prompt: Ids) -> Sample:
    """The scripted turn as if it had been sampled after `prompt`, whose plain render is `rendered`. Raises `EngineError`."""
    whole = (await view.render([*messages, turn.message()], add_generation_prompt=False)).ids
    try:
        closing = await closing_token(view.engine)
    except Fork as fork:
        raise EngineError(f"scripted turn: the model's template does not end an assistant turn visibly ({fork})") from fork
    body = whole[len(rendered) :]
    ends = np.flatnonzero(body == closing)
    if not np.array_equal(whole[: len(rendered)], rendered) or not len(ends):
        raise EngineError("scripted turn: the model's template does not show it after the prompt as it would be sampled")
    completion = body[: ends[-1] + 1]
    logps = await view.engine.score(np.concatenate([prompt, completion]), len(prompt))
    return Sample(completion, logps, "stop", None, None, None)
