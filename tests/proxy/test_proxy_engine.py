"""What the engine may do wrong, and chat capture: nothing is padded, invented, followed or lost silently."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engine import FakeEngine
from proxy_helpers import BASH, USER, Agent, Serve, Served, assert_chain, total, until

from capture_proxy.upstream import Retry

ASK = {"model": "m", "messages": USER, "tools": [BASH]}
BAD_LOGPROBS = ["no_logprobs", "short", "doubled", "shuffled", "swapped", "nan", "null", "floor", "positive"]


@pytest.mark.parametrize("one_call", [False, True])
@pytest.mark.parametrize("fault", BAD_LOGPROBS)
async def test_b02_b03_b14_bad_logprobs_keep_the_turn_untrained(served: Served, engine: FakeEngine, fault: str, one_call: bool) -> None:
    engine.one_call = one_call
    agent, created = await served.agent()
    engine.fault = fault
    engine.say("ten tokens or so of an answer")
    await agent.ask()
    engine.fault = None
    engine.say("good")
    await agent.ask({"role": "user", "content": "go on"})
    assert [body.get("output_mode") for body in engine.bodies("/generate")] == ["derender" if one_call else None] * 2
    trace = await served.admin.trace(created.session_id)
    bad, good = trace.turns
    assert bad.metadata["mask_reason"] == "token_count_mismatch"
    assert len(bad.completion_token_ids) == len(bad.per_token_logps) == 0
    assert not bad.loss_mask.any()
    assert bad.metadata["problem"]
    # The ids are context for what follows: the next turn's prompt still holds exactly what the engine sampled.
    context = [*bad.prompt_token_ids.tolist(), *bad.metadata["untrained_token_ids"]]
    assert good.prompt_token_ids[: len(context)].tolist() == context
    assert good.metadata["parent"] == bad.node_id
    assert good.completion_mask.all()
    status = await served.admin.status(created.session_id)
    assert status["calls_by_reason"] == {"token_count_mismatch": 1, "trained": 1}
    assert status["findings"][0]["code"] == "token_count_mismatch"
    trace.to_json()


@pytest.mark.parametrize("one_call", [False, True])
@pytest.mark.parametrize("fault", ["no_ids", "bool_ids", "two_choices"])
async def test_answer_without_usable_ids_is_an_error_not_a_guess(served: Served, engine: FakeEngine, fault: str, one_call: bool) -> None:
    engine.one_call = one_call
    agent, created = await served.agent()
    engine.fault = fault
    status, answer = await agent.post(ASK)
    assert status == 502
    assert answer["error"]["type"] == "server_error"
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"engine_failed": 1}
    assert not (await served.admin.trace(created.session_id)).turns


async def test_b02_ten_good_logprobs_pass(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("one two three four five")
    await agent.ask()
    only = (await served.admin.trace(created.session_id)).turns[0]
    assert len(only.per_token_logps) == len(only.completion_token_ids) == 10
    assert only.completion_mask.all()
    assert only.metadata["weight_versions"] == [["default", 0, 10]]


@pytest.mark.parametrize("fault", ["no_versions", "bad_versions"])
async def test_tokens_of_unknown_version_are_unproven(served: Served, engine: FakeEngine, fault: str) -> None:
    agent, created = await served.agent()
    engine.fault = fault
    await agent.ask()
    only = (await served.admin.trace(created.session_id)).turns[0]
    assert only.metadata["mask_reason"] == "unproven"
    assert not only.loss_mask.any()


async def test_503_and_connection_errors_are_retried_within_bounds(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.statuses.extend([503, -1, 503, 500])
    await agent.ask()
    status = await served.admin.status(created.session_id)
    assert status["calls_by_reason"] == {"trained": 1}
    assert len(engine.bodies("/generate")) == 5


async def test_engine_that_stays_down_gives_503_with_retry_after(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    await agent.ask()
    engine.statuses.extend([503] * 1000)
    headers = {"Authorization": f"Bearer {agent.key}"}
    async with served.http.post(agent.base + "/chat/completions", json=ASK, headers=headers) as response:
        assert response.status == 503
        assert 0 < int(response.headers["Retry-After"]) <= 60
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"trained": 1, "engine_failed": 1}


async def test_i11_redirects_are_never_followed(served: Served, engine: FakeEngine) -> None:
    async with FakeEngine() as other:
        engine.redirect_to = other.url + "/inference/v1/generate"
        engine.statuses.append(302)
        agent, created = await served.agent()
        status, answer = await agent.post(ASK)
        assert status == 502
        assert "redirect" in answer["error"]["message"]
        assert other.requests == []
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"engine_failed": 1}


async def test_call_moves_to_the_next_engine_and_the_session_stays_there(engine: FakeEngine, serve: Serve) -> None:
    async with FakeEngine() as second:
        served = await serve(engine.url, second.url)
        agent, created = await served.agent()
        await agent.ask()
        assert len(engine.bodies("/generate")) == 1
        await engine.stop()
        await agent.ask({"role": "user", "content": "go on"})
        await agent.ask({"role": "user", "content": "and on"})
        assert len(second.bodies("/generate")) == 2
        trace = await served.admin.trace(created.session_id)
        assert [turn.metadata["engine"] for turn in trace.turns] == [engine.url, second.url, second.url]


async def test_sessions_are_spread_over_engines_and_stick(engine: FakeEngine, serve: Serve) -> None:
    async with FakeEngine() as second:
        served = await serve(engine.url, second.url)
        for _ in range(4):
            agent, _ = await served.agent()
            await agent.ask()
            await agent.ask({"role": "user", "content": "again"})
        assert len(engine.bodies("/generate")) == len(second.bodies("/generate")) == 4


async def test_a10_client_that_leaves_a_plain_call_cancels_the_engine(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("slow", delay_s=30)
    task = asyncio.create_task(agent.post(ASK))
    await until(lambda: engine.active == 1)
    task.cancel()
    await until(lambda: engine.active == 0, seconds=2.0)
    assert engine.cancelled == 1
    await until(lambda: not served.proxy.sessions[created.session_id].running)
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"abandoned": 1}
    assert not (await served.admin.trace(created.session_id)).turns


async def test_a09_200_clients_that_leave_free_every_engine_slot(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.delay_s = 30
    tasks = [asyncio.create_task(agent.post({**ASK, "stream": i % 2 == 0})) for i in range(200)]
    await until(lambda: engine.active == 200, seconds=20)
    for task in tasks:
        task.cancel()
    await until(lambda: engine.active == 0, seconds=2.0)
    await until(lambda: not served.proxy.sessions[created.session_id].running)
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"abandoned": 200}


async def test_malformed_calls_reach_the_agent_as_text(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent()
    broken = '<tool_call>{"name": "bash", "arguments": {"command": }}</tool_call>'
    engine.say(broken)
    choice = await agent.ask()
    assert choice["message"]["content"] == broken
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("constraint", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}])
async def test_grammar_forced_tokens_are_constrained(served: Served, engine: FakeEngine, constraint: dict[str, Any]) -> None:
    agent, created = await served.agent()
    status, _ = await agent.post({**ASK, **constraint})
    assert status == 200
    assert engine.bodies("/generate")[0]["sampling_params"]["structured_outputs"]
    only = (await served.admin.trace(created.session_id)).turns[0]
    assert only.metadata["mask_reason"] == "constrained"
    assert not only.loss_mask.any()


async def test_greedy_turns_are_not_trained(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent(sampling={"temperature": 0})
    await agent.ask()
    assert (await served.admin.trace(created.session_id)).turns[0].metadata["mask_reason"] == "greedy"


# -- chat capture -----------------------------------------------------------


async def chat_agent(engine: FakeEngine, serve: Serve, **settings: Any) -> tuple[Served, Agent, str]:
    engine.token_routes = False
    served = await serve(engine.url, **settings)
    agent, created = await served.agent()
    return served, agent, created.session_id


@pytest.mark.parametrize("capture", ["auto", "chat"])
async def test_chat_capture_records_ids_logprobs_and_chain(engine: FakeEngine, serve: Serve, capture: str) -> None:
    served, agent, session_id = await chat_agent(engine, serve, capture=capture)
    engine.say('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>')
    choice = await agent.ask()
    assert choice["finish_reason"] == "tool_calls"
    call_id = choice["message"]["tool_calls"][0]["id"]
    assert call_id.startswith("call_")
    await agent.ask({"role": "tool", "tool_call_id": call_id, "content": "a"})
    trace = await served.admin.trace(session_id)
    assert_chain(trace)
    assert all(turn.completion_mask.all() for turn in trace.turns)
    assert trace.turns[0].metadata["capture"] == "chat"
    assert trace.turns[0].metadata["weight_version_range"] == ["default", "default"]
    assert trace.turns[0].metadata["weight_versions"] == [["default", 0, len(trace.turns[0].completion_token_ids)]]
    sent = engine.bodies("/v1/chat/completions")[0]
    assert sent["return_token_ids"] and sent["logprobs"] and sent["temperature"] == 1.0 and sent["top_k"] == 0


async def test_chat_capture_retokenised_history_is_a_branch(engine: FakeEngine, serve: Serve) -> None:
    served, agent, session_id = await chat_agent(engine, serve)
    engine.say("odd spelling", style="chars")
    await agent.ask()
    await agent.ask({"role": "user", "content": "go on"})
    trace = await served.admin.trace(session_id)
    assert trace.turns[1].metadata["parent"] is None
    assert trace.turns[1].prompt_token_ids[: len(total(trace.turns[0]))].tolist() != total(trace.turns[0])
    assert all(turn.completion_mask.all() for turn in trace.turns)


@pytest.mark.parametrize("fault", BAD_LOGPROBS)
async def test_chat_capture_checks_logprobs_too(engine: FakeEngine, serve: Serve, fault: str) -> None:
    served, agent, session_id = await chat_agent(engine, serve)
    engine.fault = fault
    engine.say("several tokens here")
    await agent.ask()
    assert (await served.admin.status(session_id))["calls_by_reason"] == {"token_count_mismatch": 1}


async def test_chat_server_without_prompt_ids_is_counted_not_trained(engine: FakeEngine, serve: Serve) -> None:
    served, agent, session_id = await chat_agent(engine, serve)
    engine.fault = "no_prompt_ids"
    await agent.ask()
    status = await served.admin.status(session_id)
    assert status["calls_by_reason"] == {"token_count_mismatch": 1}
    assert status["calls_seen"] == 1 and status["turns"] == 0


async def test_chat_capture_version_change_during_the_call_is_unproven(engine: FakeEngine, serve: Serve) -> None:
    served, agent, session_id = await chat_agent(engine, serve)
    engine.say("slow", delay_s=0.2)
    task = asyncio.create_task(agent.ask())
    await until(lambda: engine.active == 1)
    engine.version = "k3-2"
    await task
    only = (await served.admin.trace(session_id)).turns[0]
    assert only.metadata["weight_version_range"] == ["default", "k3-2"]
    assert only.metadata["mask_reason"] == "unproven"


async def test_chat_capture_without_weight_info_uses_the_released_version(engine: FakeEngine, serve: Serve) -> None:
    engine.weight_info = False
    served, agent, session_id = await chat_agent(engine, serve)
    await served.admin.release("k3-7")
    await agent.ask()
    only = (await served.admin.trace(session_id)).turns[0]
    assert only.metadata["weight_versions"][0][0] == "k3-7"
    assert only.completion_mask.all()


async def test_tokens_capture_names_the_missing_flag(engine: FakeEngine, serve: Serve) -> None:
    _, agent, _ = await chat_agent(engine, serve, capture="tokens")
    status, answer = await agent.post(ASK)
    assert status == 502
    assert "--enable-scale-out" in answer["error"]["message"]


async def test_wrong_model_name_is_named(engine: FakeEngine, serve: Serve) -> None:
    engine.model = "other"
    served = await serve(engine.url)
    agent, _ = await served.agent()
    status, answer = await agent.post(ASK)
    assert status == 502
    assert "'policy'" in answer["error"]["message"] and "other" in answer["error"]["message"]


async def test_oracle_holds_with_faults_in_between(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    for i in range(6):
        engine.statuses.extend([503] if i % 2 else [])
        engine.say(f"answer number {i}", style="chars" if i % 3 else "words")
        await agent.ask({"role": "user", "content": f"u{i}"})
    trace = await served.admin.trace(created.session_id)
    assert_chain(trace)
    seen: list[list[int]] = []
    for body in engine.bodies("/generate"):
        if body["token_ids"] not in seen:
            seen.append(body["token_ids"])
    assert [turn.prompt_token_ids.tolist() for turn in trace.turns] == seen


async def test_a_call_under_an_engine_that_is_started_again_waits_for_the_policys_weights(serve: Serve, engine: FakeEngine) -> None:
    """The new engine answers as soon as it is up, with the weights of its model folder: nothing may be asked of it before the release."""
    served = await serve(engine.url, retry=Retry(total_s=20.0, base_s=0.01))
    agent, created = await served.agent()
    engine.version = "a-1"
    engine.say("never said", delay_s=30.0)
    call = asyncio.create_task(agent.ask())
    await until(lambda: engine.active)
    await served.admin.hold("engine restart", 10.0)
    port = int(engine.url.rpartition(":")[2])
    await engine.stop()
    engine.version = "default"
    await engine.start(port)
    engine.requests.clear()
    await asyncio.sleep(0.5)
    assert not call.done() and engine.requests == []
    engine.version = "a-1"
    await served.admin.release("a-1")
    assert (await call)["message"]["content"] == "ok"
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["weight_versions"][0][0] for turn in trace.turns] == ["a-1"]


async def test_a14_compressed_answers_of_an_engine_are_read_and_not_passed_on(served: Served, engine: FakeEngine) -> None:
    engine.gzip = True
    engine.statuses.extend([503, 503])
    agent, created = await served.agent()
    await agent.ask()
    engine.max_model_len = 5
    headers = {"Authorization": f"Bearer {agent.key}", "Accept-Encoding": "gzip"}
    async with served.http.post(agent.base + "/chat/completions", json=ASK, headers=headers) as response:
        assert response.status == 400 and "Content-Encoding" not in response.headers
        assert "maximum context length" in (await response.json())["error"]["message"]
    assert len((await served.admin.trace(created.session_id)).turns) == 1
