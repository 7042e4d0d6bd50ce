"""Token-in token-out: a continued turn keeps its sampled ids, and where that cannot be shown the request becomes a branch with a cause."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import END, FakeEngine
from proxy_helpers import ADMIN_KEY, BASH, Serve, Served, assert_chain, assert_engine_saw_the_rows, tool_result, total

from capture_proxy.client import CreatedSession
from capture_proxy.records import trace_from_log
from capture_proxy.trace import TrainingTrace

ODD_CALL = '<tool_call>{"name":"bash",  "arguments":{"command":"ls\\u0020-la"}}</tool_call>'


async def trace_of(served: Served, created: CreatedSession) -> TrainingTrace:
    return await served.admin.trace(created.session_id)


async def test_odd_json_spacing_keeps_its_sampled_ids_over_three_turns(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say(ODD_CALL, style="chars")
    first = await agent.ask()
    # The client parses and re-serialises the arguments, as most do.
    call = agent.messages[-1]["tool_calls"][0]
    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    engine.say("Two  files.\n" + ODD_CALL, style="chars")
    second = await agent.ask(tool_result(first, "a\nb"))
    engine.say("done", style="words")
    await agent.ask(tool_result(second, "c"))
    trace = await trace_of(served, created)
    assert len(trace.turns) == 3
    assert_chain(trace)
    assert_engine_saw_the_rows(engine, trace)
    assert [turn.metadata["spliced"] for turn in trace.turns] == [False, True, True]
    # What the engine was given says, in text, exactly what the plain render says after the sampled part.
    text = engine.tokenizer.decode(trace.turns[2].prompt_token_ids.tolist())
    assert text.endswith("</tool_call><|im_end|>\n<|im_start|>tool\nc<|im_end|>\n<|im_start|>assistant\n")
    assert ODD_CALL in text


async def test_answer_tokenised_as_sampled_needs_one_render(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("first answer")
    await agent.ask()
    before = len(engine.bodies("/render"))
    engine.say("second answer")
    await agent.ask({"role": "user", "content": "more"})
    assert len(engine.bodies("/render")) == before + 1
    trace = await trace_of(served, created)
    assert_chain(trace)
    assert not trace.turns[1].metadata["spliced"]


@pytest.mark.parametrize("echo", ["  two\n\nlines ", "two\n\nlines", [{"type": "text", "text": "two\n\nlines"}]])
async def test_b09_trimmed_or_listed_text_is_the_same_answer(served: Served, engine: FakeEngine, echo: Any) -> None:
    agent, created = await served.agent()
    engine.say("  two\n\nlines ", style="chars")
    await agent.ask(tools=())
    agent.messages[-1] = {"role": "assistant", "content": echo}
    await agent.ask({"role": "user", "content": "go on"}, tools=())
    trace = await trace_of(served, created)
    assert_chain(trace)
    assert_engine_saw_the_rows(engine, trace)


async def test_b08_argument_strings_reach_the_engine_byte_for_byte(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent()
    engine.say(ODD_CALL)
    choice = await agent.ask()
    odd = '{"b" : 1,  "a":"\\u0026"}'
    agent.messages[-1]["tool_calls"][0]["function"]["arguments"] = odd
    await agent.ask(tool_result(choice, "x"))
    rendered = engine.bodies("/render")[-1]
    assert rendered["messages"][2]["tool_calls"][0]["function"]["arguments"] == odd
    assert rendered["tools"] == [BASH]


async def test_c48_changed_arguments_are_another_answer(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say(ODD_CALL, style="chars")
    choice = await agent.ask()
    agent.messages[-1]["tool_calls"][0]["function"]["arguments"] = '{"command": "rm"}'
    await agent.ask(tool_result(choice, "x"))
    first, second = (await trace_of(served, created)).turns
    # Longer than its would-be parent, but other tokens: a branch of its own, no mask laid over it.
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids)
    assert second.metadata["parent"] is None
    assert second.metadata["continues"] is None
    assert first.metadata["branch"] != second.metadata["branch"]


async def test_b10_c42_the_end_of_turn_is_trained_and_the_separator_after_it_is_context(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("a b", style="chars")
    await agent.ask()
    await agent.ask({"role": "user", "content": "go on"})
    first, second = (await trace_of(served, created)).turns
    assert first.completion_token_ids[-1] == END
    assert first.completion_mask[-1] == 1
    rest = second.prompt_token_ids[len(total(first)) :].tolist()
    assert engine.tokenizer.decode(rest) == "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("style", ["words", "chars"])
async def test_b10_an_end_of_turn_that_the_server_keeps_to_itself_is_context_and_said(
    served: Served, engine: FakeEngine, style: str
) -> None:
    agent, created = await served.agent()
    engine.say("all of it", style=style, end=None)
    choice = await agent.ask()
    assert choice["message"]["content"] == "all of it" and choice["finish_reason"] == "stop"
    await agent.ask({"role": "user", "content": "go on"})
    first, second = (await trace_of(served, created)).turns
    assert END not in first.completion_token_ids.tolist() and first.completion_mask.all()
    assert END in second.prompt_token_ids.tolist() and not second.loss_mask[: len(second.prompt_token_ids)].any()
    findings = (await served.admin.status(created.session_id))["findings"]
    assert findings[0]["code"] == "end_of_turn_not_sampled"


async def test_b10_another_control_token_ends_a_turn_too_and_is_trained(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("all of it", end=engine.tokenizer.id_of("<|endoftext|>"))
    choice = await agent.ask()
    assert choice["message"]["content"] == "all of it"
    (turn,) = (await trace_of(served, created)).turns
    assert engine.tokenizer.decode(turn.completion_token_ids.tolist()) == "all of it<|endoftext|>" and turn.completion_mask.all()
    assert (await served.admin.status(created.session_id))["findings"] == []


async def test_c52_cut_answer_is_closed_with_unsampled_tokens(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent(limits={"max_output_tokens_per_call": 5})
    engine.say("abc def ghi", style="chars")
    choice = await agent.ask()
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == "abc d"
    await agent.ask({"role": "user", "content": "go on"})
    first, second = (await trace_of(served, created)).turns
    assert END not in first.completion_token_ids.tolist()
    assert second.prompt_token_ids[len(total(first))] == END
    assert second.metadata["parent"] == first.node_id
    assert not second.loss_mask[: len(second.prompt_token_ids)].any()


async def test_b06_thinking_that_the_template_drops_starts_a_branch(served: Served, engine: FakeEngine) -> None:
    engine.drop_think = True
    agent, created = await served.agent()
    engine.say("<think>hm, hm</think>\nyes", style="chars")
    await agent.ask()
    await agent.ask({"role": "user", "content": "go on"})
    trace = await trace_of(served, created)
    first, second = trace.turns
    assert "hm" not in engine.tokenizer.decode(second.prompt_token_ids.tolist())
    assert second.metadata["parent"] is None
    assert second.metadata["continues"] == first.node_id
    assert second.metadata["fork_cause"] == "answer_shown_differently"
    assert first.completion_mask.all() and second.completion_mask.all()
    assert_engine_saw_the_rows(engine, trace)
    status = await served.admin.status(created.session_id)
    assert [finding["code"] for finding in status["findings"]] == ["fork"]


async def test_b06_thinking_that_the_template_never_shows_starts_a_branch(served: Served, engine: FakeEngine) -> None:
    engine.never_show_think = True
    agent, created = await served.agent()
    engine.say("<think>hm, hm</think>yes", style="chars")
    await agent.ask()
    await agent.ask({"role": "user", "content": "go on"})
    trace = await trace_of(served, created)
    assert trace.turns[1].metadata["fork_cause"] == "answer_shown_differently"
    assert trace.turns[1].metadata["parent"] is None
    assert "hm" not in engine.tokenizer.decode(trace.turns[1].prompt_token_ids.tolist())
    assert_engine_saw_the_rows(engine, trace)


async def test_think_block_that_a_client_moves_to_reasoning_is_the_same_answer(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("<think>hm</think>yes", style="chars")
    await agent.ask(tools=())
    agent.messages[-1] = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    await agent.ask({"role": "user", "content": "go on"}, tools=())
    trace = await trace_of(served, created)
    assert_chain(trace)
    assert_engine_saw_the_rows(engine, trace)


async def test_c44_an_answer_without_its_thinking_is_not_merged(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("<think>hm</think>yes")
    await agent.ask(tools=())
    agent.messages[-1] = {"role": "assistant", "content": "yes"}
    await agent.ask({"role": "user", "content": "go on"}, tools=())
    second = (await trace_of(served, created)).turns[1]
    assert second.metadata["parent"] is None


async def test_c46_several_tool_results_are_rendered_as_a_group(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say(ODD_CALL + ODD_CALL + ODD_CALL, style="chars")
    choice = await agent.ask()
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 3
    await agent.ask(*({"role": "tool", "tool_call_id": i, "content": i} for i in ids), {"role": "system", "content": "tail"})
    trace = await trace_of(served, created)
    assert_chain(trace)
    rest = engine.tokenizer.decode(trace.turns[1].prompt_token_ids[len(total(trace.turns[0])) :].tolist())
    assert engine.template({"messages": agent.messages[:-1], "tools": [BASH]}).endswith(rest)


async def test_c56_an_assistant_message_the_model_never_wrote_is_context_only(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("real", style="chars")
    await agent.ask()
    await agent.ask(
        {"role": "user", "content": "u"}, {"role": "assistant", "content": "synthetic preface"}, {"role": "user", "content": "v"}
    )
    trace = await trace_of(served, created)
    first, second = trace.turns
    assert second.metadata["parent"] == first.node_id
    assert "synthetic preface" in engine.tokenizer.decode(second.prompt_token_ids.tolist())
    assert sum(int(turn.completion_mask.sum()) for turn in trace.turns) == sum(len(turn.completion_token_ids) for turn in trace.turns)
    assert_engine_saw_the_rows(engine, trace)


async def test_stop_string_answers_are_not_spliced(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("visible STOP", style="chars", stop_reason="STOP")
    choice = await agent.ask(tools=(), stop=["STOP"])
    assert choice["message"]["content"] == "visible "
    await agent.ask({"role": "user", "content": "go on"}, tools=())
    second = (await trace_of(served, created)).turns[1]
    assert second.metadata["fork_cause"] == "ended_by_stop_string"
    assert "STOP" not in engine.tokenizer.decode(second.prompt_token_ids.tolist())


async def test_answer_that_ends_at_once_is_empty_and_continues(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say("")
    choice = await agent.ask()
    assert choice["message"]["content"] == ""
    await agent.ask({"role": "user", "content": "well?"})
    trace = await trace_of(served, created)
    assert trace.turns[0].completion_token_ids.tolist() == [END]
    assert_chain(trace)


async def test_trace_is_rebuilt_from_the_log_alone(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    for style in ("chars", "words", "chars"):
        engine.say("some answer", style=style)
        await agent.ask({"role": "user", "content": "next"})
    live = await trace_of(served, created)
    rebuilt = trace_from_log(served.proxy.store.path(created.session_id))
    assert rebuilt == live
    assert rebuilt.to_bytes() == live.to_bytes()


class Remarks(FakeEngine):
    """Its template remarks, after what follows an answer, that the answer was long."""

    def template(self, chat: dict[str, Any]) -> str:
        shown = super().template(chat)
        long = any(message["role"] == "assistant" and len(message.get("content") or "") > 6 for message in chat["messages"])
        return shown.replace("<|im_end|>\n<|im_start|>assistant\n", " (long before)<|im_end|>\n<|im_start|>assistant\n") if long else shown


@pytest.mark.parametrize(("said", "cause"), [("short", None), ("a long answer", "tail_rendered_by_context")])
async def test_kept_reasoning_is_not_joined_to_a_tail_that_depends_on_the_answer(serve: Serve, said: str, cause: str | None) -> None:
    async with Remarks(reads_thinking=True, never_show_think=True) as engine:
        served = await serve(engine.url)
        agent, created = await served.agent(history="keep_reasoning")
        engine.say(f"<think>hm</think>{said}", style="chars")
        await agent.ask(tools=())
        await agent.ask({"role": "user", "content": "more"}, tools=())
        trace = await trace_of(served, created)
        first, second = trace.turns
        assert_engine_saw_the_rows(engine, trace)
        assert second.metadata["fork_cause"] == cause
        if cause is None:
            assert second.prompt_token_ids[: len(total(first))].tolist() == total(first)
        else:
            plain = engine.template({"messages": second.request["messages"]})
            assert engine.tokenizer.decode(second.prompt_token_ids.tolist()) == plain


@pytest.mark.parametrize("change", ["answer", "before"])
async def test_a_turn_that_the_client_shows_edited_is_a_fork_that_is_told(served: Served, engine: FakeEngine, change: str) -> None:
    """The id of its tool call says which turn it is; the words say that it is not what it was."""
    agent, created = await served.agent()
    engine.say('I look.<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>')
    choice = await agent.ask()
    if change == "answer":
        agent.messages[-1] = {**agent.messages[-1], "content": "I looked."}
    else:
        agent.messages[1] = {"role": "user", "content": "List the folders."}
    await agent.ask(tool_result(choice, "a.txt"))
    first, second = (await trace_of(served, created)).turns
    assert (second.metadata["continues"], second.metadata["parent"]) == (None, None)
    assert (second.metadata["fork_cause"], second.metadata["edited"]) == (None, first.node_id)
    broken = second.metadata["prefix_broken_at"]
    assert second.prompt_token_ids[:broken].tolist() == total(first)[:broken]
    assert second.prompt_token_ids[broken] != total(first)[broken]
    async with served.http.get(served.url + "/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as response:
        values = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if not line.startswith("#"))
    assert values["capture_proxy_forked_turns_total"] == "1"
    assert values["capture_proxy_broken_prefix_tokens_total"] == str(len(total(first)) - broken)
    assert [finding["code"] for finding in (await served.admin.status(created.session_id))["findings"]] == ["history_edited"]


async def test_a_history_that_drops_a_turn_whole_is_no_edited_one(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    engine.say('<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>')
    await agent.ask()
    agent.messages = [*agent.messages[:-1], {"role": "user", "content": "Again."}]
    await agent.ask()
    trace = await trace_of(served, created)
    assert [turn.metadata["edited"] for turn in trace.turns] == [None, None]
