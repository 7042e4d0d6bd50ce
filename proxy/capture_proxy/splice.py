"""Joining a request to the turn that it continues: the turn's own ids, then what follows its answer.

Invariant: sampled ids are kept only when the engine's own render of the request shows the recorded answer, as those ids or as ids that the
engine's parsers read as the same message, right after the render of the request that the turn answered; or, under `keep_reasoning`, when
all that comes after the answer is rendered as it is in the request. Anything else raises `Fork` with its cause; nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from capture_proxy.codec import Ids, common_prefix, common_suffix
from capture_proxy.engine import Engine
from capture_proxy.graph import Turn
from capture_proxy.messages import Message, message_key
from capture_proxy.sample import Parsed
from capture_proxy.trace import hash_ids
from capture_proxy.upstream import EngineRefused
from capture_proxy.view import View

MERGED_IDS = 4
"""How many ids at the end of a generation prompt may be tokenised together with white space that the answer starts with."""
QUOTED_ENDS = 4
"""How many end-of-turn ids in a row may turn out to be quoted by the answer itself."""


class Fork(Exception):
    """The continued turn's ids cannot be kept; the message is the cause, a short name."""


@dataclass(frozen=True)
class Answer:
    """An answer in the place where it was sampled."""

    total: Ids
    """Prompt + sampled ids."""
    prompt_len: int
    rendered_len: int
    """Length and hash of the engine's plain render of the request that it answers."""
    rendered_hash: str
    key: bytes
    """`message_key` of the answer as the engine's parsers read it."""
    finish_reason: str
    stopped: bool = False
    """A stop string ended it."""
    plain: bool = False
    """The prompt is that render."""

    @classmethod
    def of(cls, turn: Turn) -> Answer:
        meta = turn.meta
        stopped = isinstance(meta.get("stop_reason"), str)
        key, finish = bytes.fromhex(meta["answer_key"]), str(meta.get("finish_reason"))
        plain = meta.get("spliced") is False
        return cls(turn.total, turn.prompt_len, turn.rendered_len, turn.rendered_hash, key, finish, stopped, plain)

    @property
    def sampled(self) -> Ids:
        return self.total[self.prompt_len :]

    @property
    def render(self) -> Ids | None:
        """The engine's plain render of the request that it answers, where its ids are still known."""
        return self.total[: self.prompt_len] if self.plain else None

    def follows_in(self, full: Ids) -> bool:
        """Whether `full` starts with that render."""
        if self.render is not None:
            return starts_with(full, self.render)
        return hash_ids(full[: self.rendered_len]) == self.rendered_hash


async def splice(view: View, messages: list[Message], at: int, answer: Answer, full: Ids) -> Ids:
    """The prompt for `messages`, whose plain render is `full`, with the ids of the answer `messages[at]` in place. Raises `Fork`."""
    sampled = answer.sampled
    if not len(sampled):
        raise Fork("no_sampled_ids")
    start, aligned = answer.rendered_len, True
    if not answer.follows_in(full):
        # The client spells an earlier message differently now (a list for a string), or the answer's first characters are tokenised
        # together with the end of the generation prompt: render the answered request in today's spelling and see.
        before = (await view.render(messages[:at])).ids
        start = common_prefix(full, before)
        aligned = start == len(before)
        if not aligned:
            await _check_blank(view, before[start:], before[:start])
    if aligned and starts_with(full[start:], sampled) and len(full) > start + len(sampled):
        return np.concatenate([answer.total, full[start + len(sampled) :]])
    closing, ended = await _ending(view, answer)
    end = start + await _end_of_answer(view, answer, closing, full, start, aligned)
    return np.concatenate([answer.total, full[end + 1 :] if ended else full[end:]])


