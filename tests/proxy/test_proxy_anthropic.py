"""Anthropic Messages: what the vendor's own package reads, token-exact turns as claude-code sends them, and every refusal by name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from fake_engine import FakeEngine
from proxy_helpers import Served, assert_chain, assert_engine_saw_the_rows

from capture_proxy.dialects import anthropic as dialect
from capture_proxy.dialects.wire import BadRequest
from capture_proxy.messages import Reply, ToolCall

BASH = {
    "name": "bash",
    "description": "Run a command",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
CALL = 'I look.<tool_call>{"name": "bash", "arguments": {"command":   "ls"}}</tool_call>'
ASK: dict[str, Any] = {"model": "m", "max_tokens": 512, "system": "Be brief.", "tools": [BASH]}
FIRST = {"role": "user", "content": "List the files."}


@asynccontextmanager
async def client(served: Served, **spec: Any) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, str]]:
    created = await served.session(**spec)
    async with anthropic.AsyncAnthropic(base_url=created.base_urls["anthropic"], api_key=created.api_key, max_retries=0) as api:
        yield api, created.session_id


def result(answer: Any, text: str) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": text}
    return {"role": "user", "content": [block]}


def echoed(answer: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}


async def test_the_vendors_accumulator_sees_the_same_as_the_plain_answer(served: Served, engine: FakeEngine) -> None:
    engine.say(CALL)
    engine.say(CALL)
    async with client(served) as (api, _):
        plain = await api.messages.create(**ASK, messages=[FIRST])
        async with api.messages.stream(**ASK, messages=[FIRST]) as stream:
            kinds = [event.type async for event in stream]
            whole = await stream.get_final_message()
    for answer in (plain, whole):
        text, call = answer.content
        assert (text.type, text.text) == ("text", "I look.")
        assert (call.type, call.name, call.input) == ("tool_use", "bash", {"command": "ls"})
        assert answer.stop_reason == "tool_use"
        assert answer.usage.output_tokens > 0
    assert whole.usage.input_tokens == plain.usage.input_tokens > 0
    assert whole.content[1].id != plain.content[1].id
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


async def test_a_tool_loop_in_the_spellings_of_a_real_client_is_one_row(served: Served, engine: FakeEngine) -> None:
    """The message that carries cache_control is a list now and a string later, the billing line changes, arguments are an object."""
    engine.say(CALL, style="chars")
    engine.say("Done.", style="chars")
    engine.say("Bye.")

    def system(billing: str) -> list[dict[str, Any]]:
        texts = [f"x-anthropic-billing-header: cc_version={billing};", "You are an agent.", "Be brief."]
        return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]

    marked = {"role": "user", "content": [{"type": "text", "text": "List the files.", "cache_control": {"type": "ephemeral"}}]}
    async with client(served) as (api, session_id):
        asked = {**ASK, "metadata": {"user_id": "u"}}
        one = await api.messages.create(**{**asked, "system": system("2.1.d60")}, messages=[marked])
        history = [FIRST, echoed(one), result(one, "a.txt")]
        two = await api.messages.create(**{**asked, "system": system("2.1.d61")}, messages=history)
        more = [*history, echoed(two), {"role": "system", "content": "The date changed."}, {"role": "user", "content": "And now?"}]
        await api.messages.create(**{**asked, "system": system("2.1.d61")}, messages=more)
    trace = await served.admin.trace(session_id)
    assert_engine_saw_the_rows(engine, trace)
    assert_chain(trace)
    assert [turn.metadata["dialect"] for turn in trace.turns] == ["anthropic"] * 3
    assert [turn.metadata["spliced"] for turn in trace.turns] == [False, True, True]
    shown = engine.tokenizer.decode(trace.turns[-1].prompt_token_ids.tolist())
    assert "billing" not in shown and "You are an agent." in shown
    assert shown.index("a.txt") < shown.index("The date changed.") < shown.index("And now?")


async def test_count_tokens_is_the_true_count_and_leaves_no_record(served: Served, engine: FakeEngine) -> None:
    async with client(served) as (api, session_id):
        fields = {key: value for key, value in ASK.items() if key != "max_tokens"}
        counted = await api.messages.count_tokens(**fields, messages=[FIRST])
        answer = await api.messages.create(**ASK, messages=[FIRST])
    assert counted.input_tokens == answer.usage.input_tokens
    status = await served.admin.status(session_id)
    assert status["calls_seen"] == status["turns"] == 1


async def test_a_closed_session_a_full_context_and_a_limit_of_calls_are_told_in_the_dialects_words(
    served: Served, engine: FakeEngine
) -> None:
    async with client(served, limits={"max_calls": 1}) as (api, session_id):
        await api.messages.create(**ASK, messages=[FIRST])
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*this conversation is over"):
            await api.messages.create(**ASK, messages=[FIRST])
        await served.admin.seal(session_id)
        with pytest.raises(anthropic.NotFoundError) as closed:
            await api.messages.create(**ASK, messages=[FIRST])
        with pytest.raises(anthropic.NotFoundError):
            await api.messages.count_tokens(model="m", messages=[FIRST])
    assert closed.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    engine.max_model_len = 12
    async with client(served) as (api, _):
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await api.messages.create(**ASK, messages=[FIRST])
    engine.max_model_len = 4096
    engine.statuses.extend([500] * 9)
    async with client(served) as (api, _):
        with pytest.raises(anthropic.APIStatusError) as failed:
            await api.messages.create(**ASK, messages=[FIRST])
    assert failed.value.status_code in (502, 503) and "invalid" not in failed.value.body["error"]["type"]  # type: ignore[index]


async def test_a_silent_engine_is_bridged_by_pings(served: Served, engine: FakeEngine) -> None:
    engine.say("slow", delay_s=0.9)
    created = await served.session()
    headers = {"x-api-key": created.api_key}
    body = {**ASK, "messages": [FIRST], "stream": True}
    async with served.http.post(created.base_urls["anthropic"] + "/v1/messages?beta=true", json=body, headers=headers) as response:
        lines = (await response.text()).splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    kinds = [json.loads(line.removeprefix("data: "))["type"] for line in lines if line.startswith("data: ")]
    assert names == kinds
    assert names.count("ping") >= 3 and names[0] == "message_start" and names[-1] == "message_stop"


def test_thinking_and_tool_input_come_back_as_they_went() -> None:
    answer = Reply("So.", "Hm\nhm", (ToolCall("t1", "bash", '{"a": [1'),), "tool_calls", 9, 3, cached_tokens=4)
    call = dialect.parse({"messages": [FIRST]}, {})
    wire = dialect.reply(answer, call, "msg_1", 0)
    assert wire["usage"] == {"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 3}
    assert wire["content"][2]["input"] == {"__unparsedToolInput": {"raw": '{"a": [1', "len": 8}}
    back = dialect.parse({"messages": [FIRST, {"role": "assistant", "content": wire["content"]}]}, {}).messages[1]
    assert back == answer.message()


def test_tools_that_a_search_found_are_named_to_the_model() -> None:
    found = [{"type": "tool_reference", "tool_name": "WebFetch"}, {"type": "text", "text": "one tool"}]
    message = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": found}]}
    call = dialect.parse({"model": "m", "max_tokens": 9, "messages": [message]}, {})
    assert call.messages == [
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "WebFetch"}, {"type": "text", "text": "one tool"}]}
    ]


def test_tool_results_stand_where_they_were() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "b"},
        {"type": "text", "text": "go on"},
        {"type": "text", "text": "please"},
    ]
    assert dialect.parse({"messages": [{"role": "user", "content": blocks}]}, {}).messages == [
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "go on"}, {"type": "text", "text": "please"}]},
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, "messages: a non-empty list"),
        ({"messages": [{"role": "tool", "content": ""}]}, r"messages\[0\]: an object whose role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            r"messages\[0\].content\[0\]: an image must be sent as base64",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\]: .* got 'bash_20250124'"),
        ({"tool_choice": []}, "tool_choice"),
        ({"tool_choice": {"type": {}}}, "tool_choice"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}]}]},
            "thinking after",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens: must be a whole number"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system: a block of type 'image'"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}, {"type": "text", "text": "c"}]}]},
            "text after a tool call",
        ),
    ],
)
def test_what_cannot_be_passed_on_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        dialect.parse({**ASK, "messages": [FIRST], **change}, {})


def test_tool_choice_and_stop_are_translated() -> None:
    def choice(value: Any) -> Any:
        return dialect.parse({"messages": [FIRST], "tool_choice": value}, {}).tool_choice

    assert [choice({"type": kind}) for kind in ("auto", "any", "none")] == ["auto", "required", "none"]
    assert choice({"type": "tool", "name": "bash"}) == {"type": "function", "function": {"name": "bash"}}
    call = dialect.parse({"messages": [FIRST]}, {})

    def reason(finish: str, stop: str | None = None) -> tuple[str, str | None]:
        wire = dialect.reply(Reply("x", None, (), finish, 1, 1, stop=stop), call, "m", 0)
        return wire["stop_reason"], wire["stop_sequence"]

    assert [reason("stop"), reason("length"), reason("tool_calls"), reason("stop", "END")] == [
        ("end_turn", None),
        ("max_tokens", None),
        ("tool_use", None),
        ("stop_sequence", "END"),
    ]
