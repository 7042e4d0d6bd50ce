"""Token-in token-out: the prompt of a request that continues a recorded turn keeps that turn's ids and adds only the rendered tail.

Invariant: sampled ids are kept only when it is shown, on the engine's own renders, that the text up to and including the recorded answer is
unchanged: the full render must start with the render of the request that the turn answered, and what follows must be the sampled ids
themselves, or a re-tokenisation that the engine's parsers read as the same message. Anything else is sent as rendered and starts a branch
whose cause is recorded; nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from capture_proxy.codec import Ids, common_prefix
from capture_proxy.engine import Engine, EngineRefused, Parsed, Rendered
from capture_proxy.graph import Turn
from capture_proxy.history import Continuation
from capture_proxy.messages import AgentCall, Message, message_key
from capture_proxy.trace import hash_ids

MERGED_IDS = 4
"""How many ids at the end of a generation prompt may be tokenised together with white space that the answer starts with."""


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


class Fork(Exception):
    """The continued turn's ids cannot be kept; the message is the cause, a short name."""


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


async def build_prompt(engine: Engine, call: AgentCall, continuation: Continuation | None, template_kwargs: dict[str, Any]) -> Prompt:
    """The prompt of `call`: one render where the engine re-tokenises the answer as it was sampled, up to four requests where not."""
    fields = chat_fields(call, template_kwargs)
    rendered = await engine.render({"messages": call.messages, **fields})
    if continuation is None:
        return Prompt(rendered.ids, rendered, None, False, None)
    try:
        ids = await _splice(engine, call.messages, continuation, rendered.ids, fields)
    except Fork as fork:
        return Prompt(rendered.ids, rendered, continuation.turn, False, str(fork))
    except EngineRefused:
        return Prompt(rendered.ids, rendered, continuation.turn, False, "template_refused_history")
    return Prompt(ids, rendered, continuation.turn, not np.array_equal(ids, rendered.ids), None)


async def _splice(engine: Engine, messages: list[Message], continuation: Continuation, full: Ids, fields: dict[str, Any]) -> Ids:
    turn, at = continuation.turn, continuation.answer_at
    sampled = turn.completion
    if not len(sampled):
        raise Fork("no_sampled_ids")
    start, aligned = turn.rendered_len, True
    if hash_ids(full[:start]) != turn.rendered_hash:
        # The client spells an earlier message differently now (a list for a string), or the answer's first characters are tokenised
        # together with the end of the generation prompt: render the turn's request in today's spelling and see.
        before = (await engine.render({"messages": messages[:at], **fields})).ids
        start = common_prefix(full, before)
        aligned = start == len(before)
        if not aligned:
            await _check_blank(engine, before[start:], before[:start], fields)
    if aligned and _starts_with(full[start:], sampled) and len(full) > start + len(sampled):
        return np.concatenate([turn.total, full[start + len(sampled) :]])
    if isinstance(turn.meta.get("stop_reason"), str):
        raise Fork("ended_by_stop_string")
    upto = (await engine.render({"messages": messages[: at + 1], **fields, "add_generation_prompt": False})).ids
    if not _starts_with(full, upto) or len(upto) <= start:
        raise Fork("answer_rendered_by_context")
    closing = await closing_token(engine)
    body = upto[start:]
    ends = np.flatnonzero(body == closing)
    if not len(ends):
        raise Fork("no_end_of_turn")
    text, rest = body[: ends[-1]], body[ends[-1] + 1 :]
    ended = sampled[-1] == closing
    if not ended and turn.meta.get("finish_reason") != "length":
        raise Fork("ended_by_other_token")
    if not aligned or not np.array_equal(text, sampled[:-1] if ended else sampled):
        await _check_same_message(engine, turn, text, full[:start], fields)
    glue = rest if ended else body[ends[-1] :]
    return np.concatenate([turn.total, glue, full[len(upto) :]])


async def _check_blank(engine: Engine, tail: Ids, before: Ids, fields: dict[str, Any]) -> None:
    """`tail`, the end of a generation prompt that the full render does not repeat id for id, is nothing but white space."""
    if len(tail) > MERGED_IDS:
        raise Fork("history_rendered_differently")
    parsed = await engine.derender(tail, before, fields, "stop")
    if (parsed.content or "").strip() or parsed.reasoning or parsed.calls:
        raise Fork("history_rendered_differently")


async def _check_same_message(engine: Engine, turn: Turn, text: Ids, before: Ids, fields: dict[str, Any]) -> None:
    """The template shows the answer as the message that was sampled, read by the same parsers."""
    parsed = await engine.derender(text, before, fields, "stop") if len(text) else Parsed("", None, ())
    shown = message_of(parsed)
    if message_key(shown) != bytes.fromhex(turn.meta["answer_key"]):
        raise Fork("answer_shown_differently")


async def closing_token(engine: Engine) -> int:
    """The id that the template puts after an assistant's text. Raises `Fork` where the template does not show one.

    It is what a render of a finished answer has and a render of the same answer left open has not.
    """
    if engine.closing_token is None:
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        closed = (await engine.render({"messages": probe, "add_generation_prompt": False})).ids
        left_open = (await engine.render({"messages": probe, "add_generation_prompt": False, "continue_final_message": True})).ids
        if not _starts_with(closed, left_open) or len(closed) == len(left_open):
            raise Fork("template_shows_no_end_of_turn")
        engine.closing_token = int(closed[len(left_open)])
    return engine.closing_token


def message_of(parsed: Parsed) -> Message:
    """Parsed ids as an assistant message without ids, as `message_key` compares it."""
    message: Message = {"role": "assistant", "content": parsed.content, "reasoning": parsed.reasoning}
    message["tool_calls"] = [{"function": {"name": name, "arguments": arguments}} for name, arguments in parsed.calls]
    return message


def visible(parsed: Parsed, stop: int | str | None) -> Parsed:
    """`parsed` as the agent gets it: text ends before the stop string that ended the answer."""
    if isinstance(stop, str) and stop and parsed.content is not None and stop in parsed.content:
        return replace(parsed, content=parsed.content[: parsed.content.index(stop)])
    return parsed


def _starts_with(ids: Ids, head: Ids) -> bool:
    return len(ids) >= len(head) and bool(np.array_equal(ids[: len(head)], head))
