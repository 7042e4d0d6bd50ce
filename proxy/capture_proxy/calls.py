"""One agent call, from its request to its stored turn.

Invariant: a call ends in exactly one recorded way: a stored turn (then, and only then, an answer), or a reason. A call is refused before
anything is sampled, or it is sampled under the session's policy with a fresh seed. Cancelling it (the client left, the session was sealed)
cancels the engine's work and still records how it ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from capture_proxy import delta, dialects, images
from capture_proxy.bigjson import off_loop
from capture_proxy.certify import Certificates
from capture_proxy.codec import common_prefix
from capture_proxy.control import ControlTokens
from capture_proxy.disputes import disputes
from capture_proxy.engine import Engine
from capture_proxy.gate import Gate, HeldTooLong
from capture_proxy.graph import Turn
from capture_proxy.messages import AgentCall, Reply, ToolCall, extend_key, message_key
from capture_proxy.metrics import Metrics
from capture_proxy.pool import EnginePool
from capture_proxy.reasons import Reason
from capture_proxy.refusal import CallRefused, conversation_over, refusal_of
from capture_proxy.sampling import Sampled, sample_by_chat, sample_by_tokens
from capture_proxy.session import RunningCall, Session
from capture_proxy.settings import Settings
from capture_proxy.splice import message_of
from capture_proxy.store import StoreError
from capture_proxy.trace import hash_ids
from capture_proxy.upstream import EngineError
from capture_proxy.view import chat_fields

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Context:
    """What every call shares."""

    settings: Settings
    pool: EnginePool
    gate: Gate
    metrics: Metrics
    certificates: Certificates
    control: ControlTokens | None
    """Of the model's tokenizer, where that is at hand."""


async def perform(ctx: Context, session: Session, call: AgentCall, body: dict[str, Any], running: RunningCall) -> Reply:
    """The whole call. Raises `CallRefused`; every way out is recorded in the session."""
    try:
        return await _perform(ctx, session, call, body, running)
    except asyncio.CancelledError:
        _close(ctx, session, running, running.cancel_reason, None)
        raise
    except CallRefused as refused:
        _close(ctx, session, running, refused.reason, str(refused))
        raise
    except (EngineError, StoreError) as error:
        log.warning("session %s, call %d: %s", session.id, running.seq, error)
        failure = refusal_of(error)
        _close(ctx, session, running, failure.reason, str(error))
        raise failure from error
    except Exception as error:
        # A fault of ours: the agent and the record hear of it like of any other failure.
        log.exception("session %s, call %d", session.id, running.seq)
        _close(ctx, session, running, Reason.ENGINE_FAILED, f"internal error: {error!r}")
        raise CallRefused(502, None, "internal error of the capture proxy", Reason.ENGINE_FAILED) from error


async def count(ctx: Context, session: Session, call: AgentCall) -> int:
    """Tokens of the call's prompt as the engine renders it. Raises `EngineError`."""
    fields = {"messages": call.messages, **chat_fields(call, session.spec.template.chat_template_kwargs)}

    async def work(engine: Engine) -> int:
        if (await engine.info()).token_routes:
            return len((await engine.render(fields)).ids)
        counted = await engine.count(fields)
        if counted is None:
            raise EngineError(f"engine {engine.url} counts no tokens: it has neither the token routes nor /tokenize")
        return counted

    return await ctx.pool.use(session.id, work)


def _close(ctx: Context, session: Session, running: RunningCall, reason: Reason, detail: str | None) -> None:
    running.admitted = False
    ctx.metrics.calls[reason.value] += 1
    try:
        if running.node_id is not None:
            session.amend(running.node_id, reason)
        else:
            session.end(running.seq, reason, detail)
    except StoreError as error:
        # The log then has no end for this call: after a restart it counts as abandoned.
        log.error("session %s, call %d: %s", session.id, running.seq, error)


async def _perform(ctx: Context, session: Session, call: AgentCall, body: dict[str, Any], running: RunningCall) -> Reply:
    try:
        await ctx.gate.wait()
    except HeldTooLong as error:
        raise CallRefused(503, None, f"the policy is being updated: {error}", Reason.ENGINE_FAILED, retry_after_s=30) from error
    _check_session_limits(session, running)
    if session.slots is None:
        return await _answer(ctx, session, call, body, running)
    try:
        await asyncio.wait_for(session.slots.acquire(), ctx.settings.admission_wait_s)
    except TimeoutError as error:
        raise CallRefused(429, None, "max_concurrent_calls of this session are running", Reason.LIMIT, retry_after_s=5) from error
    try:
        return await _answer(ctx, session, call, body, running)
    finally:
        session.slots.release()


