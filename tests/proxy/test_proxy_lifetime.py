"""How calls and sessions end, and how long they may take: seals, deletes, holds, deadlines, and clients slow to send or to read."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from fake_engine import FakeEngine
from proxy_helpers import BASH, USER, Agent, Serve, Served, until
from wires import WIRES, Wire

from capture_proxy.client import CreatedSession, ProxyError

ASK: dict[str, Any] = {"model": "m", "messages": USER, "tools": [BASH]}


async def by_hand(served: Served, created: CreatedSession, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """A connection whose reader takes little at once, and the bytes of a request, for tests that send or read them in parts."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]), limit=1024)
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {created.api_key}\r\nContent-Length: {len(raw)}\r\n\r\n"
    return reader, writer, head.encode() + raw


def is_gone(status: int, answer: dict[str, Any]) -> bool:
    return status == 404 and answer["error"]["type"] == "invalid_request_error" and answer["error"]["code"] == "model_not_found"


async def test_sealed_and_unknown_sessions_get_the_same_404_and_late_calls_count(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    await agent.ask()
    sealed = await served.admin.seal(created.session_id)
    assert sealed["state"] == "sealed"
    assert is_gone(*await agent.post(ASK))
    assert is_gone(*await agent.post({**ASK, "stream": True}))
    stranger = Agent(agent.base, "hrl-" + "0" * 64, agent.http)
    assert is_gone(*await stranger.post(ASK))
    status = await served.admin.status(created.session_id)
    assert status["late_calls"] == 2
    assert status["calls_seen"] == 3
    assert status["calls_by_reason"] == {"trained": 1, "late": 2}
    assert len(engine.bodies("/generate")) == 1


async def test_seal_lets_quick_calls_finish_and_cancels_slow_ones_as_late(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("quick", delay_s=0.1)
    engine.say("slow", delay_s=30)
    quick = asyncio.create_task(agent.post(ASK))
    await until(lambda: engine.active == 1)
    slow = asyncio.create_task(agent.post(ASK))
    await until(lambda: engine.active == 2)
    start = time.monotonic()
    status = await served.admin.seal(created.session_id, grace_s=0.5)
    assert time.monotonic() - start < 2
    assert status["calls_by_reason"] == {"trained": 1, "late": 1}
    assert status["in_flight"] == 0
    assert (await quick)[0] == 200
    assert is_gone(*await slow)
    await until(lambda: engine.active == 0, seconds=2.0)
    assert engine.cancelled == 1
    again = await served.admin.seal(created.session_id)
    assert again["calls_by_reason"] == status["calls_by_reason"]


async def test_delete_forgets_and_purge_removes_the_log(served: Served, engine: FakeEngine) -> None:
    for purge in (False, True):
        agent, created = await served.agent()
        await agent.ask()
        path = served.proxy.store.path(created.session_id)
        await served.admin.delete(created.session_id, purge=purge)
        assert is_gone(*await agent.post(ASK))
        with pytest.raises(ProxyError) as caught:
            await served.admin.status(created.session_id)
        assert caught.value.status == 404
        assert path.exists() is not purge


async def test_held_calls_wait_before_render_and_go_on_at_the_release(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent()
    await served.admin.hold("weights", timeout_s=30)
    calls = [asyncio.create_task(agent.post({**ASK, "stream": False})) for _ in range(3)]
    await until(lambda: served.proxy.ctx.gate.waiting == 3)
    assert engine.bodies("/render") == []
    health = await served.admin.health()
    assert health["held"] and health["calls_held"] == 3
    engine.version = "k3f9-12"
    await served.admin.release("k3f9-12")
    assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 3
    assert (await served.admin.health())["version"] == "k3f9-12"


async def test_e14_no_call_slips_into_an_update_is_lost_or_is_older_than_it_says(served: Served, engine: FakeEngine) -> None:
    """Eight agents ask without a pause through three updates. Between a drained hold and its release the engine gets no call; each is
    answered, by the weights that its turn names, which are no older than those in force when it was made."""
    engine.version, engine.delay_s = "k-0", 0.005
    known: dict[str, list[int]] = {}
    in_force, ended = 0, False

    async def ask() -> None:
        agent, created = await served.agent()
        mine = known[created.session_id] = []
        while not ended or not mine:
            mine.append(in_force)
            assert (await agent.post({**ASK, "stream": False}))[0] == 200

    asking = [asyncio.create_task(ask()) for _ in range(8)]
    for update in (1, 2, 3):
        before = len(engine.sampled)
        await until(lambda before=before: len(engine.sampled) >= before + 16)
        await served.admin.hold("weights", timeout_s=60)
        await until(lambda: served.proxy.ctx.gate.waiting == 8)  # those past the gate have ended
        asked = len(engine.bodies("/generate"))
        engine.version = "half"
        await asyncio.sleep(0.1)
        assert len(engine.bodies("/generate")) == asked
        engine.version = f"k-{update}"
        await served.admin.release(f"k-{update}")
        in_force = update
    ended = True
    await asyncio.gather(*asking)
    for session, made in known.items():
        turns = (await served.admin.trace(session)).turns
        sampled = [int(version.removeprefix("k-")) for turn in turns for version, _, _ in turn.metadata["weight_versions"]]
        assert len(sampled) == len(made) and all(a >= b for a, b in zip(sampled, made, strict=True))
        assert {0, 1, 2} <= set(sampled)


async def test_c14_held_too_long_is_503_with_a_long_retry_after(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    await served.admin.hold("weights", timeout_s=0.1)
    async with served.http.post(agent.base + "/chat/completions", json=ASK, headers={"Authorization": f"Bearer {agent.key}"}) as response:
        assert response.status == 503
        assert 5 <= int(response.headers["Retry-After"]) <= 60
    await served.admin.release()
    assert (await agent.post(ASK))[0] == 200
    assert (await served.admin.status(created.session_id))["calls_seen"] == 2


@pytest.mark.parametrize("wire", WIRES)
async def test_c14_a_held_stream_hears_that_it_is_held(served: Served, engine: FakeEngine, wire: type[Wire]) -> None:
    """The client's own patience must not run out while the weights change: something comes at every silence, then the answer."""
    created = await served.session()
    talk = wire("You are an agent.", True)
    talk.say("List the files.")
    path = talk.path.replace(":generate", ":streamGenerate") + "?alt=sse"
    await served.admin.hold("weights", timeout_s=30)
    headers = {"Authorization": f"Bearer {created.api_key}"}
    async with served.http.post(served.url + path, json={**talk.body(), "stream": True}, headers=headers) as response:
        assert response.status == 200
        for _ in range(3):
            assert await asyncio.wait_for(response.content.readany(), 2)
        assert engine.bodies("/render") == []
        await served.admin.release()
        assert b"ok" in await response.read()


async def test_a_slow_client_does_not_change_the_trace_after_the_seal(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    session = served.proxy.sessions[created.session_id]
    await agent.ask()
    # A client that stops reading: the answer is stored, but does not fit the socket's buffers.
    reader, writer, request = await by_hand(served, created, {**ASK, "stream": True})
    engine.say("x" * 20_000_000)  # one toy token
    writer.write(request)
    await until(lambda: len(session.graph.turns) == 2, seconds=20)
    await served.admin.seal(created.session_id, grace_s=0.1)
    before = await served.admin.trace(created.session_id)
    assert [turn.metadata["mask_reason"] for turn in before.turns] == [None, "late"]
    writer.close()
    await until(lambda: not session.running)
    assert await served.admin.trace(created.session_id) == before
    del reader


@pytest.mark.parametrize("deleted", [False, True])
async def test_what_has_not_arrived_when_a_seal_comes_is_not_sampled_after_it(served: Served, engine: FakeEngine, deleted: bool) -> None:
    _, created = await served.agent()
    session = served.proxy.sessions[created.session_id]
    reader, writer, request = await by_hand(served, created, ASK)
    writer.write(request[:-20])
    await until(lambda: len(session.running) == 1)
    start = time.monotonic()
    if deleted:
        await served.admin.delete(created.session_id)
    else:
        status = await served.admin.seal(created.session_id, grace_s=0.1)
        assert status["calls_by_reason"] == {"late": 1} and status["in_flight"] == 0
    assert time.monotonic() - start < 2
    writer.write(request[-20:])
    assert (await reader.readline()).startswith(b"HTTP/1.1 404")
    assert not session.running and engine.requests == []
    writer.close()


async def test_a_body_that_arrives_within_the_grace_is_answered(served: Served, engine: FakeEngine) -> None:
    _, created = await served.agent()
    session = served.proxy.sessions[created.session_id]
    reader, writer, request = await by_hand(served, created, ASK)
    writer.write(request[:-20])
    await until(lambda: len(session.running) == 1)
    sealing = asyncio.create_task(served.admin.seal(created.session_id, grace_s=10))
    await until(lambda: session.state == "sealed")
    writer.write(request[-20:])
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert (await sealing)["calls_by_reason"] == {"trained": 1}
    writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_takes_nothing_of_its_answer_is_not_waited_for(engine: FakeEngine, serve: Serve, stream: bool) -> None:
    served = await serve(engine.url, answer_timeout_s=0.5)
    _, created = await served.agent()
    session = served.proxy.sessions[created.session_id]
    reader, writer, request = await by_hand(served, created, {**ASK, "stream": stream})
    engine.say("x" * 20_000_000)  # one toy token
    writer.write(request)
    await until(lambda: len(session.graph.turns) == 1, seconds=20)
    await until(lambda: not session.running, seconds=10)
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"abandoned": 1}
    writer.close()
    del reader


async def test_a_plain_call_that_takes_too_long_is_503_before_its_client_gives_up(engine: FakeEngine, serve: Serve) -> None:
    served = await serve(engine.url, plain_answer_s=0.3)
    agent, created = await served.agent()
    engine.say("late", delay_s=30)
    async with served.http.post(agent.base + "/chat/completions", json=ASK, headers={"Authorization": f"Bearer {agent.key}"}) as response:
        assert response.status == 503 and response.headers["Retry-After"] == "5"
        assert "no answer within 0.3 s" in (await response.json())["error"]["message"]
    await until(lambda: engine.active == 0)
    assert engine.cancelled == 1
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"engine_failed": 1}
