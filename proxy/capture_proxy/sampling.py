"""Sampling of one call: by the token routes (render, generate, derender), by the chat route, or from the session's script.

Invariant: the engine samples under the session's policy only, with a seed of the call's own, at most as many tokens as every limit leaves;
what it was given and what it sampled are the very arrays that are recorded.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from capture_proxy.bigjson import off_loop
from capture_proxy.certify import Certificates
from capture_proxy.control import USUAL, ControlTokens, quoted
from capture_proxy.engine import Engine, EngineInfo
from capture_proxy.graph import Turn
from capture_proxy.ids import Ids, PrefixHash
from capture_proxy.messages import AgentCall, context_key
from capture_proxy.onecall import OneCall, Reading
from capture_proxy.reasons import Reason
from capture_proxy.refusal import CONTEXT_FULL, CallRefused
from capture_proxy.rendering import Prompt, build_prompt, visible
from capture_proxy.sample import Parsed, Sample
from capture_proxy.scripted import demonstrate
from capture_proxy.session import RunningCall, Session
from capture_proxy.splice import Fork, closing_token
from capture_proxy.upstream import EngineError, EngineRefused
from capture_proxy.view import View, chat_fields


@dataclass
class Sampled:
    """What the engine did for one call."""

    engine: Engine
    mode: str
    """`tokens` or `chat`."""
    prompt: Ids
    """int32 [P]: what the engine was given; empty where a chat server does not say."""
    digest: PrefixHash
    """Of `prompt`."""
    rendered: Ids
    """The engine's plain render of the request; the very same array where it was sent as rendered."""
    chain: bytes
    """Key of the conversation that was asked (`messages.chain_keys`)."""
    sample: Sample
    parsed: Parsed
    """The answer as the agent gets it."""
    parent: str | None
    """The turn whose tokens the prompt continues."""
    params: dict[str, Any]
    """The sampling parameters that were used."""
    seed: int | None = None
    built: Prompt | None = None
    edited: Turn | None = None
    """A turn that the request shows otherwise than it was (`History.edited`)."""
    constrained: bool = False
    """A grammar forced tokens."""
    demonstration: bool = False
    version_range: tuple[str | None, str | None] | None = None
    """The server's weight version before and after, where it does not report one per token."""
    quoted: tuple[str, ...] = ()
    """Control tokens that stand in the text of users and tools."""
    open_ended: bool = False
    """The engine says that the model ended its turn, and gives no id that does."""


async def sample_by_tokens(
    session: Session,
    call: AgentCall,
    running: RunningCall,
    engine: Engine,
    info: EngineInfo,
    certificates: Certificates,
    control: ControlTokens | None,
) -> Sampled:
    """render -> splice -> generate (or the script's next turn) -> derender, unless the engine reads what it samples (`onecall`). Raises
    `CallRefused`, `EngineError`."""
    template = session.spec.template
    kwargs = template.chat_template_kwargs
    view = View(engine, chat_fields(call, kwargs), control if template.control_tokens == "split" else None)
    context, shown = context_key(call.tools, kwargs), session.spec.shows_reasoning
    keys = await off_loop(running.body_bytes, session.history.keys, call.messages, context, shown)
    continuation = session.history.find(call.messages, keys)
    certificate = await certificates.of(engine, kwargs)
    built = await build_prompt(view, call.messages, continuation, certificate, session.spec.history == "keep_reasoning")
    digest = PrefixHash(built.ids)
    parent = session.graph.parent_of(built.ids, built.continues, digest)
    max_tokens = output_room(session, call, len(built.ids), info.max_model_len)
    running.sampling.set()
    pattern = control.pattern if control is not None else USUAL
    earlier = continuation.turn.meta["quoted_control_tokens"] if continuation is not None else ()
    new = call.messages[continuation.answer_at + 1 :] if continuation is not None else call.messages
    fresh = await off_loop(running.body_bytes, quoted, new, pattern)
    seed, grammar, versions, reading, one_call = None, None, None, None, engine.one_call
    if session.spec.script is not None:
        params: dict[str, Any] = {"temperature": 1.0}
        before = await engine.version()
        sample = await demonstrate(view, call.messages, session.spec.script[session.demonstrated], built.rendered.ids, built.ids)
        versions = (before, await engine.version())
    else:
        seed, grammar = call_seed(session.spec.sampling.seed, running.seq), built.rendered.grammar
        params = _params(session, call, max_tokens, seed)
        if built.rendered.stop_token_ids:
            params["stop_token_ids"] = list(built.rendered.stop_token_ids)
        constraint = {"structured_outputs": grammar} if grammar else {}
        extra = {**(built.rendered.extra if grammar else {}), **({"features": built.features} if built.features else {})}
        # Where a stop text may end the answer we look for it ourselves, and read apart.
        reading = built.rendered.reading if not call.stop else None
        sample = await engine.generate(built.ids, {**params, **constraint}, extra, session.cache_salt, reading)
    ended = sample.ended_by_token and await ends_turn(engine, int(sample.ids[-1]), pattern)
    return Sampled(
        engine=engine,
        mode="tokens",
        prompt=built.ids,
        digest=digest,
        rendered=built.rendered.ids,
        chain=keys[-1],
        sample=sample,
        parsed=await _parse(view, sample, built.ids, ended, reading, one_call),
        parent=parent,
        params=params,
        seed=seed,
        built=built,
        edited=session.history.edited(call.messages, continuation),
        constrained=bool(grammar),
        demonstration=session.spec.script is not None,
        version_range=versions,
        quoted=tuple(dict.fromkeys([*earlier, *fresh])),
        open_ended=sample.ended_by_token and not ended,
    )