def _check_session_limits(session: Session, running: RunningCall) -> None:
    limits = session.spec.limits
    if limits.deadline_s is not None and time.time() > session.created_at + limits.deadline_s:
        raise conversation_over("the session's deadline has passed")
    others = sum(1 for call in session.running.values() if call.admitted and call.node_id is None)
    if limits.max_calls is not None and len(session.graph.turns) + others >= limits.max_calls:
        raise conversation_over(f"it may have {limits.max_calls} calls")
    running.admitted = True


async def _answer(ctx: Context, session: Session, call: AgentCall, body: dict[str, Any], running: RunningCall) -> Reply:
    script = session.spec.script
    if script is not None and session.demonstrated >= len(script):
        return _script_ended(ctx, session, running)

    async def work(engine: Engine) -> Sampled:
        info = await engine.info()
        if ctx.settings.capture == "chat" or (ctx.settings.capture == "auto" and not info.token_routes):
            return await sample_by_chat(session, call, running, engine, info)
        if not info.token_routes:
            raise EngineError(f"engine {engine.url} lacks the token routes: start vLLM with --enable-scale-out, or use --capture chat")
        return await sample_by_tokens(session, call, running, engine, info, ctx.certificates, ctx.control)

    sampled = await ctx.pool.use(session.id, work)
    reply, turn = _turn(ctx, session, call, running, sampled)
    if turn is None:
        session.end(running.seq, Reason.TOKEN_COUNT_MISMATCH, sampled.sample.problem)
        ctx.metrics.calls[Reason.TOKEN_COUNT_MISMATCH.value] += 1
        return reply
    turn.base, turn.keep, before = session.graph.place(turn.parent, turn.prompt)
    turn.request = await off_loop(running.body_bytes, delta.encode, before, body)
    stored = await session.record(running, turn)
    _count(ctx.metrics, sampled, turn)
    await stored
    return reply


def _script_ended(ctx: Context, session: Session, running: RunningCall) -> Reply:
    session.note("script_ended", "the agent called again after the script's last turn", running.seq)
    session.end(running.seq, Reason.SCRIPT_ENDED)
    ctx.metrics.calls[Reason.SCRIPT_ENDED.value] += 1
    return Reply("The script has no further turns.", None, (), "stop", 0, 0)


def _turn(ctx: Context, session: Session, call: AgentCall, running: RunningCall, done: Sampled) -> tuple[Reply, Turn | None]:
    """The answer and its turn; no turn where the server does not report the prompt's ids."""
    sample, parsed = done.sample, done.parsed
    calls = tuple(ToolCall(f"call_{running.key}{i:02x}", name, arguments) for i, (name, arguments) in enumerate(parsed.calls))
    finish = "tool_calls" if calls and sample.finish_reason == "stop" else sample.finish_reason
    stop = sample.stop_reason if isinstance(sample.stop_reason, str) else None
    reply = Reply(parsed.content, parsed.reasoning, calls, finish, len(done.prompt), len(sample.ids), sample.cached_tokens, stop)
    if not len(done.prompt):
        return reply, None
    versions, ranged = _versions(ctx, done)
    if sample.problem is not None:
        session.note("token_count_mismatch", sample.problem, running.seq)
    if done.open_ended:
        session.note("end_of_turn_not_sampled", f"the answer ends with id {sample.ids[-1]}, which is text: no end is trained", running.seq)
    if done.built is not None and done.built.fork_cause is not None:
        session.note("fork", done.built.fork_cause, running.seq)
    if done.edited is not None:
        session.note("history_edited", f"turn {done.edited.node_id} is shown, and not as it was", running.seq)
    disputed = list(disputes(calls, call.tools, sample.finish_reason))
    for name, what in disputed:
        session.note("disputed_tool_call", f"{what}: {name!r:.100}", running.seq)
    leading = call.messages[0]
    meta = {
        "origin": "demonstration" if done.demonstration else "sampled",
        "weight_versions": versions,
        "weight_version_range": ranged,
        "adapters": list(sample.adapters),
        "sampling": done.params,
        "requested_sampling": call.requested_sampling,
        "seed": done.seed,
        "parts": [list(part) for part in sample.parts],
        "cache_salt": session.cache_salt,
        "finish_reason": finish,
        "stop_reason": sample.stop_reason,
        "dialect": call.dialect,
        "agent_id": call.agent_id,
        "left_out": list(call.left_out),
        "disputed_tool_calls": [list(dispute) for dispute in disputed],
        "quoted_control_tokens": list(done.quoted),
        "control_tokens": session.spec.template.control_tokens,
        "role_rule": call.role[1] if call.role is not None else None,
        "engine": done.engine.url,
        "capture": done.mode,
        "spliced": done.built is not None and done.built.spliced,
        "fork_cause": done.built.fork_cause if done.built is not None else None,
        "edited": done.edited.node_id if done.edited is not None else None,
        "prefix_broken_at": _broken_at(done),
        "problem": sample.problem,
        "started_at": running.started_at,
        "ended_at": time.time(),
        "prompt_hash": done.digest.whole().hex(),
        "completion_hash": hash_ids(sample.ids if sample.problem is None else sample.ids[:0]),
        "answer_key": message_key(message_of(parsed)).hex(),
    }
    turn = Turn(
        node_id=running.key,
        seq=running.seq,
        parent=done.parent,
        base=None,
        keep=0,
        prompt_len=len(done.prompt),
        total=np.concatenate([done.prompt, sample.ids]),
        logps=sample.logps,
        reason=_reason(session, call, done, versions),
        request={},
        response=dialects.BY_NAME[call.dialect].reply(reply, call, running.response_id, running.created),
        meta=meta,
        chain=done.chain,
        reply_key=extend_key(done.chain, reply.message(), session.spec.shows_reasoning),
        system_key=message_key(leading) if leading["role"] in ("system", "developer") else b"",
        rendered_len=len(done.rendered),
        rendered_hash=done.digest.whole().hex() if done.rendered is done.prompt else hash_ids(done.rendered),
        total_hash=done.digest.followed_by(sample.ids),
        continues=done.built.continues.node_id if done.built is not None and done.built.continues is not None else None,
        tool_call_ids=tuple(item.id for item in calls),
        has_tools=bool(call.tools),
        ruled=call.role[0] if call.role is not None else None,
        retry_mark=call.retry_mark,
        delivered=False,
    )
    return reply, turn


