"""Token-in token-out: the prompt of a request that continues a recorded turn keeps that turn's ids and adds only the rendered tail.

Invariant: what is sent is either the engine's plain render of the request, or that turn's ids joined to the rest as `splice` proves it.
Where ids cannot be kept the request is sent as rendered, and the cause is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from capture_proxy import images
from capture_proxy.certify import Certificate
from capture_proxy.codec import Ids
from capture_proxy.engine import Rendered
from capture_proxy.graph import Turn
from capture_proxy.history import Continuation
from capture_proxy.messages import Message
from capture_proxy.sample import Parsed
from capture_proxy.splice import Answer, Fork, append, splice
from capture_proxy.upstream import EngineRefused
from capture_proxy.view import View


@dataclass(frozen=True)
class Prompt:
    """What is sent to the engine for one call."""

    ids: Ids
    rendered: Rendered
    """The engine's plain render of the request."""
    continues: Turn | None
    """The recorded turn that the request continues by its messages."""
    spliced: bool
    """`ids` differ from the plain render: sampled ids stand where the render re-tokenised their text."""
    fork_cause: str | None
    """Why the continued turn's ids could not be kept."""
    features: dict[str, Any] | None = None
    """Of the images in `ids`."""


async def build_prompt(
    view: View, messages: list[Message], continuation: Continuation | None, certificate: Certificate, keep_reasoning: bool
) -> Prompt:
    """The prompt of a call: one render where the engine re-tokenises the answer as it was sampled, some more requests where not.

    `keep_reasoning`: a continued turn stays whole even where template or client no longer show all of it.
    """
    messages = certificate.placed(messages)
    if continuation is None:
        rendered = await view.render(messages)
        return _as_rendered(rendered, None, None)
    at, answer = continuation.answer_at, Answer.of(continuation.turn)
    rendered = await view.render(messages, known=answer.render)
    try:
        try:
            certificate.check(messages, at, answer.finish_reason == "length")
            ids = await splice(view, messages, at, answer, rendered.ids)
        except (Fork, EngineRefused):
            if not keep_reasoning:
                raise
            ids = await append(view, messages, at, answer, rendered.ids)
    except Fork as fork:
        return _as_rendered(rendered, continuation.turn, str(fork))
    except EngineRefused:
        return _as_rendered(rendered, continuation.turn, "template_refused_history")
    if np.array_equal(ids, rendered.ids):
        return _as_rendered(rendered, continuation.turn, None)
    features = rendered.features and images.moved(rendered.features, rendered.ids, ids)
    if features is None and rendered.features is not None:
        return _as_rendered(rendered, continuation.turn, "images_rendered_differently")
    return Prompt(ids, rendered, continuation.turn, True, None, features)


def _as_rendered(rendered: Rendered, continues: Turn | None, fork_cause: str | None) -> Prompt:
    return Prompt(rendered.ids, rendered, continues, False, fork_cause, rendered.features)


def visible(parsed: Parsed, stop: int | str | None) -> Parsed:
    """`parsed` as the agent gets it: text ends before the stop string that ended the answer."""
    if isinstance(stop, str) and stop and parsed.content is not None and stop in parsed.content:
        return replace(parsed, content=parsed.content[: parsed.content.index(stop)])
    return parsed