async def sample_by_chat(session: Session, call: AgentCall, running: RunningCall, engine: Engine, info: EngineInfo) -> Sampled:
    """The chat route with ids and logprobs. The server renders, so nothing can be spliced. Raises `CallRefused`, `EngineError`."""
    if session.spec.script is not None or session.spec.template.control_tokens == "split":
        wish = "control_tokens = split" if session.spec.script is None else "a script"
        raise EngineError(f"{wish} needs the token routes of engine {engine.url}: start vLLM with --enable-scale-out")
    kwargs = session.spec.template.chat_template_kwargs
    fields = {"messages": call.messages, **chat_fields(call, kwargs)}
    count = await engine.count(fields)
    max_tokens = output_room(session, call, count or 0, info.max_model_len if count is not None else None)
    running.sampling.set()
    seed = call_seed(session.spec.sampling.seed, running.seq)
    params = _params(session, call, max_tokens, seed)
    before = await engine.version()
    prompt, sample, parsed = await engine.chat(fields, params, session.cache_salt)
    digest = PrefixHash(prompt)
    json_output = (call.response_format or {}).get("type", "text") != "text"
    return Sampled(
        engine=engine,
        mode="chat",
        prompt=prompt,
        digest=digest,
        rendered=prompt,
        chain=session.history.keys(call.messages, context_key(call.tools, kwargs), session.spec.shows_reasoning)[-1],
        sample=sample,
        parsed=parsed,
        parent=session.graph.parent_of(prompt, None, digest),
        params=params,
        seed=seed,
        constrained=json_output or call.tool_choice not in (None, "auto", "none"),
        version_range=None if sample.adapters else (before, await engine.version()),
        quoted=quoted(call.messages),
    )


def call_seed(session_seed: int | None, number: int) -> int:
    """63 bits, another for each call of a session; the same for the same session seed and call number."""
    if session_seed is None:
        return secrets.randbits(63)
    digest = hashlib.blake2b(f"{session_seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _params(session: Session, call: AgentCall, max_tokens: int | None, seed: int) -> dict[str, Any]:
    """The sampling policy: the session's temperature and nothing else that bends the distribution."""
    params: dict[str, Any] = {"temperature": session.spec.sampling.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    params |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "n": 1, "seed": seed}
    if max_tokens is not None:
        params["max_tokens"] = max_tokens
    if call.stop:
        params["stop"] = list(call.stop)
    return params


def output_room(session: Session, call: AgentCall, prompt_len: int, window: int | None) -> int | None:
    """How many tokens may be sampled. Raises `CallRefused` when a limit leaves none."""
    limits = session.spec.limits
    bounds = [(window, "the model's window"), (limits.max_context_tokens, "max_context_tokens")]
    if limits.max_conversation_tokens is not None:
        aside = call.role is not None and call.role[0] == "auxiliary"
        first = prompt_len if aside or session.first_prompt_len is None else session.first_prompt_len
        bounds.append((first + limits.max_conversation_tokens, "max_conversation_tokens"))
    room: list[int] = [n for n in (call.max_tokens, limits.max_output_tokens_per_call) if n is not None]
    for bound, name in bounds:
        if bound is None:
            continue
        if prompt_len >= bound:
            text = (
                f"This model's maximum context length is {bound} tokens ({name}). However, your messages resulted in {prompt_len} tokens."
            )
            raise CallRefused(400, CONTEXT_FULL, text, Reason.LIMIT)
        room.append(bound - prompt_len)
    return min(room) if room else None


async def ends_turn(engine: Engine, last: int, control: re.Pattern[str]) -> bool:
    """Whether an answer's last id ends the turn (the template's end of turn, or another control token) rather than being text."""
    if last not in engine.turn_ends:
        try:
            closes = last == await closing_token(engine)
        except Fork:  # the template shows no end of turn
            closes = False
        if not closes:
            try:
                shown = await engine.detokenize(np.array([last], dtype=np.int32))
                closes = not shown or control.fullmatch(shown) is not None
            except EngineRefused:  # a server that cannot say gives the id that ended the answer, as vLLM does
                closes = True
        engine.turn_ends[last] = closes
    return engine.turn_ends[last]


async def _parse(view: View, sample: Sample, prompt: Ids, ended: bool, reading: Reading | None, one_call: OneCall) -> Parsed:
    """The answer as the agent gets it, by the engine's own parsers; the id that ended the turn is not text."""
    engine = view.engine
    if not len(sample.ids):
        raise EngineError(f"engine {engine.url}: {sample.problem or 'it sampled nothing'}")
    text = sample.ids[:-1] if ended else sample.ids
    # The engine leaves out the id at which it stopped; where that is text it belongs to the answer.
    read = sample.read if len(text) and (ended or not sample.ended_by_token) else None
    if reading is not None and read is not None and one_call.trusts(reading, read):
        return read
    try:
        parsed = await view.derender(text, prompt, sample.finish_reason)
    except EngineRefused as error:
        raise EngineError(f"the sampled answer could not be read: {error}") from error
    if reading is not None and read is not None:
        one_call.compare(reading, read, parsed)
    return visible(parsed, sample.stop_reason)
