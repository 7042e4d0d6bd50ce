"""TrainingTrace: every rule of the schema, the hashes, and both forms."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_proxy import codec
from capture_proxy.trace import TrainingTrace, TrainingTurn, hash_ids, hash_sample


def turn(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "node_id": "n1",
        "prompt_token_ids": [10, 11],
        "completion_token_ids": [20, 21, 22],
        "per_token_logps": [-0.5, -0.25, 0.0],
        "loss_mask": [0, 0, 1, 0, 1],
        "request": {"messages": []},
        "response": {},
        "metadata": {},
    }
    return {**good, **changes}


def load(*turns: dict[str, Any], **top: Any) -> TrainingTrace:
    return TrainingTrace.model_validate({"schema_version": 1, "turns": list(turns), **top})


def test_the_masked_middle_token_is_context_and_the_others_train() -> None:
    only = load(turn()).turns[0]
    trained = only.completion_token_ids[only.completion_mask == 1]
    assert trained.tolist() == [20, 22]
    assert np.concatenate([only.prompt_token_ids, only.completion_token_ids]).tolist() == [10, 11, 20, 21, 22]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("node_id", ""),
        ("node_id", 7),
        ("prompt_token_ids", []),
        ("prompt_token_ids", [10, -1]),
        ("prompt_token_ids", [10, True]),
        ("prompt_token_ids", [10, 11.0]),
        ("prompt_token_ids", ["10", "11"]),
        ("prompt_token_ids", [10, None]),
        ("prompt_token_ids", [10, 2**31]),
        ("prompt_token_ids", [10, 2**70]),
        ("prompt_token_ids", "ab"),
        ("prompt_token_ids", np.array([1.0, 2.0])),
        ("prompt_token_ids", np.array([True, False])),
        ("completion_token_ids", [20, False, 22]),
        ("completion_token_ids", [20, 21]),
        ("per_token_logps", [-0.5, -0.25]),
        ("per_token_logps", [-0.5, -0.25, 0.1]),
        ("per_token_logps", [-0.5, NAN, -0.1]),
        ("per_token_logps", [-0.5, -INF, -0.1]),
        ("per_token_logps", [-0.5, None, -0.1]),
        ("per_token_logps", [-0.5, True, -0.1]),
        ("per_token_logps", [-0.5, "-1", -0.1]),
        ("per_token_logps", [-0.5, -1e300, -0.1]),
        ("per_token_logps", []),
        ("loss_mask", [0, 0, 1, 0]),
        ("loss_mask", [0, 1, 1, 0, 1]),
        ("loss_mask", [0, 0, 1, 0, 2]),
        ("loss_mask", [0, 0, 1, 0, True]),
        ("loss_mask", [0, 0, 1, 0, 1.0]),
        ("loss_mask", [0, 0, 1, 0, -1]),
    ],
)
def test_each_rule_is_an_error_that_names_turn_and_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        load(turn(**{field: value}))
    text = str(caught.value)
    assert "turns.0" in text
    named = {"completion_token_ids": ("completion_token_ids", "per_token_logps")}.get(field, (field,))
    assert any(name in text for name in named)


def test_unknown_fields_and_other_versions_are_errors() -> None:
    for bad in (turn(extra=1), {**turn(), "note": "x"}):
        with pytest.raises(ValueError, match="extra"):
            load(bad)
    with pytest.raises(ValueError, match="surprise"):
        load(turn(), surprise=1)
    for version in (2, "1", True, 1.0, None):
        with pytest.raises(ValueError, match="schema_version"):
            TrainingTrace.model_validate({"schema_version": version, "turns": []})


def test_missing_fields_and_duplicate_nodes_are_errors() -> None:
    for name in turn():
        with pytest.raises(ValueError, match=name):
            load({key: value for key, value in turn().items() if key != name})
    with pytest.raises(ValueError, match=r"'n1'.*used twice"):
        load(turn(), turn())


def test_a_turn_may_have_no_completion() -> None:
    load(turn(completion_token_ids=[], per_token_logps=[], loss_mask=[0, 0]))


def test_arrays_are_typed_and_read_only() -> None:
    only = load(turn()).turns[0]
    assert (only.prompt_token_ids.dtype, only.per_token_logps.dtype, only.loss_mask.dtype) == (np.int32, np.float32, np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        only.completion_token_ids[0] = 5


def test_b14_json_form_is_strict() -> None:
    with pytest.raises(ValueError):
        load(turn(metadata={"x": NAN})).to_json()
    assert json.loads(load(turn()).to_json())["turns"][0]["loss_mask"] == [0, 0, 1, 0, 1]


def test_hashes_see_any_change() -> None:
    assert hash_ids([1, 2, 3]) == hash_ids(np.array([1, 2, 3], np.int64)) != hash_ids([1, 3, 2])
    assert len(hash_ids([])) == 32
    base = hash_sample([1, 2], [-0.5, -1.0], [1, 1])
    assert base != hash_sample([1, 2], [-1.0, -0.5], [1, 1])
    assert base != hash_sample([1, 2], [-0.5, -1.0], [1, 0])
    assert base != hash_sample([2, 1], [-0.5, -1.0], [1, 1])


# -- the binary form ------------------------------------


@st.composite
def traces(draw: st.DrawFn) -> TrainingTrace:
    """Turns that continue, fork from, or ignore earlier ones; requests likewise."""
    turns: list[TrainingTurn] = []
    ids = st.lists(st.integers(0, 40), max_size=6)
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": st.sampled_from([None, "a", "b", 1, 1.0, True])}
    )
    for i in range(draw(st.integers(0, 6))):
        prompt = draw(ids)
        messages = draw(st.lists(message, max_size=3))
        parent = None
        if turns and draw(st.booleans()):
            base = turns[draw(st.integers(0, len(turns) - 1))]
            total = [*base.prompt_token_ids.tolist(), *base.completion_token_ids.tolist()]
            whole = draw(st.booleans())
            prompt = total[: len(total) if whole else draw(st.integers(0, len(total)))] + prompt
            messages = base.request["messages"][: draw(st.integers(0, len(base.request["messages"])))] + messages
            parent = base.node_id if whole else draw(st.sampled_from([None, base.node_id]))
        prompt = prompt or [1]
        completion = draw(ids)
        logps = draw(st.lists(st.floats(-50, 0, width=32), min_size=len(completion), max_size=len(completion)))
        mask = draw(st.lists(st.integers(0, 1), min_size=len(completion), max_size=len(completion)))
        turns.append(
            TrainingTurn(
                node_id=f"n{i}",
                prompt_token_ids=prompt,
                completion_token_ids=completion,
                per_token_logps=logps,
                loss_mask=[0] * len(prompt) + mask,
                request={"messages": messages, "model": draw(st.sampled_from(["m", "n"]))},
                response={"text": draw(st.text(max_size=4))},
                metadata={"parent": parent},
            )
        )
    return TrainingTrace(turns=turns)


@given(traces())
@settings(max_examples=200, deadline=None)
def test_both_forms_give_the_trace_back(trace: TrainingTrace) -> None:
    again = TrainingTrace.from_bytes(trace.to_bytes())
    assert again == trace
    assert again.to_json() == trace.to_json()  # stricter than ==: 1, 1.0 and true differ as text
    assert TrainingTrace.from_json(trace.to_json()) == trace


@given(traces().filter(lambda trace: bool(trace.turns)), st.data())
@settings(max_examples=60, deadline=None)
def test_a_changed_or_missing_byte_is_an_error(trace: TrainingTrace, data: st.DataObject) -> None:
    raw = bytearray(trace.to_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError):
        TrainingTrace.from_bytes(bytes(raw))
    with pytest.raises(ValueError):
        TrainingTrace.from_bytes(trace.to_bytes()[:at])


def long_trace(turns: int, fork_at: int | None = None) -> TrainingTrace:
    out: list[TrainingTurn] = []
    prompt = np.arange(300, dtype=np.int32)
    messages = [{"role": "user", "content": "x" * 800}]
    for i in range(turns):
        if i == fork_at:
            prompt = np.concatenate([prompt[:100], prompt[150:]])
        completion = np.full(60, i, np.int32)
        mask = np.concatenate([np.zeros(len(prompt), np.uint8), np.ones(60, np.uint8)])
        parent = f"n{i - 1}" if i and i != fork_at else None
        out.append(
            TrainingTurn(
                node_id=f"n{i}",
                prompt_token_ids=prompt,
                completion_token_ids=completion,
                per_token_logps=np.full(60, -1, np.float32),
                loss_mask=mask,
                request={"messages": messages},
                response={},
                metadata={"parent": parent},
            )
        )
        prompt = np.concatenate([prompt, completion, np.arange(200, dtype=np.int32)])
        messages = [*messages, {"role": "assistant", "content": "y" * 200}, {"role": "tool", "content": "z" * 600}]
    return TrainingTrace(turns=out)


def test_b19_binary_size_is_linear_in_the_turns() -> None:
    sizes = {n: len(long_trace(n).to_bytes()) for n in (10, 50, 100)}
    assert sizes[100] / sizes[10] < 10.5
    assert sizes[100] / sizes[50] < 2.1
    # JSON carries each full prompt and is not: the comparison shows that the test can fail.
    assert len(long_trace(50).to_json()) / len(long_trace(10).to_json()) > 10


def test_b19_rebuilt_prompts_are_exact_and_share_memory() -> None:
    trace = long_trace(30, fork_at=20)
    again = TrainingTrace.from_bytes(trace.to_bytes())
    assert again == trace
    plain = codec.decode(trace.to_bytes())
    assert plain[3].prompt.base is plain[10].prompt.base
    assert plain[3].prompt.base is not plain[25].prompt.base
