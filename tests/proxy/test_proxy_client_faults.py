"""Published agents when what is around an answer goes wrong: the engine, the session, the client. No call is lost or trained twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from proxy_helpers import Served, total, until

from capture_proxy.client import CreatedSession
from capture_proxy.trace import TrainingTrace
from harness_rl.selftest.clients import CLIENTS, Client
from harness_rl.selftest.play import play

pytestmark = [pytest.mark.root, pytest.mark.timeout(400)]

FIRST_CALL_S = 120.0
"""How long a client may take to its first call, on a loaded machine."""
GIVEN_UP_S = 30.0
"""After so long a client that asks an engine that is gone is stopped: some ask for minutes."""


async def answered(served: Served, created: CreatedSession) -> None:
    """The agent has its first answer; side calls may have theirs before."""
    turns = served.proxy.sessions[created.session_id].graph.turns
    await until(lambda: any(turn.ruled is None for turn in turns.values()), FIRST_CALL_S)


async def held(client: Client, served: Served, created: CreatedSession, engine: FakeEngine, running: asyncio.Task[object]) -> None:
    """The weights are updated while the client asks: it waits."""
    await answered(served, created)
    served.proxy.ctx.gate.hold("weights", 60.0)
    await asyncio.sleep(10.0)
    engine.version = "v1"
    served.proxy.ctx.gate.release("v1")


async def slow(client: Client, served: Served, created: CreatedSession, engine: FakeEngine, running: asyncio.Task[object]) -> None:
    """The engine takes 70 s for the second answer; gemini-cli was seen to leave a silent endpoint after 60 s."""


async def engine_dies(client: Client, served: Served, created: CreatedSession, engine: FakeEngine, running: asyncio.Task[object]) -> None:
    """Connections are reset for longer than the proxy tries again: the client's stream breaks off, and it asks again."""
    await answered(served, created)
    engine.statuses = deque([-1] * 10_000)
    await until(lambda: served.proxy.ctx.metrics.calls["engine_failed"], FIRST_CALL_S)
    engine.statuses.clear()


async def engine_gone(client: Client, served: Served, created: CreatedSession, engine: FakeEngine, running: asyncio.Task[object]) -> None:
    """It never comes back."""
    await answered(served, created)
    await engine.stop()
    await asyncio.wait({running}, timeout=GIVEN_UP_S)
    await until(lambda: served.proxy.ctx.metrics.calls["engine_failed"], FIRST_CALL_S)
    running.cancel()


async def sealed(client: Client, served: Served, created: CreatedSession, engine: FakeEngine, running: asyncio.Task[object]) -> None:
    """The session is over before the client is: the one answer that stops every client."""
    await answered(served, created)
    await served.admin.seal(created.session_id)


async def context_full(client: Client, served: Served, created: CreatedSession, engine: FakeEngine, running: asyncio.Task[object]) -> None:
    """The window is smaller than what the client's second prompt needs."""
    await answered(served, created)
    longest = max(len(prompt) for prompt, _ in engine.sampled)
    served.proxy.sessions[created.session_id].spec.limits.max_context_tokens = longest + 1


async def calls_over(client: Client, served: Served, created: CreatedSession, engine: FakeEngine, running: asyncio.Task[object]) -> None:
    """The session has had all the calls that it may have."""
    await answered(served, created)
    served.proxy.sessions[created.session_id].spec.limits.max_calls = 1


async def client_killed(client: Client, served: Served, created: CreatedSession, engine: FakeEngine, running: asyncio.Task[object]) -> None:
    """The client dies in the middle of a call: the engine's work is stopped."""
    await until(lambda: engine.active, FIRST_CALL_S)
    running.cancel()
    await until(lambda: engine.cancelled, 10.0)


