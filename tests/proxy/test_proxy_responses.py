"""OpenAI Responses: what the vendor's package reads, token-exact turns as codex sends them, every kind of tool, refusals by name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from fake_engine import FakeEngine
from proxy_helpers import Served, assert_chain, assert_engine_saw_the_rows

from capture_proxy.dialects import responses as dialect
from capture_proxy.dialects.wire import BadRequest
from capture_proxy.graph import TurnGraph
from capture_proxy.messages import Reply, ToolCall
from capture_proxy.recall import expanded

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"type": "function", "name": "bash", "description": "Run a command", "parameters": PARAMETERS}
CALL = 'I look.<tool_call>{"name": "bash", "arguments": {"command":   "ls"}}</tool_call>'
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]}
ASK: dict[str, Any] = {"model": "m", "input": [USER], "tools": [BASH], "store": False}
NAMESPACE = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": PARAMETERS}]}
EVERY_KIND = [BASH, {"type": "custom", "name": "patch", "description": "Edit"}, {"type": "local_shell"}, NAMESPACE, {"type": "web_search"}]


@asynccontextmanager
async def client(served: Served, **spec: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, str]]:
    created = await served.session(**spec)
    async with openai.AsyncOpenAI(base_url=created.base_urls["openai"], api_key=created.api_key, max_retries=0) as api:
        yield api, created.session_id


async def test_the_vendors_accumulator_sees_the_same_as_the_plain_answer(served: Served, engine: FakeEngine) -> None:
    engine.say(CALL)
    engine.say(CALL)
    async with client(served) as (api, _):
        plain = await api.responses.create(**ASK)
        async with api.responses.stream(**ASK) as stream:
            kinds = [event.type async for event in stream]
            whole = await stream.get_final_response()
    for answer in (plain, whole):
        text, call = answer.output
        assert text.type == "message" and answer.output_text == "I look."
        assert call.type == "function_call" and json.loads(call.arguments) == {"command": "ls"}
        assert answer.status == "completed"
    assert whole.usage is not None and plain.usage is not None
    assert whole.usage.output_tokens == plain.usage.output_tokens > 0
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.done") == 2


async def test_a_tool_loop_of_echoed_items_is_one_row(served: Served, engine: FakeEngine) -> None:
    engine.say(CALL, style="chars")
    engine.say("Done.", style="chars")
    engine.say("Bye.")
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}
    async with client(served) as (api, session_id):
        ask = {**ASK, "input": [developer, USER]}
        one = await api.responses.create(**ask)
        items = [item.model_dump() for item in one.output]  # with the explicit nulls that a client sends back
        output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "a.txt"}
        history = [developer, USER, *items, output]
        two = await api.responses.create(**{**ask, "input": history})
        more = [*history, *(item.model_dump() for item in two.output), {"role": "user", "content": "And now?"}]
        await api.responses.create(**{**ask, "input": more})
    trace = await served.admin.trace(session_id)
    assert_engine_saw_the_rows(engine, trace)
    assert_chain(trace)
    assert [turn.metadata["spliced"] for turn in trace.turns] == [False, True, True]
    assert {turn.metadata["dialect"] for turn in trace.turns} == {"responses"}


async def test_a_cut_answer_is_incomplete_and_a_full_context_a_400(served: Served, engine: FakeEngine) -> None:
    engine.say("one two three four five")
    async with client(served) as (api, session_id):
        cut = await api.responses.create(**ASK, max_output_tokens=3)
        assert cut.status == "incomplete" and cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
        engine.max_model_len = 12
        with pytest.raises(openai.BadRequestError) as full:
            await api.responses.create(**ASK)
        assert full.value.code == "context_length_exceeded"
        await served.admin.seal(session_id)
        with pytest.raises(openai.NotFoundError) as closed:
            await api.responses.create(**ASK)
    assert closed.value.code == "model_not_found"


async def test_a_silent_engine_is_bridged_by_events(served: Served, engine: FakeEngine) -> None:
    engine.say("slow", delay_s=0.9)
    async with client(served) as (api, _):
        stream = await api.responses.create(**ASK, stream=True)
        kinds = [event.type async for event in stream]
    assert kinds.count("response.in_progress") >= 3 and kinds[-1] == "response.completed"


def test_every_kind_of_tool_is_a_function_to_the_model_and_its_own_kind_to_the_client() -> None:
    call = dialect.parse({"input": "x", "tools": EVERY_KIND}, {"thread-id": "t1"})
    assert [tool["function"]["name"] for tool in call.tools] == ["bash", "patch", "local_shell", "agents__spawn"]
    assert call.left_out == ("tool web_search",)
    assert call.agent_id == "t1"
    calls = (
        ToolCall("c1", "bash", '{"command":"ls"}'),
        ToolCall("c2", "patch", '{"input": "*** Begin\\n"}'),
        ToolCall("c3", "local_shell", '{"command": ["ls", "-l"], "timeout_ms": 5}'),
        ToolCall("c4", "agents__spawn", '{"command": "x"}'),
        ToolCall("c5", "patch", '{"input": '),
    )
    answer = Reply("Now.", "Hm", calls, "tool_calls", 9, 3)
    items = dialect.reply(answer, call, "k", 0)["output"]
    kinds = ["reasoning", "message", "function_call", "custom_tool_call", "local_shell_call", "function_call", "function_call"]
    assert [item["type"] for item in items] == kinds
    assert items[3]["input"] == "*** Begin\n"
    assert items[4]["action"]["command"] == ["ls", "-l"]
    assert (items[5]["name"], items[5]["namespace"]) == ("spawn", "agents")
    assert (items[6]["name"], items[6]["arguments"]) == ("patch", '{"input": ')  # cut: as it was sampled
    back = dialect.parse({"input": [USER, *items], "tools": EVERY_KIND}, {}).messages[1]
    sent = answer.message()
    assert (back["content"], back["reasoning"]) == (sent["content"], sent["reasoning"])
    for ours, theirs in zip(back["tool_calls"], sent["tool_calls"], strict=True):
        assert (ours["id"], ours["function"]["name"]) == (theirs["id"], theirs["function"]["name"])
        if theirs["id"] == "c5":
            assert ours["function"]["arguments"] == theirs["function"]["arguments"]
        else:
            assert json.loads(ours["function"]["arguments"]) == json.loads(theirs["function"]["arguments"])


def test_the_items_of_one_answer_are_one_message_and_of_two_are_two() -> None:
    def text(words: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": words}]}

    call = {"type": "function_call", "call_id": "a", "name": "bash", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}
    messages = dialect.parse({"instructions": "S", "input": [USER, thought, text("A"), call, output, text("B"), text("C")]}, {}).messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant", "assistant"]
    assert (messages[2]["content"], messages[2]["reasoning"], len(messages[2]["tool_calls"])) == ("A", "Hm", 1)
    assert [message["content"] for message in messages[3:]] == ["1", "B", "C"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": []}, "input: a string or a non-empty list"),
        ({"conversation": "c"}, "conversation: not served here"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\].content\[0\]: an image must be sent"),
        ({"prompt": {"id": "p"}}, "prompt: not served here"),
        ({"input": [{"type": "reasoning", "content": 1}]}, "content of a reasoning item"),
        ({"tools": [BASH, BASH]}, "two tools are called 'bash'"),
        ({"tools": [{"type": "teleport"}]}, r"tools\[0\]: a tool of type 'teleport'"),
        ({"tools": [{**NAMESPACE, "tools": [NAMESPACE]}]}, r"tools\[0\].tools\[0\]: a tool of type 'namespace'"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"max_output_tokens": "many"}, "max_output_tokens: must be a whole number"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, r"input\[0\]: a call needs a name"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        dialect.parse({**ASK, **change}, {})


def test_a_schema_for_the_answer_reaches_the_engine() -> None:
    given = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    expected = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    assert dialect.parse({**ASK, "text": {"format": given}}, {}).response_format == expected
    assert dialect.parse({**ASK, "text": {"verbosity": "low"}}, {}).response_format is None


async def test_a_client_that_refers_to_what_it_was_answered_is_one_row(served: Served, engine: FakeEngine) -> None:
    """By `previous_response_id`, and by the ids of items as the AI SDK does."""
    engine.say(CALL, style="chars")
    engine.say("Two files.", style="chars")
    engine.say("Bye.", style="chars")
    async with client(served) as (api, session_id):
        first = await api.responses.create(model="m", input=[USER], tools=[BASH])
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "a b"}
        second = await api.responses.create(model="m", input=[result], tools=[BASH], previous_response_id=first.id)
        told = [USER, *({"type": "item_reference", "id": item.id} for item in first.output), result]
        told += [{"type": "item_reference", "id": second.output[0].id}, {"role": "user", "content": "Thanks."}]
        await api.responses.create(model="m", input=told, tools=[BASH])
        trace = await served.admin.trace(session_id)
        assert_chain(trace)
        assert_engine_saw_the_rows(engine, trace)
        assert all(turn.metadata["spliced"] for turn in trace.turns[1:])
        assert trace.turns[1].request["input"] == [result], "what was sent is what is recorded"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "r"}, "previous_response_id: this session has no response 'r'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]: no answer of this session has an item 'x'"),
    ],
)
async def test_an_unknown_reference_is_refused_by_name(served: Served, fields: dict[str, Any], words: str) -> None:
    async with client(served) as (api, _):
        with pytest.raises(openai.BadRequestError, match=words):
            await api.responses.create(**{**ASK, **fields})


async def test_another_sessions_answers_are_not_recalled(served: Served, engine: FakeEngine) -> None:
    async with client(served) as (api, _), client(served) as (other, _):
        first = await api.responses.create(**ASK)
        with pytest.raises(openai.BadRequestError, match="this session has no response"):
            await other.responses.create(**{**ASK, "previous_response_id": first.id})


def test_a_long_chain_of_previous_responses_is_recalled_whole() -> None:
    """Each names the one before, far more of them than Python calls functions within functions."""
    graph, answered = TurnGraph(), None
    for number in range(1500):
        body = {"input": f"question {number}", "previous_response_id": answered}
        answered = f"resp_{number}"
        answer = {"id": answered, "output": [{"type": "message", "id": f"m{number}", "role": "assistant", "content": []}]}
        turn: Any = SimpleNamespace(response=answer, meta={"dialect": "responses"}, request={"set": body}, base=None)
        graph.turns[f"n{number}"] = turn
    whole = expanded({"input": "last", "previous_response_id": answered}, graph)["input"]
    assert [item["content"] for item in whole if item["role"] == "user"] == [*(f"question {n}" for n in range(1500)), "last"]
    assert [item["id"] for item in whole if item["role"] == "assistant"] == [f"m{n}" for n in range(1500)]
