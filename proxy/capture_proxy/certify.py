"""Which conversations can go on by tokens under a model's template: tried on the engine, once, before it matters.

Invariant: a kind of conversation is `spliced` only when the joined prompt and the engine's own render of the same request were the same
text but for white space, and all that follows the answer the very same, both with the ids that the template gives and with other ids for
that text. A kind that came out as another text is never joined, whatever a single call would show; a kind that forks is named with its
cause before a run pays for it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from capture_proxy.codec import Ids
from capture_proxy.engine import Engine
from capture_proxy.messages import Message, message_key, text_of
from capture_proxy.splice import Answer, Fork, append, closing_token, message_of, splice, starts_with
from capture_proxy.trace import hash_ids
from capture_proxy.upstream import EngineError, EngineRefused, Retry
from capture_proxy.view import View

FORMAT = "1"
"""Changes when the same probes would be judged otherwise."""
SPLICED = "spliced"
CHANGED = "text_changed"
REFUSED = "template_refused"
MEANING = {
    CHANGED: "joined ids would be another text than the engine's render",
    REFUSED: "the template refuses such a conversation",
    "answer_shown_differently": "the template shows the answer otherwise than it was sampled",
    "history_rendered_differently": "the template shows the end of a prompt otherwise later on",
    "cut_within_reasoning": "the template closes thinking that was cut",
}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """A conversation whose last answer is continued."""

    answer: Message
    tail: tuple[Message, ...]
    system: bool = True
    cut: bool = False
    """The answer was cut by length."""

    @property
    def before(self) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": "You look things up."}] if self.system else []
        return [*system, {"role": "user", "content": "What is there?"}]


def _answer(content: str | None, calls: int = 0, reasoning: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning"] = reasoning
    if calls:
        function = {"name": "look", "arguments": '{"at": "the left"}'}
        message["tool_calls"] = [{"id": f"call_{i}", "type": "function", "function": function} for i in range(calls)]
    return message


_USER: Message = {"role": "user", "content": "Please continue."}
_RESULTS: list[Message] = [{"role": "tool", "tool_call_id": f"call_{i}", "content": f"Result number {i}."} for i in range(2)]
_THOUGHT = "Something about looking."
PROBES = {
    "answer": Probe(_answer("Nothing special here."), (_USER,)),
    "no_system": Probe(_answer("Nothing special here."), (_USER,), system=False),
    "tool_call": Probe(_answer(None, calls=1), (_RESULTS[0],)),
    "several_calls": Probe(_answer("Looking twice.", calls=2), tuple(_RESULTS)),
    "reasoning_then_tool": Probe(_answer(None, calls=1, reasoning=_THOUGHT), (_RESULTS[0],)),
    "reasoning_then_user": Probe(_answer("Nothing special here.", reasoning=_THOUGHT), (_USER,)),
    "empty_answer": Probe(_answer(""), (_USER,)),
    "cut_answer": Probe(_answer("Nothing special"), (_USER,), cut=True),
    "cut_reasoning": Probe(_answer("", reasoning=_THOUGHT), (_USER,), cut=True),
    "system_in_the_middle": Probe(_answer("Nothing special here."), ({"role": "system", "content": "Be brief."}, _USER)),
    "developer_in_the_middle": Probe(_answer("Nothing special here."), ({"role": "developer", "content": "Be brief."}, _USER)),
}


def kinds(messages: list[Message], at: int, cut: bool) -> Iterator[str]:
    """The probes that stand for a request which continues the answer `messages[at]`."""
    answer, tail = messages[at], messages[at + 1 :]
    calls, reasoning = len(answer.get("tool_calls") or ()), bool((answer.get("reasoning") or "").strip())
    content = bool(text_of(answer.get("content")).strip())
    if cut:
        yield "cut_reasoning" if reasoning and not content and not calls else "cut_answer"
    if calls:
        yield "several_calls" if calls > 1 else "tool_call"
    else:
        yield "answer" if content or reasoning else "empty_answer"
    roles = {message.get("role") for message in tail}
    if reasoning:
        yield "reasoning_then_user" if "user" in roles else "reasoning_then_tool"
    yield from (f"{role}_in_the_middle" for role in ("system", "developer") if role in roles)
    if messages[0].get("role") not in ("system", "developer"):
        yield "no_system"


@dataclass(frozen=True)
class Certificate:
    """What came out of the probes for one engine and one set of template arguments."""

    verdicts: dict[str, str] = field(default_factory=dict)
    """Probe -> `spliced`, or why not, under history `template`."""
    kept: dict[str, str] = field(default_factory=dict)
    """The same for those that are not spliced, under history `keep_reasoning`."""
    developer_is_system: bool = False
    """The engine moves a developer message to the front, and a system message stays where it is: send the one as the other."""

    def check(self, messages: list[Message], at: int, cut: bool) -> None:
        """Raises `Fork` where a conversation of this kind must not be joined."""
        if any(self.verdicts.get(kind) == CHANGED for kind in kinds(messages, at, cut)):
            raise Fork("not_certified")

    def placed(self, messages: list[Message]) -> list[Message]:
        """The messages in roles that the engine leaves where they are."""
        if not self.developer_is_system or all(message["role"] != "developer" for message in messages):
            return messages
        return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]

    def lines(self) -> list[str]:
        """One line a probe, for people."""
        out = []
        for name, verdict in self.verdicts.items():
            if verdict != SPLICED:
                verdict = f"a branch: {MEANING.get(verdict, verdict)}; keep_reasoning: {self.kept[name]}"
            out.append(f"{name:<24} {verdict}")
        return [*out, "developer messages are sent as system messages, which stay in place"] if self.developer_is_system else out


class Certificates:
    """The certificates of every engine, made once and kept in `folder` for the next start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tasks: dict[tuple[str, int, str], asyncio.Task[Certificate]] = {}

    async def of(self, engine: Engine, template_kwargs: dict[str, Any]) -> Certificate:
        """The engine's certificate; calls that come while it is made wait for it. Raises `EngineError`."""
        kwargs = json.dumps(template_kwargs, sort_keys=True)
        key = (engine.url, engine.generation, kwargs)
        task = self._tasks.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._tasks[key] = asyncio.create_task(self._load_or_make(engine, template_kwargs))
        return await asyncio.shield(task)

    async def _load_or_make(self, engine: Engine, template_kwargs: dict[str, Any]) -> Certificate:
        try:
            path = self._folder / f"certificate-{await fingerprint(engine, template_kwargs)}.json"
        except EngineRefused as error:
            log.warning("the template of %s cannot be tried, each call is judged alone: %s", engine.model, error)
            return Certificate()
        if path.is_file():
            try:
                return Certificate(**json.loads(path.read_text()))
            except (ValueError, TypeError):
                log.warning("%s cannot be read; the template is tried again", path)
        certificate = await certify(engine, template_kwargs)
        for line in certificate.lines():
            log.info("template of %s: %s", engine.model, line)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(certificate)))
        draft.replace(path)
        return certificate