Fault = Callable[[Client, Served, CreatedSession, FakeEngine, "asyncio.Task[object]"], Awaitable[None]]
FAULTS: tuple[Fault, ...] = (held, slow, engine_dies, engine_gone, sealed, context_full, calls_over, client_killed)
QUICK = {
    "claude-code": "engine_dies",
    "codex": "held",
    "gemini-cli": "sealed",
    "opencode": "engine_dies",
    "mini-swe-agent": "sealed",
    "mini-swe-agent-litellm": "calls_over",
    "pi": "context_full",
    "qwen-code": "client_killed",
}
"""One for each client in `make test`."""
GIVES_UP = {"gemini-cli"}
"""Clients that end when a stream breaks off."""
COMPACTS = {"claude-code", "opencode", "pi", "qwen-code"}
"""Clients that answer a full context with a summary of their conversation."""


@pytest.mark.parametrize(
    ("client", "fault"),
    [
        pytest.param(
            client, fault, id=f"{client.name}-{fault.__name__}", marks=[] if QUICK[client.name] == fault.__name__ else [pytest.mark.full]
        )
        for client in CLIENTS
        for fault in FAULTS
    ],
)
async def test_every_call_has_one_end(client: Client, fault: Fault, served: Served, engine: FakeEngine, tmp_path: Path) -> None:
    engine.max_model_len = 200_000
    engine.asides.update({"You are a title generator": "A file"})
    engine.default_text, engine.default_style = client.call(client.submit) if client.submit else "All done.", "chars"
    engine.say("Step 0. " + client.call("sleep 1"), style="chars", delay_s=30.0 if fault is client_killed else 0.0)
    if fault is slow:
        engine.say(engine.default_text, style="chars", delay_s=70.0)
    created = await served.session()
    running = asyncio.create_task(play(client, served.proxy, created, tmp_path))
    await fault(client, served, created, engine, running)
    ran = None
    with contextlib.suppress(asyncio.CancelledError):
        ran = await running
    await until(lambda: not served.proxy.sessions[created.session_id].running, 10.0)
    trace = await served.admin.trace(created.session_id)
    status = await served.admin.status(created.session_id)
    counts = status["calls_by_reason"]
    assert status["in_flight"] == 0
    assert status["calls_seen"] == sum(counts.values())
    assert_sampled_once(trace, engine)
    agent = [turn for turn in trace.turns if turn.metadata["role"] == "agent"]
    if fault in (held, slow):
        assert ran is not None and ran.code == 0, ran and ran.said[-2000:]
        assert len(agent) == 2 and len(trace.turns) == status["calls_seen"], "nothing was asked twice"
    elif fault is engine_dies:
        assert ran is not None and (ran.code == 0) is (client.name not in GIVES_UP), ran and ran.said[-2000:]
        assert len(agent) == (1 if client.name in GIVES_UP else 2) and counts["engine_failed"] >= 1
    elif fault is engine_gone:
        assert len(agent) == 1 and counts["engine_failed"] >= 1
    elif fault is sealed:
        assert ran is not None
        assert len(agent) == 1 and 1 <= counts["late"] <= 4, "it stops soon"
    elif fault in (context_full, calls_over):
        assert ran is not None and 1 <= counts["limit"] <= 6, "it stops soon"
        compaction = [turn for turn in trace.turns if turn.metadata["role"] == "compaction"]
        assert not compaction or client.name in COMPACTS
    else:
        assert counts["abandoned"] >= 1 and not agent and engine.cancelled >= 1


def assert_sampled_once(trace: TrainingTrace, engine: FakeEngine) -> None:
    """Each turn is one sample of the engine's, and no sample is two turns; a turn goes on from the tokens of its parent."""
    left = [(list(prompt), list(answer)) for prompt, answer in engine.sampled]
    by_id = {turn.node_id: turn for turn in trace.turns}
    for turn in trace.turns:
        left.remove((turn.prompt_token_ids.tolist(), turn.completion_token_ids.tolist()))
        assert turn.completion_mask.all() or turn.metadata["mask_reason"] is not None
        if turn.metadata["parent"] is not None:
            above = total(by_id[turn.metadata["parent"]])
            assert turn.prompt_token_ids[: len(above)].tolist() == above
