"""Bodies and answers that are barely JSON: refused by name or passed on in a safe form, and never a call without an end."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine
from proxy_helpers import BASH, USER, Served

from capture_proxy import calls
from capture_proxy.dialects import anthropic, chat, gemini, responses
from capture_proxy.dialects.wire import BadRequest
from capture_proxy.messages import AgentCall, Reply, ToolCall

DEEP = "[" * 5000 + "]" * 5000


async def post(served: Served, path: str, text: str) -> tuple[int, Any, dict[str, Any]]:
    created = await served.session()
    headers = {"x-api-key": created.api_key, "Content-Type": "application/json"}
    async with served.http.post(served.url + path, data=text, headers=headers) as response:
        answer = await response.json()
    return response.status, answer, await served.admin.status(created.session_id)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e400", DEEP])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1beta/models/a:b:generateContent"])
async def test_what_no_client_could_read_back_is_refused(served: Served, engine: FakeEngine, path: str, value: str) -> None:
    status, answer, counts = await post(served, path, f'{{"metadata": {value}}}')
    assert status == 400 and "not JSON" in answer["error"]["message"]
    assert counts["in_flight"] == 0 and counts["calls_by_reason"] == {"refused": 1}
    assert engine.requests == []


async def test_arguments_that_nest_without_end_are_only_text(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": "[" * 5000}}
    agent.messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": ""}]
    await agent.post({"model": "m", "messages": agent.messages, "tools": [BASH]})
    counts = await served.admin.status(created.session_id)
    assert counts["in_flight"] == 0 and sum(counts["calls_by_reason"].values()) == 1


async def test_a_fault_of_ours_is_told_and_recorded(served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(calls, "_turn", broken)
    agent, created = await served.agent()
    status, answer = await agent.post({"model": "m", "messages": USER})
    assert status == 502 and "internal error" in answer["error"]["message"]
    counts = await served.admin.status(created.session_id)
    assert counts["in_flight"] == 0 and counts["calls_by_reason"] == {"engine_failed": 1}


async def test_a_body_that_a_parser_stumbles_over_is_refused_and_recorded(
    served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(anthropic, "parse", broken)
    status, answer, counts = await post(served, "/v1/messages", "{}")
    assert status == 400 and "cannot be read (ZeroDivisionError)" in answer["error"]["message"]
    assert counts["in_flight"] == 0 and counts["calls_by_reason"] == {"refused": 1}
    assert (await post(served, "/v1/messages/count_tokens", "{}"))[0] == 400


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": [1', "not json", "[1]", "[" * 5000])
def test_sampled_arguments_that_are_no_object_are_never_shown_as_one(arguments: str) -> None:
    answer = Reply(None, None, (ToolCall("c", "bash", arguments),), "tool_calls", 1, 1)
    call = AgentCall("anthropic", "m", [{"role": "user", "content": "x"}], [])
    wrapped = {"__unparsedToolInput": {"raw": arguments, "len": len(arguments)}}
    assert anthropic.reply(answer, call, "r", 0)["content"][0]["input"] == wrapped
    streamed = b"".join(anthropic.stream_body(answer, call, "r", 0)).decode()
    assert "__unparsedToolInput" in streamed and "tool_use" in streamed
    assert gemini.reply(answer, call, "r", 0)["candidates"][0]["finishReason"] == "MALFORMED_FUNCTION_CALL"
    (item,) = responses.reply(answer, call, "r", 0)["output"]
    assert (item["type"], item["arguments"]) == ("function_call", arguments)


def test_no_arguments_are_an_empty_object() -> None:
    answer = Reply(None, None, (ToolCall("c", "bash", ""),), "tool_calls", 1, 1)
    call = AgentCall("gemini", "m", [{"role": "user", "content": "x"}], [])
    assert anthropic.reply(answer, call, "r", 0)["content"][0]["input"] == {}
    assert gemini.reply(answer, call, "r", 0)["candidates"][0]["content"]["parts"][0]["functionCall"]["args"] == {}


async def test_a_choice_without_tools_does_not_reach_the_engine(served: Served, engine: FakeEngine) -> None:
    """As codex compacts: no tools, and its usual choice."""
    status, _, _ = await post(served, "/v1/responses", '{"input": "Summarise.", "tools": [], "tool_choice": "auto"}')
    assert status == 200
    assert all("tool_choice" not in body for body in engine.bodies("/render"))


def test_gemini_reads_both_spellings_of_a_field() -> None:
    schema = {"type": "OBJECT", "properties": {"snake_case": {"type": "STRING"}}}
    call = {"function_call": {"name": "f", "args": {"snake_case": 1}}}
    body = {
        "system_instruction": {"parts": [{"text": "S"}]},
        "contents": [{"parts": [{"text": "x"}]}, {"role": "model", "parts": [call]}],
        "generation_config": {"max_output_tokens": 5},
        "tools": [{"function_declarations": [{"name": "f", "parameters": schema}]}],
    }
    parsed = gemini.parse({"generateContentRequest": body}, {})
    assert [message["role"] for message in parsed.messages] == ["system", "user", "assistant"]
    assert parsed.max_tokens == 5 and '"snake_case": 1' in parsed.messages[2]["tool_calls"][0]["function"]["arguments"]
    assert list(parsed.tools[0]["function"]["parameters"]["properties"]) == ["snake_case"]


def test_tools_that_a_server_runs_are_left_out_whatever_their_date() -> None:
    claude = anthropic.parse({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web_search_20250305", "name": "w"}]}, {})
    assert claude.tools == [] and claude.left_out == ("tool web_search_20250305",)
    assert responses.parse({"input": "x", "tools": [{"type": "web_search_2025_08_26"}]}, {}).left_out == ("tool web_search_2025_08_26",)


def test_chat_tool_calls_must_be_a_list() -> None:
    with pytest.raises(BadRequest, match=r"messages\[0\].tool_calls: must be a list"):
        chat.parse({"messages": [{"role": "assistant", "tool_calls": True}]}, {})


async def test_a_key_in_the_query_and_a_name_with_a_colon(served: Served, engine: FakeEngine) -> None:
    created = await served.session()
    url = f"{served.url}/v1beta/models/qwen:7b:generateContent?key={created.api_key}"
    async with served.http.post(url, json={"contents": [{"parts": [{"text": "x"}]}]}) as response:
        assert response.status == 200 and (await response.json())["modelVersion"] == "qwen:7b"