async def fingerprint(engine: Engine, template_kwargs: dict[str, Any]) -> str:
    """Changes with the model's name, its tokenizer, its template, these arguments and the engine's parsers."""
    view, seen = View(engine, _fields(template_kwargs)), [FORMAT, engine.model, json.dumps(template_kwargs, sort_keys=True)]
    for probe in PROBES.values():
        try:
            rendered = (await view.render([*probe.before, probe.answer, *probe.tail])).ids
            seen += [str(rendered.tolist()), repr(await view.derender(rendered[-64:], rendered[:-64], "stop"))]
        except EngineRefused as error:
            if error.context_full:
                raise
            seen.append(REFUSED)
    return hashlib.blake2b("\n".join(seen).encode(), digest_size=8).hexdigest()


async def certify(engine: Engine, template_kwargs: dict[str, Any]) -> Certificate:
    """Tries every probe. Raises `EngineError` when the engine fails, not when it refuses a probe."""
    moved = await _moves_developers(engine, template_kwargs)
    verdicts, kept = {}, {}
    for name, probe in PROBES.items():
        tail = tuple({**message, "role": "system"} if moved and message["role"] == "developer" else message for message in probe.tail)
        verdicts[name] = await _verdict(engine, replace(probe, tail=tail), template_kwargs, splice)
        if verdicts[name] != SPLICED:
            kept[name] = await _verdict(engine, replace(probe, tail=tail), template_kwargs, append)
    return Certificate(verdicts, kept, moved)


async def _moves_developers(engine: Engine, kwargs: dict[str, Any]) -> bool:
    """A developer message in the middle changes what stands before it, and a system message does not."""
    view, stays = View(engine, _fields(kwargs)), {}
    for role in ("system", "developer"):
        probe = PROBES[f"{role}_in_the_middle"]
        try:
            # The end of a generation prompt may be shown otherwise later on; what a moved message changes stands at the front.
            prompt = (await view.render(probe.before, add_generation_prompt=False)).ids
            stays[role] = starts_with((await view.render([*probe.before, probe.answer, *probe.tail])).ids, prompt)
        except EngineRefused:
            stays[role] = False
    return stays["system"] and not stays["developer"]


