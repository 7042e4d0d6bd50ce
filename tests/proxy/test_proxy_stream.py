"""Streaming: what the openai package accumulates, keep-alive, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from fake_engine import FakeEngine
from proxy_helpers import BASH, USER, Agent, Serve, Served, until

ASK: dict[str, Any] = {"model": "m", "messages": USER, "tools": [BASH], "stream": True}
CALLS = (
    'I look.\n<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    '\n<tool_call>{"name": "bash", "arguments": {"command": "pwd"}}</tool_call>'
)


async def events(agent: Agent, body: dict[str, Any]) -> AsyncIterator[str]:
    """The data lines of a streamed answer."""
    async with agent.http.post(agent.base + "/chat/completions", json=body, headers={"Authorization": f"Bearer {agent.key}"}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            if line.strip():
                assert line.startswith(b"data: "), line
                yield line[6:].decode().strip()


async def test_openai_accumulator_sees_the_same_as_the_plain_answer(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say(CALLS)
    engine.say(CALLS)
    async with openai.AsyncOpenAI(base_url=agent.base, api_key=agent.key, max_retries=0) as client:
        plain = await client.chat.completions.create(model="m", messages=USER, tools=[BASH])  # type: ignore[arg-type]
        async with client.chat.completions.stream(
            model="m",
            messages=USER,
            tools=[BASH],
            stream_options={"include_usage": True},  # type: ignore[arg-type]
        ) as stream:
            kinds = [event.type async for event in stream]
            whole = await stream.get_final_completion()
    ours, theirs = plain.choices[0], whole.choices[0]
    assert theirs.message.content == ours.message.content == "I look.\n"
    assert theirs.finish_reason == ours.finish_reason == "tool_calls"
    arguments = [[call.function.arguments for call in choice.message.tool_calls or []] for choice in (ours, theirs)]
    assert arguments[0] == arguments[1] == ['{"command": "ls"}', '{"command": "pwd"}']
    assert whole.usage is not None and plain.usage is not None
    assert whole.usage.completion_tokens == plain.usage.completion_tokens > 0
    assert kinds.count("tool_calls.function.arguments.done") == 2
    ids = {call.id for choice in (ours, theirs) for call in choice.message.tool_calls or []}
    assert len(ids) == 4
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["mask_reason"] for turn in trace.turns] == [None, None]


@pytest.mark.parametrize(("options", "expected"), [(None, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)])
async def test_a04_usage_chunk_only_when_asked(served: Served, engine: FakeEngine, options: Any, expected: int) -> None:
    agent, _ = await served.agent()
    body = {**ASK, **({"stream_options": options} if options is not None else {})}
    lines = [line async for line in events(agent, body)]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert sum("usage" in chunk for chunk in chunks) == expected
    assert sum(chunk["choices"] == [] for chunk in chunks) == expected
    if expected:
        assert chunks[-1]["usage"]["completion_tokens"] > 0
    finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert finishes[-1] == "stop" and set(finishes[:-1]) == {None}
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a02_long_answers_come_in_short_lines(served: Served, engine: FakeEngine) -> None:
    engine.max_model_len = 200_000
    agent, _ = await served.agent()
    text = "x" * 300_000
    engine.say(text)
    lines = [line async for line in events(agent, ASK)]
    assert max(map(len, lines)) < 20_000
    assert "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1]) == text


async def test_headers_come_at_once_and_noops_while_the_engine_works(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent()
    engine.say("slow", delay_s=1.0)
    loop = asyncio.get_running_loop()
    start = loop.time()
    seen: list[tuple[float, Any]] = []
    async for line in events(agent, ASK):
        seen.append((loop.time() - start, json.loads(line) if line != "[DONE]" else line))
    assert seen[0][0] < 0.3
    assert seen[0][1]["choices"][0]["delta"]["role"] == "assistant"
    noops = [
        at for at, chunk in seen if chunk != "[DONE]" and chunk["choices"][0]["delta"] == {} and not chunk["choices"][0]["finish_reason"]
    ]
    assert len(noops) >= 3
    gaps = [b - a for a, b in zip([at for at, _ in seen], [at for at, _ in seen][1:], strict=False)]
    assert max(gaps) < 0.5


async def test_terminal_event_comes_after_the_turn_is_stored(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    async for line in events(agent, ASK):
        stored = len(served.proxy.sessions[created.session_id].graph.turns)
        if line == "[DONE]" or json.loads(line)["choices"][0]["delta"].get("content"):
            assert stored == 1


async def test_c16_full_context_is_a_plain_400_even_for_streams(served: Served, engine: FakeEngine) -> None:
    engine.max_model_len = 20
    agent, _ = await served.agent()
    status, answer = await agent.post(ASK)
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"


async def test_failure_after_the_headers_resets_the_connection(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("slow", delay_s=0.3, finish="abort")
    engine.say("slow", delay_s=0.3, finish="abort")
    engine.say("slow", delay_s=0.3, finish="abort")
    lines: list[str] = []
    with pytest.raises(aiohttp.ClientPayloadError):
        async for line in events(agent, ASK):
            lines.append(line)
    # No error event and no end: clients were seen to give up at the one, and to take the other for the answer.
    assert lines and all("error" not in json.loads(line) for line in lines)
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"engine_failed": 1}


async def test_a09_client_that_leaves_a_stream_cancels_the_engine(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("slow", delay_s=30)
    stream = events(agent, ASK)
    await anext(stream)
    await until(lambda: engine.active == 1)
    await stream.aclose()
    await until(lambda: engine.active == 0, seconds=2.0)
    await until(lambda: not served.proxy.sessions[created.session_id].running)
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"abandoned": 1}


async def test_client_that_closes_at_the_terminal_event_has_its_answer(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    for _ in range(20):
        stream = events(agent, ASK)
        async for line in stream:
            if line == "[DONE]":
                break
        await stream.aclose()
    await until(lambda: not served.proxy.sessions[created.session_id].running)
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"trained": 20}


async def test_ghost_answer_to_a_client_that_left_is_abandoned(engine: FakeEngine, serve: Serve) -> None:
    served = await serve(engine.url)
    agent, created = await served.agent()
    session = served.proxy.sessions[created.session_id]
    record = session.record

    async def record_and_wait(call: Any, turn: Any) -> asyncio.Future[None]:
        # The client leaves between the commit and the first byte of the answer.
        await record(call, turn)
        return asyncio.ensure_future(asyncio.sleep(30))  # type: ignore[return-value]

    session.record = record_and_wait  # type: ignore[method-assign]
    task = asyncio.create_task(agent.post({**ASK, "stream": False}))
    await until(lambda: len(session.graph.turns) == 1)
    task.cancel()
    await until(lambda: not session.running)
    only = (await served.admin.trace(created.session_id)).turns[0]
    assert only.metadata["mask_reason"] == "abandoned"
    assert len(only.completion_token_ids) > 0 and not only.loss_mask.any()
