"""What says nothing to a model and changes from call to call: which blocks go, which stay, and that a history stays what it was."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine
from proxy_helpers import BASH, Served, assert_engine_saw_the_rows
from pydantic import ValidationError

from capture_proxy.dialects import anthropic
from capture_proxy.spec import Template
from capture_proxy.volatile import RULES, without

BILLING = "x-anthropic-billing-header: cc_version=2.1.332.d60; cc_entrypoint=cli;"
USAGE = "<system-reminder>\nToken usage: 35000/200000; 165000 remaining\n</system-reminder>"
BUDGET = "<system-reminder>\nUSD budget: $1.25/$5; $3.75 remaining\n</system-reminder>"
BLOCKS = {"claude_billing_line": ("system", BILLING), "claude_token_usage": ("user", USAGE), "claude_usd_budget": ("user", BUDGET)}


def call_of(system: list[str], *messages: dict[str, Any]) -> Any:
    body = {"system": [text(line) for line in system], "messages": list(messages), "max_tokens": 9}
    return anthropic.parse(body, {})


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(*words: str) -> dict[str, Any]:
    return {"role": "user", "content": [text(each) for each in words]}


def test_every_rule_has_its_block_here() -> None:
    assert [rule.name for rule in RULES] == list(BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_goes_where_it_stands_with_others_and_only_in_its_role(name: str) -> None:
    role, block = BLOCKS[name]
    system, said = (["Be brief.", block], ["Go."]) if role == "system" else (["Be brief."], ["Go.", block])
    call = without(call_of(system, user(*said)))
    assert [message["content"] for message in call.messages] == ["Be brief.", "Go."] and call.left_out == (name,)
    whole = call_of(system, user(*said))
    assert without(whole, keep=[name]) == whole
    elsewhere = call_of(["Be brief."], user("Go.", block)) if role == "system" else call_of(["Be brief.", block], user("Go."))
    assert without(elsewhere) == elsewhere


@pytest.mark.parametrize("near", [USAGE + " Be quick.", USAGE.replace("remaining", "left"), "Token usage: 1/2; 1 remaining"])
def test_a_block_that_says_more_stays(near: str) -> None:
    assert without(call_of([], user("Go.", near))).messages == [{"role": "user", "content": [text("Go."), text(near)]}]


def test_a_message_of_nothing_else_goes_after_a_tool_result_and_stays_where_it_opens_the_turn() -> None:
    asked = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "bash", "input": {}}]}
    done = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "a.txt"}, text(USAGE)]}
    roles = [message["role"] for message in without(call_of([], user("Go."), asked, done)).messages]
    assert roles == ["user", "assistant", "tool"]
    for opening in ([user(USAGE)], [user("Go."), {"role": "assistant", "content": "Yes."}, user(USAGE)]):
        assert without(call_of([], *opening)).messages[-1] == {"role": "user", "content": USAGE}


async def test_a_budget_that_changes_its_words_in_every_request_breaks_no_row(served: Served, engine: FakeEngine) -> None:
    created = await served.session()
    engine.say('<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>')
    tools = [{"name": "bash", "input_schema": BASH["function"]["parameters"]}]
    headers = {"x-api-key": created.api_key}
    history: list[dict[str, Any]] = [user("List the files.")]
    for left in (900, 700):
        reminder = USAGE.replace("165000", str(left))
        shown = [*history[:-1], {**history[-1], "content": [*history[-1]["content"], text(reminder)]}]
        body = {"model": "m", "max_tokens": 50, "messages": shown, "tools": tools}
        async with served.http.post(served.url + "/v1/messages", json=body, headers=headers) as response:
            assert response.status == 200
            answer = (await response.json())["content"]
        call = next((block for block in answer if block["type"] == "tool_use"), None)
        result = [{"type": "tool_result", "tool_use_id": call["id"], "content": "a.txt"}] if call else [text("go on")]
        history = [*history, {"role": "assistant", "content": answer}, {"role": "user", "content": result}]
    trace = await served.admin.trace(created.session_id)
    assert_engine_saw_the_rows(engine, trace)
    assert trace.turns[1].metadata["parent"] == trace.turns[0].node_id
    assert [turn.metadata["left_out"] for turn in trace.turns] == [["claude_token_usage"]] * 2
    assert "Token usage" not in engine.tokenizer.decode(trace.turns[1].prompt_token_ids.tolist())


def test_an_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="there is no rule 'claude_bill'; rules: claude_billing_line"):
        Template(keep_volatile=["claude_bill"])
