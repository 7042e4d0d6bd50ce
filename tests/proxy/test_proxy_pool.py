"""Several engines: where a session's calls go when its engine dies, lags, comes back, or has other weights than the policy's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from fake_engine import FakeEngine
from proxy_helpers import ADMIN_KEY, USER, Agent, Serve, Served, assert_chain, until

from capture_proxy import pool
from capture_proxy.client import CreatedSession
from capture_proxy.upstream import Retry


@pytest.fixture
async def second() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as other:
        yield other


async def engines_of(served: Served, created: CreatedSession) -> list[str]:
    trace = await served.admin.trace(created.session_id)
    return [turn.metadata["engine"] for turn in trace.turns]


async def test_c86_an_engine_that_dies_in_a_call_is_left_within_seconds(engine: FakeEngine, second: FakeEngine, serve: Serve) -> None:
    """With the retry bounds of production: an engine alone is asked for a minute, one of two for two seconds."""
    served = await serve(engine.url, second.url, retry=Retry())
    agent, created = await served.agent()
    await agent.ask()
    engine.say("never said", delay_s=60)
    call = asyncio.create_task(agent.ask({"role": "user", "content": "go on"}))
    await until(lambda: engine.active == 1)
    start = time.monotonic()
    await engine.stop()
    await call
    assert time.monotonic() - start < 2 * pool.MOVE_AFTER_S + 2
    assert await engines_of(served, created) == [engine.url, second.url]
    assert_chain(await served.admin.trace(created.session_id))
    # What comes now does not knock at the dead one first.
    fresh, other = await served.agent()
    start = time.monotonic()
    await fresh.ask()
    assert time.monotonic() - start < pool.MOVE_AFTER_S
    assert await engines_of(served, other) == [second.url]


async def test_an_engine_that_comes_back_gets_the_next_sessions(
    engine: FakeEngine, second: FakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "COOL_DOWN_S", 0.3)
    served = await serve(engine.url, second.url)
    port = int(engine.url.rpartition(":")[2])
    await engine.stop()
    first = [await served.agent() for _ in range(4)]
    for agent, created in first:
        await agent.ask()
        assert await engines_of(served, created) == [second.url]
    await engine.start(port)
    await asyncio.sleep(0.4)
    later = [await served.agent() for _ in range(4)]
    for agent, created in later:
        await agent.ask()
        assert await engines_of(served, created) == [engine.url]
    await first[0][0].ask({"role": "user", "content": "go on"})
    assert await engines_of(served, first[0][1]) == [second.url] * 2  # it stays where its prefix is cached


async def test_all_engines_down_for_a_while_is_only_a_wait(engine: FakeEngine, second: FakeEngine, serve: Serve) -> None:
    served = await serve(engine.url, second.url, retry=Retry(total_s=20, base_s=0.01))
    agent, created = await served.agent()
    port = int(second.url.rpartition(":")[2])
    await engine.stop()
    await second.stop()
    call = asyncio.create_task(agent.ask())
    await asyncio.sleep(0.5)
    await second.start(port)
    await call
    assert await engines_of(served, created) == [second.url]


async def test_a_session_leaves_an_engine_that_lags_far_behind(engine: FakeEngine, second: FakeEngine, serve: Serve) -> None:
    served = await serve(engine.url, second.url)
    agent, created = await served.agent()
    await agent.ask()
    assert await engines_of(served, created) == [engine.url]
    engine.delay_s = 60  # hangs, and says it is healthy
    stuck = [asyncio.create_task(agent.post({"model": "m", "messages": USER})) for _ in range(pool.SLACK + 1)]
    await until(lambda: engine.active == pool.SLACK + 1)
    await agent.ask({"role": "user", "content": "go on"})
    assert await engines_of(served, created) == [engine.url, second.url]
    async with served.http.get(served.url + "/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as response:
        values = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if not line.startswith("#"))
    assert values["capture_proxy_engine_moves_total"] == "1"
    assert values[f'capture_proxy_engine_in_flight{{engine="{engine.url}"}}'] == str(pool.SLACK + 1)
    assert values[f'capture_proxy_engine_sessions{{engine="{second.url}"}}'] == "1"
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)


async def test_an_engine_with_other_weights_than_the_policys_is_not_asked(
    engine: FakeEngine, second: FakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started again beside one that goes on, it says `default` until control has synced it."""
    monkeypatch.setattr(pool, "COOL_DOWN_S", 0.0)
    served = await serve(engine.url, second.url, retry=Retry(total_s=2, base_s=0.01))
    engine.version, second.version = "default", "a-7"
    await served.admin.release("a-7")
    agents = [await served.agent() for _ in range(3)]
    for agent, created in agents:
        await agent.ask()
        assert await engines_of(served, created) == [second.url]
    assert engine.bodies("/generate") == [] and engine.bodies("/render") == []
    engine.version = "a-7"  # synced
    await served.admin.release("a-7")
    agent, created = await served.agent()
    await agent.ask()
    assert await engines_of(served, created) == [engine.url]
    second.version = "a-8"
    await served.admin.release("a-8")
    await agent.ask({"role": "user", "content": "go on"})
    assert await engines_of(served, created) == [engine.url, second.url]
    second.version = "a-9"
    await served.admin.release("a-10")
    status, answer = await agent.post({"model": "m", "messages": USER})
    assert status == 503 and "the policy is a-10" in answer["error"]["message"]


async def test_what_a_restarted_engine_samples_before_it_has_the_policy_is_not_used(engine: FakeEngine, serve: Serve) -> None:
    """Alone as well, and between two looks at several: the call waits, and is sampled by the policy once control has pushed it."""
    served = await serve(engine.url, retry=Retry(total_s=20, base_s=0.01))
    engine.version = "a-7"
    await served.admin.release("a-7")
    agent, created = await served.agent()
    await agent.ask()
    engine.version = "default"
    asked = len(engine.bodies("/generate"))
    call = asyncio.create_task(agent.ask({"role": "user", "content": "go on"}))
    await until(lambda: len(engine.bodies("/generate")) > asked)
    await asyncio.sleep(0.1)
    assert not call.done()
    engine.version = "a-7"
    await call
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["weight_versions"][0][0] for turn in trace.turns] == ["a-7", "a-7"]
    engine.version = "default"  # in a run that pushes nothing it is the policy
    await served.admin.release("default")
    await agent.ask({"role": "user", "content": "go on"})


async def test_c14_a_hold_is_heard_as_a_hold_whatever_the_number_of_engines(engine: FakeEngine, second: FakeEngine, serve: Serve) -> None:
    """Calls under way wait for the release; nobody is taken for dead, and the wait is not served once per engine."""
    served = await serve(engine.url, second.url)
    agent, created = await served.agent()
    engine.say("slow", delay_s=0.3)
    call = asyncio.create_task(agent.ask())
    await until(lambda: engine.active == 1)
    await served.admin.hold("weights", timeout_s=0.2)
    start = time.monotonic()
    status, answer = await Agent(agent.base, agent.key, agent.http).post({"model": "m", "messages": USER})
    assert status == 503 and "being updated" in answer["error"]["message"]
    await asyncio.gather(call, return_exceptions=True)
    assert time.monotonic() - start < 2
    await served.admin.release("default")
    assert not any(served.proxy.ctx.pool.is_down(index) for index in range(2))
    await agent.ask({"role": "user", "content": "go on"})
    assert set(await engines_of(served, created)) == {engine.url}
