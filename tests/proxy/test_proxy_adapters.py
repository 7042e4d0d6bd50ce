"""Policies that are adapters: the proxy asks for exactly one by name, and the trace proves which one sampled. Real sockets, toy engine."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from proxy_helpers import USER, Serve, Served, assert_chain, assert_engine_saw_the_rows, until

from capture_proxy.client import ProxyError
from capture_proxy.gate import Adapter
from capture_proxy.sample import Sample, sampled_by
from capture_proxy.upstream import Retry

ASK = {"model": "m", "messages": USER}


async def served_by(engine: FakeEngine, serve: Serve, *versions: str, **settings: Any) -> Served:
    """An engine with those adapters, and a proxy that asks for the first."""
    engine.adapters = {f"policy@{version}" for version in versions}
    served = await serve(engine.url, adapters=True, **settings)
    if versions:
        await served.admin.release(versions[0], f"policy@{versions[0]}")
    return served


def asked(engine: FakeEngine) -> list[str]:
    return [body["model"] for path in ("/generate", "/chat/completions") for body in engine.bodies(path)]


async def sampled(served: Served, session_id: str) -> list[tuple[Any, Any]]:
    """(version spans, adapters) of each turn; every id of each is trained."""
    turns = (await served.admin.trace(session_id)).turns
    assert all(turn.completion_mask.all() and len(turn.completion_mask) for turn in turns)
    return [(turn.metadata["weight_versions"], turn.metadata["adapters"]) for turn in turns]


@pytest.mark.parametrize("capture", ["tokens", "chat"])
async def test_a_call_ends_under_the_adapter_that_it_began_with(engine: FakeEngine, serve: Serve, capture: str) -> None:
    served = await served_by(engine, serve, "a1-3", "a1-4", "a1-5", capture=capture)
    agent, created = await served.agent()
    engine.held_up = asyncio.Event()
    call = asyncio.create_task(agent.ask())
    await until(lambda: engine.active == 1)
    # Not held: nothing of the running call changes, and it alone can still ask for its adapter.
    assert (await served.admin.release("a1-4", "policy@a1-4"))["adapters_asked"] == ["policy@a1-3", "policy@a1-4"]
    engine.held_up.set()
    await call
    await agent.ask({"role": "user", "content": "go on"})
    assert asked(engine) == ["policy@a1-3", "policy@a1-4"]
    assert (await served.admin.release("a1-5", "policy@a1-5"))["adapters_asked"] == ["policy@a1-5"]
    first, second = await sampled(served, created.session_id)
    assert first == ([["a1-3", 0, 2]], ["policy@a1-3"]) and second == ([["a1-4", 0, 2]], ["policy@a1-4"])
    if capture == "tokens":
        trace = await served.admin.trace(created.session_id)
        assert_chain(trace)
        assert_engine_saw_the_rows(engine, trace)
        # Template and tokenizer are the model's own, whichever adapter samples.
        assert {body["model"] for body in [*engine.bodies("/render"), *engine.bodies("/derender")]} == {"policy"}


async def test_nothing_is_sampled_before_the_first_adapter_and_never_by_the_model_alone(engine: FakeEngine, serve: Serve) -> None:
    served = await served_by(engine, serve)
    agent, created = await served.agent()
    call = asyncio.create_task(agent.ask())
    await asyncio.sleep(0.1)
    with pytest.raises(ProxyError, match="started with --adapters and would ask the engines' own model"):
        await served.admin.release("a1-0")
    with pytest.raises(ProxyError, match="an adapter needs its version"):
        await served.admin.release(None, "policy@a1-0")
    await asyncio.sleep(0.1)
    assert not call.done() and asked(engine) == []
    engine.adapters = {"policy@a1-0"}
    await served.admin.release("a1-0", "policy@a1-0")
    await call
    assert asked(engine) == ["policy@a1-0"] and await sampled(served, created.session_id) == [([["a1-0", 0, 2]], ["policy@a1-0"])]
    assert (await served.admin.health())["adapter"] == "policy@a1-0"


async def test_an_engine_without_the_adapter_is_named_and_samples_nothing(engine: FakeEngine, serve: Serve) -> None:
    served = await served_by(engine, serve, "a1-0")
    agent, created = await served.agent()
    engine.adapters.clear()  # as one that somebody started again
    status, answer = await agent.post(ASK)
    assert status == 503 and f"engine {engine.url} does not have adapter policy@a1-0" in answer["error"]["message"]
    assert engine.sampled == [] and (await served.admin.trace(created.session_id)).turns == []
    engine.adapters.add("policy@a1-0")
    await agent.ask()
    assert await sampled(served, created.session_id) == [([["a1-0", 0, 2]], ["policy@a1-0"])]


async def test_of_two_engines_the_one_that_has_the_adapter_is_asked(engine: FakeEngine, serve: Serve) -> None:
    async with FakeEngine(adapters={"policy@a1-0"}) as second:
        served = await serve(engine.url, second.url, adapters=True)
        await served.admin.release("a1-0", "policy@a1-0")
        agent, _ = await served.agent()
        await agent.ask()
        assert engine.sampled == [] and len(second.sampled) == 1


async def test_a_call_under_an_engine_that_is_started_again_is_sampled_by_the_adapter_of_then(engine: FakeEngine, serve: Serve) -> None:
    served = await served_by(engine, serve, "a1-3", retry=Retry(total_s=20.0, base_s=0.01))
    agent, created = await served.agent()
    engine.say("never said", delay_s=30.0)
    call = asyncio.create_task(agent.ask())
    await until(lambda: engine.active)
    await served.admin.hold("engine restart", 10.0)
    port = int(engine.url.rpartition(":")[2])
    await engine.stop()
    engine.adapters = {"policy@a1-4"}
    await engine.start(port)
    answer = await served.admin.release("a1-4", "policy@a1-4")
    assert answer["adapters_asked"] == ["policy@a1-3", "policy@a1-4"]  # the call's next try is still under its own
    await call
    assert asked(engine)[-2:] == ["policy@a1-3", "policy@a1-4"] and len(engine.sampled) == 1
    assert await sampled(served, created.session_id) == [([["a1-4", 0, 2]], ["policy@a1-4"])]


@pytest.mark.parametrize("capture", ["tokens", "chat"])
async def test_an_answer_of_another_model_is_refused(engine: FakeEngine, serve: Serve, capture: str) -> None:
    """As of a server that samples its base model for every name."""
    served = await served_by(engine, serve, "a1-0", capture=capture)
    engine.answers_as = "policy"
    agent, created = await served.agent()
    status, answer = await agent.post(ASK)
    assert status == 502 and "was asked for adapter policy@a1-0 and answered as 'policy'" in answer["error"]["message"]
    assert (await served.admin.trace(created.session_id)).turns == []


async def test_demonstrations_are_scored_by_the_adapter(engine: FakeEngine, serve: Serve) -> None:
    served = await served_by(engine, serve, "a1-0")
    agent, created = await served.agent(script=[{"content": "done"}])
    await agent.ask()
    assert asked(engine) == ["policy@a1-0"]
    assert (await served.admin.trace(created.session_id)).turns[0].metadata["weight_versions"][0][0] == "a1-0"


def test_tokens_over_a_change_of_the_model_under_the_adapter_have_no_version() -> None:
    ids, logps = np.arange(4, dtype=np.int32), np.full(4, -1.0, dtype=np.float32)
    steady = Sample(ids, logps, "stop", None, (("default", 0, 4),), None)
    changed = Sample(ids, logps, "stop", None, (("default", 0, 1), ("b-1", 1, 4)), None)
    adapter = Adapter("policy@a1-0", "a1-0")
    assert sampled_by(steady, adapter).versions == (("a1-0", 0, 4),) and sampled_by(steady, None) is steady
    assert sampled_by(changed, adapter).versions is None
