"""An engine that reads its own answers (vLLM 0.33): the same turns and answers with one request less, or none of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fake_engine import END, FakeEngine, logprob_of
from proxy_helpers import BASH, Agent, Served, assert_chain, assert_engine_saw_the_rows, tool_result, until

from capture_proxy import onecall
from capture_proxy.onecall import TRIALS

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(one_call=True) as fake:
        yield fake


def read_apart(engine: FakeEngine) -> int:
    """Answers that took a request of their own to be read."""
    return len(engine.bodies("/derender"))


async def answers(agent: Agent, engine: FakeEngine, texts: list[str]) -> list[str | None]:
    """What the agent is told, one question after the other."""
    told = []
    for text in texts:
        engine.say(text)
        told.append((await agent.ask({"role": "user", "content": "next"}))["message"]["content"])
    return told


async def trust(agent: Agent, engine: FakeEngine) -> int:
    """Answers until the engine's reading is trusted with text; how many requests have read answers until then."""
    await answers(agent, engine, ["word"] * TRIALS)
    return read_apart(engine)


async def test_answers_are_read_twice_at_first_and_then_where_they_are_sampled(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    texts = [f"answer {n}" for n in range(TRIALS + 3)]
    assert await answers(agent, engine, texts) == texts
    assert [body.get("output_mode") for body in engine.bodies("/generate")] == ["derender"] * len(texts)
    apart = read_apart(engine)
    engine.say("one more")
    await agent.ask({"role": "user", "content": "next"})
    assert read_apart(engine) == apart
    trace = await served.admin.trace(created.session_id)
    assert_engine_saw_the_rows(engine, trace)
    assert_chain(trace)
    for turn in trace.turns:
        assert turn.per_token_logps.tolist() == [logprob_of(i, n) for n, i in enumerate(turn.completion_token_ids.tolist())]
        assert turn.completion_mask.all() and turn.completion_token_ids[-1] == END


async def test_one_in_many_later_answers_is_looked_at_again(served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onecall, "AGAIN", 3)
    agent, _ = await served.agent()
    await trust(agent, engine)
    engine.misreads = True
    told = [(await answers(agent, engine, ["later"]))[0] for _ in range(4)]
    assert told == ["misread", "misread", "later", "later"]  # the third was looked at, and then the form was left
    assert [body.get("output_mode") for body in engine.bodies("/generate")[-2:]] == ["derender", None]


async def test_until_the_form_is_known_to_work_one_call_tries_it(served: Served, engine: FakeEngine) -> None:
    engine.names_ids, engine.delay_s = False, 0.1
    agents = [(await served.agent())[0] for _ in range(8)]
    await asyncio.gather(*(agent.ask() for agent in agents))
    forms = [body.get("output_mode") for body in engine.bodies("/generate")]
    assert forms.count("derender") == 1 and len(forms) == 9
    engine.names_ids = True


async def test_requests_whose_special_tokens_would_be_left_out_are_read_apart(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent()
    await trust(agent, engine)
    engine.say("so <|im_start|> it is")
    choice = await agent.ask({"role": "user", "content": "next"}, tools=())
    assert choice["message"]["content"] == "so <|im_start|> it is"
    assert "output_mode" not in engine.bodies("/generate")[-1]


async def test_an_answer_without_text_is_no_difference(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent()
    assert await answers(agent, engine, ["", "word"]) == ["", "word"]
    assert engine.bodies("/generate")[-1]["output_mode"] == "derender"


async def test_answers_with_calls_are_tried_by_themselves(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent()
    apart = await trust(agent, engine)
    more = []
    for _ in range(TRIALS + 2):
        engine.say(CALL)
        choice = await agent.ask({"role": "user", "content": "next"})
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
        agent.messages.append(tool_result(choice, "a.txt"))
        more.append(read_apart(engine) - apart)
    assert more[TRIALS - 1] > more[0] > 0 and more[TRIALS - 1 :] == [more[TRIALS - 1]] * 3


async def test_a_reading_that_differs_is_never_passed_on(served: Served, engine: FakeEngine) -> None:
    engine.misreads = True
    agent, created = await served.agent()
    texts = [f"answer {n}" for n in range(3)]
    assert await answers(agent, engine, texts) == texts
    assert [body.get("output_mode") for body in engine.bodies("/generate")] == ["derender", None, None]
    assert all(turn.completion_mask.all() for turn in (await served.admin.trace(created.session_id)).turns)


@pytest.mark.parametrize("fault", ["refuses_reading", "unnamed"])
async def test_an_engine_that_cannot_is_asked_the_other_way(
    served: Served, engine: FakeEngine, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine.names_ids, engine.refuses_reading = fault != "unnamed", fault == "refuses_reading"
    agent, created = await served.agent()
    if fault == "unnamed":
        engine.say("sampled, and nobody can say for sure as which ids")
    assert await answers(agent, engine, ["one", "two"]) == ["one", "two"]
    assert [body.get("output_mode") for body in engine.bodies("/generate")] == ["derender", None, None]
    assert ("--return-tokens-as-token-ids" in caplog.text) is (fault == "unnamed")
    trace = await served.admin.trace(created.session_id)
    assert len(trace.turns) == 2 and all(turn.completion_mask.all() for turn in trace.turns)
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"trained": 2}


async def test_a_request_that_is_wrong_in_itself_does_not_end_the_form(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent()
    for statuses in ([422, 422], [429]):
        engine.statuses.extend(statuses)
        assert (await agent.post({"model": "m", "messages": agent.messages, "tools": [BASH]}))[0] == 400
    await agent.ask()
    assert engine.bodies("/generate")[-1]["output_mode"] == "derender"


async def test_answers_that_a_stop_text_may_end_are_read_apart(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent()
    apart = await trust(agent, engine)
    engine.say("first part", stop_reason="part")
    choice = await agent.ask({"role": "user", "content": "next"}, stop=["part"])
    assert choice["message"]["content"] == "first "
    assert "output_mode" not in engine.bodies("/generate")[-1] and read_apart(engine) > apart


async def test_a_last_id_that_is_text_stays_in_the_answer(served: Served, engine: FakeEngine) -> None:
    """The engine leaves out the id at which it stopped, whatever it is."""
    agent, _ = await served.agent()
    await trust(agent, engine)
    engine.say("to be ", end=engine.tokenizer.id_of("continued"))
    assert (await agent.ask({"role": "user", "content": "next"}))["message"]["content"] == "to be continued"


async def test_an_answer_in_parts_is_read_whole(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    await trust(agent, engine)
    engine.say("alpha beta", finish="abort", delay_s=0.05)
    engine.say(" gamma")
    call = asyncio.create_task(agent.ask({"role": "user", "content": "next"}))
    await until(lambda: engine.active == 1)
    await served.admin.hold("weights", 5.0)
    await until(lambda: engine.active == 0)
    await served.admin.release("default")
    assert (await call)["message"]["content"] == "alpha beta gamma"
    assert [body.get("output_mode") for body in engine.bodies("/generate")[-2:]] == ["derender", None]
    assert len((await served.admin.trace(created.session_id)).turns[-1].metadata["parts"]) == 1