async def append(view: View, messages: list[Message], at: int, answer: Answer, full: Ids) -> Ids:
    """The answer's ids and what the request adds to them, however template and client show what came before. Raises `Fork`.

    What is added is what two renders have in common at their end that differ in the text of the answer alone.
    """
    if not len(answer.sampled):
        raise Fork("no_sampled_ids")
    closing, ended = await _ending(view, answer)
    calls = {"tool_calls": messages[at]["tool_calls"]} if messages[at].get("tool_calls") else {}
    for shown in [{}, calls] if calls else [{}]:  # some templates want to see the calls that the tool results answer
        markers = [{"role": "assistant", "content": text, **shown} for text in ("a", "b")]
        try:
            one, other = [(await view.render([*messages[:at], marker, *messages[at + 1 :]])).ids for marker in markers]
        except EngineRefused:
            continue
        added = one[len(one) - common_suffix(one, other) :]
        ends = np.flatnonzero(added == closing)
        if len(ends):
            added = added[ends[0] :]
            if np.array_equal(full[len(full) - len(added) :], added):
                return np.concatenate([answer.total, added[1:] if ended else added])
    raise Fork("tail_rendered_by_context")


async def closing_token(engine: Engine) -> int:
    """The id that the template puts after an assistant's text. Raises `Fork` where the template does not show one.

    It is what a render of a finished answer has and a render of the same answer left open has not.
    """
    if engine.closing_token is None:
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        closed = (await engine.render({"messages": probe, "add_generation_prompt": False})).ids
        left_open = (await engine.render({"messages": probe, "add_generation_prompt": False, "continue_final_message": True})).ids
        if not starts_with(closed, left_open) or len(closed) == len(left_open):
            raise Fork("template_shows_no_end_of_turn")
        engine.closing_token = int(closed[len(left_open)])
    return engine.closing_token


def message_of(parsed: Parsed) -> Message:
    """Parsed ids as an assistant message without ids, as `message_key` compares it."""
    message: Message = {"role": "assistant", "content": parsed.content, "reasoning": parsed.reasoning}
    message["tool_calls"] = [{"function": {"name": name, "arguments": arguments}} for name, arguments in parsed.calls]
    return message


async def _ending(view: View, answer: Answer) -> tuple[int, bool]:
    """The end-of-turn id, and whether the answer's own last id is it; if not, it was cut by length."""
    if answer.stopped:
        raise Fork("ended_by_stop_string")
    closing = await closing_token(view.engine)
    ended = int(answer.sampled[-1]) == closing
    if not ended and answer.finish_reason != "length":
        raise Fork("ended_by_other_token")
    return closing, ended


async def _end_of_answer(view: View, answer: Answer, closing: int, full: Ids, start: int, aligned: bool) -> int:
    """Where the recorded answer ends in `full[start:]`: at the first end-of-turn id before which it stands whole."""
    body = full[start:]
    ends = np.flatnonzero(body == closing)
    if not len(ends):
        raise Fork("no_end_of_turn")
    cut = int(answer.sampled[-1]) != closing
    sampled = answer.sampled if cut else answer.sampled[:-1]
    for end in ends[:QUOTED_ENDS].tolist():
        text = body[:end]
        if aligned and np.array_equal(text, sampled):
            return int(end)
        parsed = await view.derender(text, full[:start], "stop")
        if message_key(message_of(parsed)) == answer.key:
            if cut and parsed.reasoning and not parsed.content and not parsed.calls:
                raise Fork("cut_within_reasoning")  # the template has closed it, and where in these ids it did cannot be told
            return int(end)
    raise Fork("answer_shown_differently")


async def _check_blank(view: View, tail: Ids, before: Ids) -> None:
    """`tail`, the end of a generation prompt that the full render does not repeat id for id, is nothing but white space."""
    if len(tail) > MERGED_IDS:
        raise Fork("history_rendered_differently")
    parsed = await view.derender(tail, before, "stop")
    if (parsed.content or "").strip() or (parsed.reasoning or "").strip() or parsed.calls:
        raise Fork("history_rendered_differently")


def starts_with(ids: Ids, head: Ids) -> bool:
    return len(ids) >= len(head) and bool(np.array_equal(ids[: len(head)], head))