Join = Callable[[View, list[Message], int, Answer, Ids], Awaitable[Ids]]
"""`splice` or `append`."""


async def _verdict(engine: Engine, probe: Probe, kwargs: dict[str, Any], join: Join) -> str:
    try:
        sampled = await _sampled(engine, probe, kwargs)
        for ids in (sampled, await _other_ids(engine, sampled)):
            if ids is not None and not await _same_text(engine, probe, ids, kwargs, join):
                return CHANGED
    except Fork as fork:
        return str(fork)
    except EngineRefused:
        return REFUSED
    return SPLICED


async def _sampled(engine: Engine, probe: Probe, kwargs: dict[str, Any]) -> Ids:
    """The answer's ids as a model would sample them that writes what the template shows."""
    view = View(engine, _fields(kwargs))
    prompt = (await view.render(probe.before)).ids
    body = (await view.render([*probe.before, probe.answer], add_generation_prompt=False)).ids
    if not starts_with(body, prompt):
        raise Fork("answer_not_shown_after_its_prompt")
    body = body[len(prompt) :]
    ends = np.flatnonzero(body == await closing_token(engine))
    if not len(ends):
        raise Fork("no_end_of_turn")
    return body[: ends[-1]] if probe.cut else body[: ends[-1] + 1]


async def _other_ids(engine: Engine, ids: Ids) -> Ids | None:
    """Other ids for the same text: one word is cut in two. None where no word can be."""
    text = await engine.detokenize(ids)
    for at, token in enumerate(ids.tolist()):
        word = await engine.detokenize(ids[at : at + 1])
        if len(word.strip()) > 3 and word.strip().isalpha():
            middle = len(word) // 2
            halves = [await engine.tokenize(part) for part in (word[:middle], word[middle:])]
            other = np.concatenate([ids[:at], *halves, ids[at + 1 :]])
            if await engine.detokenize(other) == text and token not in other[at : at + len(halves[0])]:
                return other
    return None


async def _same_text(engine: Engine, probe: Probe, sampled: Ids, kwargs: dict[str, Any], join: Join) -> bool:
    """Joins the answer's ids as when a client sends the answer back as it got it, and compares with the plain render. Raises `Fork`."""
    view = View(engine, _fields(kwargs))
    prompt = (await view.render(probe.before)).ids
    text, finish = (sampled, "length") if probe.cut else (sampled[:-1], "stop")
    message = message_of(await view.derender(text, prompt, finish))
    answer = Answer(np.concatenate([prompt, sampled]), len(prompt), len(prompt), hash_ids(prompt), message_key(message), finish)
    message["tool_calls"] = [{"id": f"call_{i}", "type": "function", **call} for i, call in enumerate(message["tool_calls"])]
    messages = [*probe.before, message, *probe.tail]
    full = (await view.render(messages)).ids
    joined = await join(view, messages, len(probe.before), answer, full)
    whole, plain = await engine.detokenize(joined), await engine.detokenize(full)
    tail = await engine.detokenize(joined[len(answer.total) :])
    return plain.endswith(tail) and (join is append or "".join(whole.split()) == "".join(plain.split()))


def _fields(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [_TOOL], **({"chat_template_kwargs": kwargs} if kwargs else {})}


def main(arguments: Sequence[str]) -> int:
    """`capture-proxy certify`: the table of one engine. Exit code 1 when the engine cannot be asked."""
    parser = argparse.ArgumentParser(prog="capture-proxy certify", description="Tries which conversations can go on by tokens.")
    parser.add_argument("--engine", required=True, metavar="URL", help="base URL of a vLLM server with the token routes")
    parser.add_argument("--model", required=True, metavar="NAME", help="the model name that it serves")
    parser.add_argument(
        "--chat-template-kwargs", type=json.loads, default={}, metavar="JSON", help='for example {"enable_thinking": false}'
    )
    options = parser.parse_args(arguments)

    async def ask() -> Certificate:
        engine = Engine(options.engine, options.model, Retry(total_s=5.0), 60.0)
        try:
            return await certify(engine, options.chat_template_kwargs)
        finally:
            engine.close()

    try:
        print("\n".join(asyncio.run(ask()).lines()))
    except EngineError as error:
        print(f"capture-proxy: {error}", file=sys.stderr)
        return 1
    return 0
