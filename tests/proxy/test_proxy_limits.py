"""Limits, seal, hold, keys and refusals: what the agent is told, and that every call is counted."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from fake_engine import FakeEngine
from proxy_helpers import ADMIN_KEY, BASH, USER, Serve, Served, until

from capture_proxy import limits
from capture_proxy.client import ProxyError

ASK: dict[str, Any] = {"model": "m", "messages": USER, "tools": [BASH]}


def is_full_context(status: int, answer: dict[str, Any]) -> bool:
    error = answer["error"]
    return status == 400 and error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"


async def test_client_max_tokens_is_clamped_to_the_window(served: Served, engine: FakeEngine) -> None:
    engine.max_model_len = 200
    agent, _ = await served.agent()
    status, answer = await agent.post({**ASK, "max_tokens": 128_000})
    assert status == 200
    sent = engine.bodies("/generate")[0]
    assert sent["sampling_params"]["max_tokens"] == 200 - len(sent["token_ids"])
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(sent["token_ids"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_smallest_limit_wins(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent(limits={"max_output_tokens_per_call": 50, "max_context_tokens": 1000})
    await agent.post({**ASK, "max_completion_tokens": 7})
    await agent.post({**ASK, "max_tokens": 70})
    assert [body["sampling_params"]["max_tokens"] for body in engine.bodies("/generate")] == [7, 50]


@pytest.mark.parametrize("limits", [{"max_context_tokens": 150}, {"max_conversation_tokens": 40}])
async def test_token_limits_clamp_first_and_then_refuse_before_sampling(served: Served, engine: FakeEngine, limits: dict[str, int]) -> None:
    agent, created = await served.agent(limits=limits)
    for _ in range(10):
        engine.say("some words of an answer")
        body = {**ASK, "messages": agent.messages}
        status, answer = await agent.post(body)
        if status != 200:
            break
        agent.messages = [*agent.messages, answer["choices"][0]["message"], {"role": "user", "content": "and then"}]
    assert is_full_context(status, answer)
    trace = await served.admin.trace(created.session_id)
    assert len(engine.bodies("/generate")) == len(trace.turns) >= 1
    first = len(trace.turns[0].prompt_token_ids)
    bound = limits.get("max_context_tokens") or first + limits["max_conversation_tokens"]
    assert all(len(turn.loss_mask) <= bound for turn in trace.turns)
    status_now = await served.admin.status(created.session_id)
    assert status_now["calls_by_reason"] == {"trained": len(trace.turns), "limit": 1}


async def test_max_calls(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent(limits={"max_calls": 3})
    engine.delay_s = 0.05
    answers = await asyncio.gather(*(agent.post(ASK) for _ in range(6)))
    assert sorted(status for status, _ in answers) == [200, 200, 200, 400, 400, 400]
    assert all(is_full_context(status, answer) for status, answer in answers if status != 200)
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"trained": 3, "limit": 3}


async def test_deadline(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent(limits={"deadline_s": 0.2})
    assert (await agent.post(ASK))[0] == 200
    await asyncio.sleep(0.25)
    assert is_full_context(*await agent.post(ASK))


async def test_max_concurrent_calls_wait_for_their_turn(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent(limits={"max_concurrent_calls": 2})
    engine.delay_s = 0.1
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, engine.active)
            await asyncio.sleep(0.005)

    watcher = asyncio.create_task(watch())
    answers = await asyncio.gather(*(agent.post(ASK) for _ in range(6)))
    watcher.cancel()
    assert [status for status, _ in answers] == [200] * 6
    assert most == 2


async def test_admission_that_takes_too_long_is_429_with_retry_after(engine: FakeEngine, serve: Serve) -> None:
    served = await serve(engine.url, admission_wait_s=0.1)
    agent, _ = await served.agent(limits={"max_concurrent_calls": 1})
    engine.say("slow", delay_s=1.0)
    first = asyncio.create_task(agent.post(ASK))
    await until(lambda: engine.active == 1)
    async with served.http.post(agent.base + "/chat/completions", json=ASK, headers={"Authorization": f"Bearer {agent.key}"}) as response:
        assert response.status == 429
        assert 0 < int(response.headers["Retry-After"]) <= 60
    assert (await first)[0] == 200


async def test_calls_per_minute_beyond_the_limit_are_429_until_the_oldest_is_a_minute_old(
    served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, created = await served.agent(limits={"max_calls_per_minute": 2})
    other, _ = await served.agent()
    now = 1000.0
    monkeypatch.setattr(limits, "monotonic", lambda: now)
    url, headers = agent.base + "/chat/completions", {"Authorization": f"Bearer {agent.key}"}

    async def ask() -> tuple[int, str | None]:
        async with served.http.post(url, json={**ASK, "stream": True}, headers=headers) as response:
            await response.read()
            return response.status, response.headers.get("Retry-After")

    assert (await ask())[0] == 200
    now += 10.5
    assert (await ask())[0] == 200
    assert await ask() == (429, "50")  # 49.5 s are left
    now += 49.4
    assert await ask() == (429, "1")
    assert (await other.post(ASK))[0] == 200
    now += 0.2
    assert (await ask())[0] == 200
    assert await ask() == (429, "11")
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"trained": 3, "limit": 3}


async def test_counts_of_tokens_are_calls_of_the_minute_too(served: Served, engine: FakeEngine) -> None:
    created = await served.session(limits={"max_calls_per_minute": 1})
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    for status in (200, 429):
        async with served.http.post(
            served.url + "/v1/messages/count_tokens", json=body, headers={"x-api-key": created.api_key}
        ) as response:
            assert response.status == status
            assert ("Retry-After" in response.headers) is (status == 429)


async def test_a_session_that_holds_all_its_bytes_has_a_full_context(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent(limits={"max_bytes": 200_000})
    for n in range(20):
        body = {**ASK, "messages": [*agent.messages, {"role": "user", "content": f"{n} " + "x" * 20_000}]}
        status, answer = await agent.post(body)
        if status != 200:
            break
        agent.messages = [*body["messages"], answer["choices"][0]["message"]]
    assert is_full_context(status, answer) and "max_bytes" in answer["error"]["message"]
    # Each call adds its 20 kB to the log once, and the whole conversation is in flight once.
    assert 3 <= n <= 5
    assert served.proxy.store.path(created.session_id).stat().st_size < 200_000
    assert is_full_context(*await agent.post({**ASK, "messages": [{"role": "user", "content": "x" * 200_000}]}))
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"trained": n, "limit": 2}
    assert (await agent.post(ASK))[0] == 200  # what is small still fits
    other, _ = await served.agent()
    assert (await other.post({**ASK, "messages": [{"role": "user", "content": "x" * 200_000}]}))[0] == 200


# -- seal and late calls ----------------------------------------------------


async def test_counts_add_up_to_the_calls_seen(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent(limits={"max_calls": 2})
    await agent.post(ASK)
    await agent.post({"messages": "nonsense"})
    await agent.post({**ASK, "n": 2})
    engine.fault = "short"
    await agent.post(ASK)
    await agent.post(ASK)
    await served.admin.seal(created.session_id)
    await agent.post(ASK)
    status = await served.admin.status(created.session_id)
    assert status["calls_by_reason"] == {"trained": 1, "refused": 2, "token_count_mismatch": 1, "limit": 1, "late": 1}
    assert status["calls_seen"] == sum(status["calls_by_reason"].values()) == 6


# -- hold and release --------------------------------------------------------


# -- keys and refusals --------------------------------------------------------


@pytest.mark.parametrize("place", ["bearer", "x-api-key", "x-goog-api-key", "path"])
async def test_key_is_found_wherever_clients_put_it(served: Served, engine: FakeEngine, place: str) -> None:
    created = await served.session()
    headers = {"bearer": {"Authorization": f"Bearer {created.api_key}"}, "path": {"Authorization": "Bearer unused"}}.get(
        place, {place: created.api_key}
    )
    prefix = f"/s/{created.api_key}" if place == "path" else ""
    async with served.http.post(served.url + prefix + "/v1/chat/completions", json=ASK, headers=headers) as response:
        assert response.status == 200
    async with served.http.get(served.url + prefix + "/v1/models", headers=headers) as response:
        assert (await response.json())["data"][0]["id"] == "policy"


async def test_keys_are_random_and_only_their_hash_is_stored(served: Served, engine: FakeEngine) -> None:
    agents = [await served.agent() for _ in range(3)]
    keys = {created.api_key for _, created in agents}
    assert len(keys) == 3
    assert all(len(key) == 4 + 64 and key.startswith("hrl-") for key in keys)
    for agent, created in agents:
        await agent.ask()
        raw = served.proxy.store.path(created.session_id).read_bytes()
        assert created.api_key.encode() not in raw and ADMIN_KEY.encode() not in raw
        trace = (await served.admin.trace(created.session_id)).to_json()
        assert created.api_key not in trace


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/sessions"), ("GET", "/sessions/x"), ("POST", "/sessions/x/seal"), ("GET", "/sessions/x/trace"), ("DELETE", "/sessions/x"),
     ("POST", "/hold"), ("POST", "/release"), ("GET", "/metrics")],
)  # fmt: skip
async def test_admin_routes_need_the_admin_key(served: Served, engine: FakeEngine, method: str, path: str) -> None:
    created = await served.session()
    for key in ("wrong", created.api_key, ""):
        async with served.http.request(method, served.url + path, json={}, headers={"Authorization": f"Bearer {key}"}) as response:
            assert response.status == 401
    async with served.http.post(
        served.url + "/v1/chat/completions", json=ASK, headers={"Authorization": f"Bearer {ADMIN_KEY}"}
    ) as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("sampling.top_p", {"sampling": {"top_p": 0.9}}),
        ("sampling.temperature", {"sampling": {"temperature": -1}}),
        ("limits.max_calls", {"limits": {"max_calls": 0}}),
        ("limits.max_turns", {"limits": {"max_turns": 3}}),
        ("history", {"history": "all"}),
        ("script.0.tool_calls.0.name", {"script": [{"tool_calls": [{"arguments": {}}]}]}),
    ],
)
async def test_session_fields_that_are_not_honoured_are_refused_by_name(served: Served, field: str, spec: dict[str, Any]) -> None:
    with pytest.raises(ProxyError, match=field) as caught:
        await served.session(**spec)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ([], "object"),
        ({"messages": []}, "messages"),
        ({**ASK, "n": 4}, "n:"),
        (
            {**ASK, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}]},
            "data:image",
        ),
        ({**ASK, "tools": [{"type": "web_search"}]}, "web_search"),
        ({**ASK, "max_tokens": 0}, "max_tokens"),
        ({**ASK, "max_tokens": "many"}, "max_tokens"),
        ({**ASK, "tool_choice": "sometimes"}, "tool_choice"),
        ({**ASK, "stop": [1]}, "stop"),
        ({**ASK, "response_format": {"type": "xml"}}, "response_format"),
    ],
)
async def test_bad_requests_are_400_that_name_the_field(served: Served, engine: FakeEngine, body: Any, word: str) -> None:
    agent, _ = await served.agent()
    status, answer = await agent.post(body)
    assert status == 400
    assert word in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert engine.requests == []


async def test_body_that_is_not_json_is_400(served: Served) -> None:
    created = await served.session()
    headers = {"Authorization": f"Bearer {created.api_key}"}
    for raw in (b"{", b"\xff\xfe", b"[" * 100_000):
        async with served.http.post(served.url + "/v1/chat/completions", data=raw, headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_c12_big_bodies_pass_and_bigger_ones_are_413(engine: FakeEngine, serve: Serve) -> None:
    served = await serve(engine.url, body_limit=4 << 20)
    agent, _ = await served.agent()
    text = "x" * (3 << 20)
    engine.max_model_len = 1 << 30
    status, _ = await agent.post({**ASK, "messages": [{"role": "user", "content": text}]})
    assert status == 200
    status, answer = await agent.post({**ASK, "messages": [{"role": "user", "content": text * 2}]})
    assert status == 413
    assert answer["error"]["type"] == "invalid_request_error"


async def test_i14_a_compressed_bomb_is_refused_at_its_expanded_size(engine: FakeEngine, serve: Serve) -> None:
    served = await serve(engine.url, body_limit=1 << 20)
    created = await served.session()
    headers = {"Authorization": f"Bearer {created.api_key}", "Content-Encoding": "gzip", "Content-Type": "application/json"}
    good = gzip.compress(json.dumps(ASK).encode())
    async with served.http.post(served.url + "/v1/chat/completions", data=good, headers=headers) as response:
        assert response.status == 200
    bomb = gzip.compress(b" " * (200 << 20), compresslevel=1)
    async with served.http.post(served.url + "/v1/chat/completions", data=bomb, headers=headers) as response:
        assert response.status == 413


async def test_unknown_routes_are_404_json_and_no_engine_route_is_reachable(served: Served, engine: FakeEngine) -> None:
    created = await served.session()
    headers = {"Authorization": f"Bearer {created.api_key}"}
    for path in ("/pause", "/weight_info", "/inference/v1/generate", "/v1/chat/completions/render", "/tokenize", "/v1/completions", "/"):
        async with served.http.post(served.url + path, json={}, headers=headers) as response:
            assert response.status in (404, 405)
            assert "error" in await response.json()
    assert engine.requests == []


async def test_message_shapes_that_clients_send(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent()
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}],
        },
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "out"}], "extra": 1},
        {"role": "system", "content": "nudge"},
    ]
    tools = [{"type": "function", "function": {"name": "bare"}}]
    status, _ = await agent.post({"model": "claude", "messages": messages, "tools": tools, "context_management": {}, "store": False})
    assert status == 200
    sent = next(body["messages"] for body in engine.bodies("/render") if body["messages"][-1]["content"] == "nudge")
    assert [message["role"] for message in sent] == ["developer", "user", "assistant", "tool", "system"]
    assert sent[0]["content"] == "be brief"
    assert sent[2]["content"] is None
    assert sent[2]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls"}'


async def test_metrics_are_prometheus_text(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent()
    engine.say("odd text", style="chars")
    await agent.ask()
    await agent.ask({"role": "user", "content": "go"})
    async with served.http.get(served.url + "/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as response:
        text = await response.text()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['capture_proxy_calls_total{outcome="answered"}'] == "2"
    assert values["capture_proxy_spliced_turns_total"] == "1"
    assert values["capture_proxy_sessions_open"] == "1"
    assert values[f'capture_proxy_engine_up{{engine="{engine.url}"}}'] == "1"


async def test_a_session_out_of_calls_is_told_in_the_words_that_litellm_knows(served: Served) -> None:
    """litellm tells a full context by these words alone; without them stock mini-swe-agent asks on for minutes."""
    agent, _ = await served.agent(limits={"max_calls": 1})
    await agent.post(ASK)
    status, body = await agent.post(ASK)
    assert status == 400 and "this model's maximum context length is" in body["error"]["message"].lower()


async def test_a_side_call_that_comes_first_does_not_set_the_bound_of_the_conversation(served: Served, engine: FakeEngine) -> None:
    """A title or a quota call may be recorded before the agent's first turn; its short prompt is not the conversation's."""
    rule = {"name": "title", "role": "auxiliary", "system": "You name things"}
    agent, created = await served.agent(limits={"max_conversation_tokens": 20}, roles={"add": [rule]})
    title = [{"role": "system", "content": "You name things."}, {"role": "user", "content": "x"}]
    assert (await agent.post({"model": "m", "messages": title}))[0] == 200
    agent.messages = [agent.messages[0], {"role": "user", "content": "many words " * 50}]
    await agent.ask()
    assert (await agent.post({"model": "m", "messages": title}))[0] == 200, "nor does the conversation's bound count for a side call"
    trace = await served.admin.trace(created.session_id)
    first = len(trace.turns[1].prompt_token_ids)
    assert first > len(trace.turns[0].prompt_token_ids) + 20
    assert engine.bodies("/generate")[1]["sampling_params"]["max_tokens"] == 20


async def test_a_chat_answer_without_prompt_ids_counts_as_a_call(engine: FakeEngine, serve: Serve) -> None:
    served = await serve(engine.url, capture="chat")
    agent, _ = await served.agent()
    engine.fault = "no_prompt_ids"
    assert (await agent.post(ASK))[0] == 200
    async with served.http.get(served.url + "/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as response:
        assert 'calls_total{outcome="token_count_mismatch"} 1' in await response.text()
