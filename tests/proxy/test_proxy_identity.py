"""Which call is which: retries, repeats, forks, concurrent calls, side calls. Named by the case each test keeps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engine import FakeEngine
from proxy_helpers import BASH, USER, Agent, Served, assert_engine_saw_the_rows, total

from capture_proxy.trace import TrainingTrace

RETRY = {"x-stainless-retry-count": "1"}


def body(messages: list[dict[str, Any]] = USER, tools: bool = True, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": messages, **({"tools": [BASH]} if tools else {}), **fields}


def shape(trace: TrainingTrace) -> list[tuple[Any, ...]]:
    """What must not depend on the order in which calls finished."""
    order = {turn.node_id: i for i, turn in enumerate(trace.turns)}
    return [
        (
            turn.prompt_token_ids.tolist(),
            turn.completion_token_ids.tolist(),
            turn.loss_mask.tolist(),
            order.get(turn.metadata["parent"]),
            turn.metadata["branch"],
            turn.metadata["role"],
            turn.metadata["mask_reason"],
        )
        for turn in trace.turns
    ]


async def two_overlapping(served: Served, engine: FakeEngine, delays: tuple[float, float]) -> TrainingTrace:
    agent, created = await served.agent()
    engine.say("main", delay_s=delays[0])
    engine.say("sub", delay_s=delays[1])
    first = asyncio.create_task(agent.post(body()))
    while not engine.active:
        await asyncio.sleep(0.005)
    sub = [{"role": "system", "content": "You are a sub-agent."}, USER[1]]
    second = asyncio.create_task(agent.post(body(sub)))
    answers = [(await task)[1]["choices"][0]["message"] for task in (first, second)]
    engine.say("next")
    await agent.post(body([*USER, answers[0], {"role": "user", "content": "go"}]))
    engine.say("sub next")
    await agent.post(body([*sub, answers[1], {"role": "user", "content": "go"}]))
    return await served.admin.trace(created.session_id)


async def test_c13_result_does_not_depend_on_finishing_order(served: Served, engine: FakeEngine) -> None:
    slow_first = await two_overlapping(served, engine, (0.3, 0.05))
    fast_first = await two_overlapping(served, engine, (0.05, 0.3))
    assert shape(slow_first) == shape(fast_first)
    assert [row[3] for row in shape(slow_first)] == [None, None, 0, 1]
    assert [row[5] for row in shape(slow_first)] == ["agent", "subagent", "agent", "subagent"]


async def test_c20_c30_identical_concurrent_requests_are_two_turns(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    for text in ("one", "two"):
        engine.say(text, delay_s=0.1)
    answers = await asyncio.gather(agent.post(body()), agent.post(body()))
    messages = {answer[1]["choices"][0]["message"]["content"]: answer[1]["choices"][0]["message"] for answer in answers}
    assert set(messages) == {"one", "two"}
    for text in ("two", "one"):
        await agent.post(body([*USER, messages[text], {"role": "user", "content": "go"}]))
    trace = await served.admin.trace(created.session_id)
    by_answer = {turn.response["choices"][0]["message"]["content"]: turn for turn in trace.turns[:2]}
    assert trace.turns[2].metadata["parent"] == by_answer["two"].node_id
    assert trace.turns[3].metadata["parent"] == by_answer["one"].node_id
    assert all(turn.completion_mask.all() for turn in trace.turns)
    assert_engine_saw_the_rows(engine, trace)


async def test_minted_id_tells_equal_calls_apart(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    same = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    engine.say(same, style="chars")
    engine.say(same, style="words")
    first = (await agent.post(body()))[1]["choices"][0]["message"]
    second = (await agent.post(body()))[1]["choices"][0]["message"]
    for answer in (first, second):
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "x"}
        await agent.post(body([*USER, answer, result]))
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["parent"] for turn in trace.turns[2:]] == [trace.turns[0].node_id, trace.turns[1].node_id]


async def test_marked_retry_excludes_the_answer_that_was_not_used(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    await agent.post(body())
    status, answer = await agent.post(body(), headers=RETRY)
    assert status == 200
    await agent.post(body([*USER, answer["choices"][0]["message"], {"role": "user", "content": "go"}]))
    trace = await served.admin.trace(created.session_id)
    # The answers read the same, so the later, delivered one is continued; the earlier is the retry.
    assert [turn.metadata["mask_reason"] for turn in trace.turns] == ["retry", None, None]
    assert not trace.turns[0].loss_mask.any()
    status_now = await served.admin.status(created.session_id)
    assert status_now["calls_by_reason"] == {"retry": 1, "trained": 2}
    assert status_now["calls_seen"] == 3


async def test_c18_c28_unmarked_repeat_is_a_new_sample_and_both_train(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("one")
    engine.say("two")
    await agent.post(body())
    _, second = await agent.post(body())
    assert second["choices"][0]["message"]["content"] == "two"
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["mask_reason"] for turn in trace.turns] == [None, None]
    assert [turn.metadata["branch"] for turn in trace.turns] == [0, 1]


async def test_c24_a_single_answer_of_a_sub_agent_is_not_taken_for_a_retry(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    await agent.ask()
    base = agent.messages
    await agent.post(body([*base, {"role": "user", "content": "sub task"}]))
    await agent.ask({"role": "user", "content": "main goes on"})
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["mask_reason"] for turn in trace.turns] == [None, None, None]
    assert trace.turns[1].metadata["parent"] == trace.turns[2].metadata["parent"] == trace.turns[0].node_id
    assert [turn.metadata["branch"] for turn in trace.turns] == [0, 0, 1]


async def test_length_cut_answer_asked_again_is_discarded(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("a b c d e f g h")
    await agent.post(body(max_tokens=3))
    engine.say("a b c")
    await agent.post(body(max_tokens=64))
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["mask_reason"] for turn in trace.turns] == ["discarded", None]


async def test_c26_c18_dropped_first_answer_forks_at_the_root(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("malformed")
    await agent.post(body())
    # mini-swe-agent does not send the bad answer back but an error text of its own.
    await agent.post(body([*USER, {"role": "user", "content": "Format error."}]))
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["parent"] for turn in trace.turns] == [None, None]
    # The answer was sampled and shaped what came next: it trains, in a row of its own.
    assert [turn.metadata["mask_reason"] for turn in trace.turns] == [None, None]


async def test_c36_edited_history_forks_and_trains_each_token_once(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    await agent.ask()
    await agent.ask({"role": "user", "content": "two"})
    agent.messages[1] = {"role": "user", "content": "List the files. <reminder>"}
    await agent.ask({"role": "user", "content": "three"})
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["branch"] for turn in trace.turns] == [0, 0, 1]
    assert trace.turns[2].metadata["parent"] is None
    assert trace.turns[2].loss_mask.sum() == len(trace.turns[2].completion_token_ids)
    assert_engine_saw_the_rows(engine, trace)


async def test_c22_c01_two_lineages_interleaved(served: Served, engine: FakeEngine) -> None:
    main, created = await served.agent()
    sub = Agent(main.base, main.key, main.http, [{"role": "system", "content": "Other agent."}, {"role": "user", "content": "B"}])
    for agent in (main, sub, main, sub, main):
        engine.say("answer")
        await agent.ask({"role": "user", "content": "next"})
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["branch"] for turn in trace.turns] == [0, 1, 0, 1, 0]
    assert [turn.metadata["role"] for turn in trace.turns] == ["agent", "subagent", "agent", "subagent", "agent"]
    for child, parent in ((2, 0), (3, 1), (4, 2)):
        assert trace.turns[child].prompt_token_ids[: len(total(trace.turns[parent]))].tolist() == total(trace.turns[parent])


@pytest.mark.parametrize("title_first", [True, False])
async def test_c38_title_call_is_auxiliary_whichever_comes_first(served: Served, engine: FakeEngine, title_first: bool) -> None:
    agent, created = await served.agent()
    title = body([{"role": "system", "content": "You are a title generator."}, USER[1]], tools=False)
    for request in (title, body()) if title_first else (body(), title):
        await agent.post(request)
    trace = await served.admin.trace(created.session_id)
    roles = {turn.metadata["role"]: turn for turn in trace.turns}
    assert set(roles) == {"agent", "auxiliary"}
    assert roles["auxiliary"].metadata["mask_reason"] == "auxiliary"
    assert not roles["auxiliary"].loss_mask.any()
    assert roles["agent"].completion_mask.all()


async def test_text_only_agents_are_not_auxiliary(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    await agent.ask(tools=())
    await agent.ask({"role": "user", "content": "go"}, tools=())
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["role"] for turn in trace.turns] == ["agent", "agent"]


async def test_c02_compaction_is_a_branch_and_no_token_counts_twice(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    await agent.ask()
    await agent.ask({"role": "user", "content": "two"})
    agent.messages = [USER[0], {"role": "user", "content": "Summary: so far so good."}]
    await agent.ask()
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["branch"] for turn in trace.turns] == [0, 0, 1]
    assert trace.turns[2].metadata["role"] == "agent"
    assert sum(int(turn.loss_mask.sum()) for turn in trace.turns) == sum(len(turn.completion_token_ids) for turn in trace.turns)


async def test_tool_call_ids_are_unique_in_the_session(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent()
    seen: list[str] = []
    for _ in range(4):
        engine.say('<tool_call>{"name": "bash", "arguments": {}}</tool_call>' * 2)
        _, answer = await agent.post(body())
        seen += [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert len(set(seen)) == 8
    assert all(call_id.startswith("call_") for call_id in seen)


async def test_seeds_are_fresh_63_bit_and_recorded(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    for _ in range(8):
        await agent.post(body(seed=7))
    trace = await served.admin.trace(created.session_id)
    seeds = [turn.metadata["seed"] for turn in trace.turns]
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**63 for seed in seeds) and max(seeds) > 2**58
    assert [sent["sampling_params"]["seed"] for sent in engine.bodies("/generate")] == seeds


async def test_a_seeded_session_can_be_sampled_again(served: Served, engine: FakeEngine) -> None:
    for seed in (5, 5, 6):
        agent, _ = await served.agent(sampling={"seed": seed})
        for _ in range(3):
            await agent.post(body(seed=7))
    sent = [request["sampling_params"]["seed"] for request in engine.bodies("/generate")]
    assert sent[0:3] == sent[3:6] and len(set(sent)) == 6


async def test_c70_session_policy_overrides_the_agent_and_both_are_recorded(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent(sampling={"temperature": 0.8})
    asked = {"temperature": 0.1, "top_p": 0.9, "top_k": 5, "presence_penalty": 1.0, "logit_bias": {"1": -100}, "foo_extra": 1}
    await agent.post(body(**asked))
    sent = engine.bodies("/generate")[0]["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["presence_penalty"]) == (0.8, 1.0, 0, 0.0)
    assert "logit_bias" not in sent
    only = (await served.admin.trace(created.session_id)).turns[0]
    assert only.metadata["sampling"]["temperature"] == 0.8
    assert only.metadata["requested_sampling"] == {key: value for key, value in asked.items() if key != "foo_extra"}
    assert only.request["foo_extra"] == 1