def _versions(ctx: Context, done: Sampled) -> tuple[list[list[Any]], list[str | None] | None]:
    """Version spans over the sampled ids, and the range where the server only says what it had before and after."""
    if done.sample.versions is not None:
        return [list(span) for span in done.sample.versions], None
    if done.version_range is None:
        return [], None
    before, after = done.version_range
    known = before or ctx.gate.version or "default"
    return [[known, 0, len(done.sample.ids)]], [before, after]


def _broken(done: Sampled) -> Turn | None:
    """The turn whose ids the prompt would begin with, had template and client left it as it was."""
    if done.edited is not None or done.built is None:
        return done.edited
    return done.built.continues if done.built.fork_cause is not None else None


def _broken_at(done: Sampled) -> int | None:
    """How many leading ids a prompt has in common with a turn that it could not go on from."""
    broken = _broken(done)
    return None if broken is None else common_prefix(broken.total, done.prompt)


def _reason(session: Session, call: AgentCall, done: Sampled, versions: list[list[Any]]) -> Reason | None:
    if done.sample.problem is not None:
        return Reason.TOKEN_COUNT_MISMATCH
    if images.shown(call.messages):
        return Reason.IMAGE
    if done.constrained:
        return Reason.CONSTRAINED
    if session.spec.sampling.temperature == 0 and not done.demonstration:
        return Reason.GREEDY
    changed = done.version_range is not None and done.version_range[0] != done.version_range[1]
    return Reason.UNPROVEN if changed or not versions else None


def _count(metrics: Metrics, done: Sampled, turn: Turn) -> None:
    metrics.calls["answered"] += 1
    metrics.totals["prompt_tokens"] += turn.prompt_len
    metrics.totals["sampled_tokens"] += len(turn.completion)
    metrics.totals["cached_prompt_tokens"] += done.sample.cached_tokens
    metrics.totals["spliced_turns"] += bool(turn.meta["spliced"])
    metrics.totals["turns_with_quoted_control_tokens"] += bool(done.quoted)
    if done.built is not None and done.built.continues is not None and done.built.spliced:
        metrics.totals["spliced_tokens"] += len(done.built.continues.total)
    if (broken := _broken(done)) is not None:
        metrics.totals["forked_turns"] += 1
        metrics.totals["broken_prefix_tokens"] += len(broken.total) - turn.meta["prefix_broken_at"]
    metrics.totals["disputed_tool_calls"] += len(turn.meta["disputed_tool_calls"])
