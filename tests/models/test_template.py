"""The chat template with the real tokenizer: append-only, Hermes form, nothing invented.

Needs the converted model in the cache (`harness-rl models fetch smollm2-135m`, which `make test` does).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_rl.models import resolve_model

Message = dict[str, Any]

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
CANONICAL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))


def render(tokenizer: Any, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, prompt: bool = True) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt))


def call(arguments: Any, content: str | None = None) -> Message:
    function = {"name": "bash", "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def test_a_tool_call_renders_as_the_model_emits_it(tokenizer: Any) -> None:
    before = [{"role": "user", "content": "go"}]
    prompt = render(tokenizer, before, tools=[BASH])
    for arguments in ({"command": "ls"}, '{"command": "ls"}'):
        for content in (None, ""):
            after = render(tokenizer, [*before, call(arguments, content)], tools=[BASH], prompt=False)
            assert after == prompt + CANONICAL + "\n"


def test_text_before_a_call_keeps_one_line_break(tokenizer: Any) -> None:
    for content in ("I look.", "I look.\n"):
        text = render(tokenizer, [{"role": "user", "content": "go"}, call({"command": "ls"}, content)], prompt=False)
        assert "assistant\nI look.\n<tool_call>\n" in text


def test_two_calls_in_one_turn(tokenizer: Any) -> None:
    message = call({"command": "ls"})
    message["tool_calls"] = message["tool_calls"] * 2
    assert render(tokenizer, [message], prompt=False).count("</tool_call>\n<tool_call>") == 1


def test_no_system_message_is_invented(tokenizer: Any) -> None:
    assert render(tokenizer, [{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with_tools = render(tokenizer, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}], tools=[BASH])
    assert with_tools.startswith("<|im_start|>system\nBe brief.\n\nTools:\n") and with_tools.count("<|im_start|>system") == 1


def test_a_tool_is_one_json_line_and_the_section_is_short(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}]
    text = render(tokenizer, messages, tools=[BASH], prompt=False)
    line = next(line for line in text.splitlines() if line.startswith('{"name": "bash"'))
    assert json.loads(line) == {key: BASH["function"][key] for key in ("name", "description", "parameters")}
    extra = len(tokenizer.encode(text)) - len(tokenizer.encode(render(tokenizer, messages, prompt=False)))
    assert extra <= 95


def test_one_token_per_digit(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("20481")) == list("20481")


def test_turn_markers_are_single_tokens_and_the_end_of_a_turn_stops_generation(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("<|im_start|><|im_end|>")) == ["<|im_start|>", "<|im_end|>"]
    assert tokenizer.eos_token == "<|im_end|>"


text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=40)
turns = st.lists(
    st.one_of(
        st.builds(lambda t: {"role": "user", "content": t}, text),
        st.builds(lambda t: {"role": "tool", "tool_call_id": "c1", "content": t}, text),
        st.builds(lambda t: {"role": "assistant", "content": t}, text),
        st.builds(lambda c, t: call({"command": c}, t), text, st.one_of(st.none(), text)),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(turns, st.booleans(), st.booleans())
def test_append_only(tokenizer: Any, messages: list[Message], system: bool, tools: bool) -> None:
    """Every prefix of a conversation renders as a prefix of the whole: prompt n+1 = prompt n + turn n + tail, in text and in tokens."""
    head = [{"role": "system", "content": "Be brief."}] if system else []
    given_tools = [BASH] if tools else None
    whole = render(tokenizer, head + messages, tools=given_tools, prompt=False)
    for n in range(len(messages)):
        part = render(tokenizer, head + messages[:n], tools=given_tools, prompt=False) if head or n else ""
        if not (head or n):
            continue
        assert whole.startswith(part)
        if messages[n]["role"] == "assistant":
            assert whole.startswith(render(tokenizer, head + messages[:n], tools=given_tools))
        ids, total = tokenizer.encode(part), tokenizer.encode(whole)
        # The line break after a turn's end may not join with what follows: the next turn starts with a marker.
        assert total[: len(ids)] == ids
