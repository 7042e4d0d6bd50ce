"""Gemini: what the vendor's own package reads, token-exact turns, schemas in both spellings, and every refusal by name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_engine import FakeEngine
from google import genai
from google.genai import errors, types
from proxy_helpers import Served, assert_chain, assert_engine_saw_the_rows

from capture_proxy.dialects import gemini as dialect
from capture_proxy.dialects.wire import BadRequest
from capture_proxy.messages import Reply, ToolCall

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = types.Tool(function_declarations=[types.FunctionDeclaration(name="bash", description="Run", parameters_json_schema=SCHEMA)])
CONFIG = types.GenerateContentConfig(
    system_instruction="Be brief.",
    tools=[TOOL],
    max_output_tokens=512,
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
)
CALL = 'I look.<tool_call>{"name": "bash", "arguments": {"command":   "ls"}}</tool_call>'
FIRST = types.Content(role="user", parts=[types.Part(text="List the files.")])
WIRE_FIRST = {"role": "user", "parts": [{"text": "List the files."}]}


@asynccontextmanager
async def client(served: Served, **spec: Any) -> AsyncIterator[tuple[Any, str]]:
    created = await served.session(**spec)
    api = genai.Client(api_key=created.api_key, vertexai=False, http_options=types.HttpOptions(base_url=created.base_urls["gemini"])).aio
    try:
        yield api, created.session_id
    finally:
        await api.aclose()


async def test_the_vendors_package_sees_the_same_streamed_and_plain(served: Served, engine: FakeEngine) -> None:
    engine.say(CALL)
    engine.say(CALL)
    async with client(served) as (api, _):
        plain = await api.models.generate_content(model="m", contents=[FIRST], config=CONFIG)
        chunks = [chunk async for chunk in await api.models.generate_content_stream(model="m", contents=[FIRST], config=CONFIG)]
    text = "".join(part.text or "" for chunk in chunks for part in chunk.candidates[0].content.parts)
    calls = [call for chunk in chunks for call in chunk.function_calls or []]
    assert plain.candidates[0].content.parts[0].text == text == "I look."
    assert [call.args for call in (plain.function_calls or []) + calls] == [{"command": "ls"}] * 2
    assert plain.candidates[0].finish_reason == chunks[-1].candidates[0].finish_reason == "STOP"
    assert plain.usage_metadata.candidates_token_count == chunks[-1].usage_metadata.candidates_token_count > 0
    assert all(chunk.candidates[0].finish_reason is None for chunk in chunks[:-1])


async def test_a_tool_loop_is_one_row(served: Served, engine: FakeEngine) -> None:
    engine.say(CALL, style="chars")
    engine.say("Done.", style="chars")
    engine.say("Bye.")
    async with client(served) as (api, session_id):
        one = await api.models.generate_content(model="m", contents=[FIRST], config=CONFIG)
        output = types.Part(function_response=types.FunctionResponse(name="bash", response={"output": "a.txt"}))
        history = [FIRST, one.candidates[0].content, types.Content(role="user", parts=[output])]
        two = await api.models.generate_content(model="m", contents=history, config=CONFIG)
        more = [*history, two.candidates[0].content, types.Content(role="user", parts=[types.Part(text="And now?")])]
        await api.models.generate_content(model="m", contents=more, config=CONFIG)
    trace = await served.admin.trace(session_id)
    assert_engine_saw_the_rows(engine, trace)
    assert_chain(trace)
    assert [turn.metadata["spliced"] for turn in trace.turns] == [False, True, True]
    assert trace.turns[0].request["model"] == "m" and trace.turns[0].request["stream"] is False


async def test_counting_a_full_context_and_a_closed_session(served: Served, engine: FakeEngine) -> None:
    async with client(served) as (api, session_id):
        answer = await api.models.generate_content(model="m", contents=[FIRST])
        counted = await api.models.count_tokens(model="m", contents=[FIRST])
        assert counted.total_tokens == answer.usage_metadata.prompt_token_count
        assert (await served.admin.status(session_id))["calls_seen"] == 1
        engine.max_model_len = 4
        with pytest.raises(errors.ClientError) as full:
            await api.models.generate_content(model="m", contents=[FIRST])
        assert (full.value.code, full.value.status) == (400, "INVALID_ARGUMENT")
        await served.admin.seal(session_id)
        with pytest.raises(errors.ClientError) as closed:
            await api.models.generate_content(model="m", contents=[FIRST])
        assert (closed.value.code, closed.value.status) == (404, "NOT_FOUND")


async def test_a_silent_engine_is_bridged_by_empty_parts_and_other_verbs_are_refused(served: Served, engine: FakeEngine) -> None:
    engine.say("slow", delay_s=0.9)
    created = await served.session()
    headers, url = {"x-goog-api-key": created.api_key}, created.base_urls["gemini"] + "/v1beta/models/m:"
    async with served.http.post(url + "streamGenerateContent?alt=sse", json={"contents": [WIRE_FIRST]}, headers=headers) as response:
        events = [json.loads(line.removeprefix("data: ")) for line in (await response.text()).split("\n\n") if line]
    empty = [event for event in events if event["candidates"][0]["content"]["parts"] == [{"text": ""}]]
    assert len(empty) >= 4 and events[-1]["candidates"][0]["finishReason"] == "STOP"
    for verb in ("streamGenerateContent", "embedContent"):
        async with served.http.post(url + verb, json={"contents": [WIRE_FIRST]}, headers=headers) as response:
            assert response.status == 404
            assert (await response.json())["error"]["status"] == "NOT_FOUND"


def test_thoughts_calls_and_results_come_back_as_they_went() -> None:
    calls = (ToolCall("c1", "bash", '{"command": "ls"}'), ToolCall("c2", "bash", '{"command": "pwd"}'))
    answer = Reply("So.", "Hm", calls, "tool_calls", 9, 3, cached_tokens=4)
    content = dialect.reply(answer, dialect.parse({"contents": [WIRE_FIRST]}, {}), "k", 0)["candidates"][0]["content"]
    results = [{"functionResponse": {"name": "bash", "response": {"output": text}}} for text in ("one", "two")]
    later = {"role": "user", "parts": [*results, {"text": "go on"}]}
    messages = dialect.parse({"contents": [WIRE_FIRST, content, later]}, {}).messages
    assert messages[1] == answer.message()
    assert messages[2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "user", "content": "go on"},
    ]


def test_arguments_that_are_no_object_end_the_answer_as_malformed() -> None:
    answer = Reply(None, None, (ToolCall("c1", "bash", '{"command": '),), "length", 9, 3)
    candidate = dialect.reply(answer, dialect.parse({"contents": [WIRE_FIRST]}, {}), "k", 0)["candidates"][0]
    assert candidate["finishReason"] == "MALFORMED_FUNCTION_CALL" and candidate["content"]["parts"] == []


def test_schemas_in_capitals_are_json_schema_to_the_model() -> None:
    declared = {"name": "f", "parameters": {"type": "OBJECT", "properties": {"type": {"type": "STRING"}, "n": {"type": "INTEGER"}}}}
    call = dialect.parse({"contents": [WIRE_FIRST], "tools": [{"functionDeclarations": [declared]}, {"googleSearch": {}}]}, {})
    expected = {"type": "object", "properties": {"type": {"type": "string"}, "n": {"type": "integer"}}}
    assert call.tools == [{"type": "function", "function": {"name": "f", "parameters": expected}}]
    assert call.left_out == ("tool googleSearch",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"contents": []}, "contents: a non-empty list"),
        ({"contents": [{"role": "user"}]}, r"contents\[0\]: an object with a list of parts"),
        ({"contents": [{"role": "tool", "parts": []}]}, r"contents\[0\].role"),
        ({"contents": [{"role": "user", "parts": [{"inlineData": {}}]}]}, r"contents\[0\].parts\[0\]: an image must be sent"),
        ({"tools": [{"teleport": {}}]}, r"tools\[0\]: a tool of kind 'teleport'"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOMETIMES"}}}, "functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["a", "b"]}}}, "allowedFunctionNames"),
        ({"toolConfig": {"functionCallingConfig": {"mode": []}}}, "functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": True}}}, "allowedFunctionNames"),
        ({"cachedContent": "c"}, "cachedContent"),
        ({"contents": [{"role": "user", "parts": [{"text": "a", "inlineData": {}}]}]}, "this one text and inlineData"),
        ({"contents": [{"role": "user", "parts": [{"functionResponse": {"name": "f", "parts": [{}]}}]}]}, "functionResponse.parts"),
        ({"contents": [{"role": "model", "parts": [{"text": "a"}, {"text": "b", "thought": True}]}]}, "a thought after text"),
        ({"generationConfig": {"candidateCount": 2}}, "candidateCount"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "maxOutputTokens"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "responseMimeType"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        dialect.parse({"contents": [WIRE_FIRST], **change}, {})
