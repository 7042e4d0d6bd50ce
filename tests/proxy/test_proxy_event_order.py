"""The events of a streamed answer, each dialect's by a small state machine of what its clients rely on, for any answer."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from capture_proxy.dialects import anthropic, chat, responses
from capture_proxy.dialects.wire import PIECE
from capture_proxy.messages import AgentCall, Reply, ToolCall, ToolForm

ARGUMENTS = st.one_of(
    st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=2).map(lambda value: json.dumps(value, ensure_ascii=False)),
    st.just(json.dumps({"text": "ab" * PIECE})),
    st.just('{"cut": "of'),
)
TEXT = st.one_of(st.none(), st.text(max_size=8).filter(bool), st.just("long " * PIECE))
NAMES = st.sampled_from(["bash", "edit", "patch"])


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    calls = draw(st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3))
    tools = tuple(ToolCall(f"call_{n}", name, arguments) for n, (name, arguments) in enumerate(calls))
    finish = "tool_calls" if tools else draw(st.sampled_from(["stop", "length"]))
    return Reply(draw(TEXT), draw(TEXT), tools, finish, 10, 5)


def asked(dialect: str) -> AgentCall:
    forms = {"patch": ToolForm("custom", "patch"), "bash": ToolForm("function", "bash"), "edit": ToolForm("function", "edit", "files")}
    return AgentCall(dialect, "m", [], [], stream=True, include_usage=True, tool_forms=forms if dialect == "responses" else {})


def parsed(raw: bytes) -> list[dict[str, Any]]:
    """The data of each event; every one is one line, and a named event's name is its type."""
    out = []
    for block in raw.decode().split("\n\n"):
        lines = block.splitlines() if block else []
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        if data and data[0] != "[DONE]":
            out.append(json.loads(data[0]))
            names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
            assert names in ([], [out[-1].get("type")])
    return out


def streamed(dialect: Any, reply: Reply) -> list[dict[str, Any]]:
    call = asked(dialect.NAME)
    return parsed(b"".join([dialect.stream_head(call, "r1", 7), dialect.noop(call, "r1", 7), *dialect.stream_body(reply, call, "r1", 7)]))


@given(replies())
def test_a05_chat_deltas_of_a_call_stand_together_under_its_index(reply: Reply) -> None:
    calls: dict[int, dict[str, str]] = {}
    order: list[int] = []
    for event in streamed(chat, reply):
        for choice in event["choices"]:
            for delta in choice["delta"].get("tool_calls", []):
                index = delta["index"]
                if index not in calls:
                    assert delta["id"] and delta["function"]["name"], "a call begins with its id and name"
                    calls[index] = {"id": delta["id"], "name": delta["function"]["name"], "arguments": ""}
                    order.append(index)
                else:
                    assert "id" not in delta and index == order[-1], "a call's pieces follow its beginning"
                calls[index]["arguments"] += delta["function"].get("arguments", "")
    assert order == list(range(len(reply.tool_calls)))
    assert [calls[n] for n in order] == [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in reply.tool_calls]


@given(replies())
def test_a05_anthropic_blocks_have_one_start_their_deltas_and_one_stop(reply: Reply) -> None:
    open_block: int | None = None
    blocks: list[dict[str, Any]] = []
    kinds = [event["type"] for event in streamed(anthropic, reply)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    for event in streamed(anthropic, reply):
        match event["type"]:
            case "content_block_start":
                assert open_block is None and event["index"] == len(blocks)
                open_block = event["index"]
                blocks.append({**event["content_block"], "pieces": ""})
            case "content_block_delta":
                assert event["index"] == open_block
                delta = event["delta"]
                blocks[-1]["pieces"] += delta.get("partial_json") or delta.get("text") or delta.get("thinking") or ""
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
    assert open_block is None
    whole = anthropic.reply(reply, asked("anthropic"), "r1", 7)["content"]
    assert [block["type"] for block in blocks] == [block["type"] for block in whole]
    for block, expected in zip(blocks, whole, strict=True):
        match expected["type"]:
            case "tool_use":
                assert json.loads(block["pieces"] or "{}") == expected["input"] and block["id"] == expected["id"]
            case kind:
                assert block["pieces"] == expected[kind]


_DELTAS = {
    "response.output_text.delta": "response.output_text.done",
    "response.reasoning_text.delta": "response.reasoning_text.done",
    "response.function_call_arguments.delta": "response.function_call_arguments.done",
    "response.custom_tool_call_input.delta": "response.custom_tool_call_input.done",
}
_WHOLE = {"response.output_text.done": "text", "response.reasoning_text.done": "text",
          "response.function_call_arguments.done": "arguments", "response.custom_tool_call_input.done": "input"}  # fmt: skip


@given(replies())
def test_a16_responses_events_live_in_order_and_name_one_item_alike(reply: Reply) -> None:
    events = streamed(responses, reply)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] == ("response.incomplete" if reply.finish_reason == "length" else "response.completed")
    done: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    part = pieces = None
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert item is None and event["output_index"] == len(done)
            item, pieces = event["item"], ""
            continue
        assert item is not None, f"{kind} before its item was added"
        assert event.get("item_id", item["id"]) == item["id"] and event["output_index"] == len(done)
        if kind == "response.content_part.added":
            assert part is None
            part = event["part"]
        elif kind in _DELTAS:
            assert kind != "response.output_text.delta" or part is not None, "text before its part"
            pieces = (pieces or "") + event["delta"]
        elif kind in _WHOLE:
            assert event[_WHOLE[kind]] == pieces, "what is done is what came in pieces"
        elif kind == "response.content_part.done":
            assert part is not None and event["part"]["text"] == pieces
            part = None
        else:
            assert kind == "response.output_item.done" and part is None
            assert event["item"]["id"] == item["id"] and event["item"].get("call_id") == item.get("call_id")
            done.append(event["item"])
            item = None
    assert item is None
    assert last["response"]["output"] == done == responses.reply(reply, asked("responses"), "r1", 7)["output"]


def test_a16_a_failure_ends_in_a_failed_event_and_never_in_a_completed_one() -> None:
    (event,) = parsed(responses.stream_error("the engine died"))
    assert event["type"] == "response.failed" and event["response"]["status"] == "failed"
    assert event["response"]["error"]["message"] == "the engine died"
