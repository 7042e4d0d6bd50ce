"""The turn graph and stored deltas, against a slow and obvious model of what they should be."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capture_proxy import delta
from capture_proxy.graph import Turn, TurnGraph
from capture_proxy.messages import chain_keys, context_key, message_key
from capture_proxy.records import turn_from_record, turn_to_record
from capture_proxy.store import Record

ids = st.lists(st.integers(0, 3), min_size=0, max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False, width=16) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(["messages", "tools", "model", "x"]), json_values, max_size=4)


@given(st.none() | bodies, bodies)
@example({"messages": [[-0.0]]}, {"messages": [[0.0]]})
@settings(max_examples=300, deadline=None)
def test_a_body_comes_back_from_its_delta_as_the_same_json(base: Any, body: Any) -> None:
    stored = json.loads(json.dumps(delta.encode(base, body)))
    assert json.dumps(delta.apply(base, stored)) == json.dumps(body)


def test_delta_of_a_grown_conversation_is_its_growth() -> None:
    messages = [{"role": "user", "content": "x" * 10_000}]
    base = {"model": "m", "messages": messages, "tools": [{"big": "y" * 10_000}]}
    body = {"model": "m", "messages": [*messages, {"role": "assistant", "content": "z"}], "tools": [{"big": "y" * 10_000}]}
    assert len(json.dumps(delta.encode(base, body))) < 250


def make(graph: TurnGraph, node_id: str, seq: int, prompt: list[int], completion: list[int], body: dict[str, Any]) -> Turn:
    array = np.array(prompt, np.int32)
    parent = graph.parent_of(array, None)
    base, keep, before = graph.place(parent, array)
    return Turn(
        node_id=node_id,
        seq=seq,
        parent=parent,
        base=base,
        keep=keep,
        prompt_len=len(prompt),
        total=np.array(prompt + completion, np.int32),
        logps=-np.ones(len(completion), np.float32),
        reason=None,
        request=delta.encode(before, body),
        response={},
        meta={"origin": "sampled"},
        chain=b"c",
        reply_key=b"r",
        system_key=b"s",
        rendered_len=len(prompt),
        rendered_hash="",
    )


def slow_parent(known: dict[str, list[int]], prompt: list[int]) -> str | None:
    fits = [(len(total), -i, node) for i, (node, total) in enumerate(known.items()) if prompt[: len(total)] == total]
    return max(fits)[2] if fits else None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), ids, ids, bodies), min_size=1, max_size=10))
@settings(max_examples=200, deadline=None)
def test_graph_agrees_with_the_obvious_model_and_survives_the_log(steps: list[Any]) -> None:
    """Turns grow from any earlier turn, whole or cut anywhere; parents, ids and bodies must be right before and after a round trip."""
    graph, rebuilt = TurnGraph(), TurnGraph()
    totals: dict[str, list[int]] = {}
    prompts: dict[str, list[int]] = {}
    sent: dict[str, Any] = {}
    for seq, (pick, cut, tail, completion, body) in enumerate(steps, 1):
        nodes = list(totals)
        start = totals[nodes[pick % len(nodes)]] if nodes else []
        prompt = (start if cut > 6 else start[:cut]) + tail or [9]
        node_id = f"n{seq}"
        turn = make(graph, node_id, seq, prompt, completion, body)
        assert turn.parent == slow_parent(totals, prompt)
        header, arrays = turn_to_record(turn)
        graph.add(turn)
        record = Record(json.loads(json.dumps(header)), {name: array.copy() for name, array in arrays.items()})
        rebuilt.add(turn_from_record(record, rebuilt.turns))
        totals[node_id], prompts[node_id], sent[node_id] = prompt + completion, prompt, body
    for one in (graph, rebuilt):
        all_bodies = one.bodies()
        for node_id, turn in one.turns.items():
            assert turn.total.tolist() == totals[node_id]
            assert turn.prompt.tolist() == prompts[node_id]
            assert json.dumps(one.body(node_id)) == json.dumps(all_bodies[node_id]) == json.dumps(sent[node_id])
    placed = graph.placed()
    assert [(p.turn.node_id, p.branch, p.role, p.reason) for p in placed] == [
        (p.turn.node_id, p.branch, p.role, p.reason) for p in rebuilt.placed()
    ]
    branch = {p.turn.node_id: p.branch for p in placed}
    for one_branch in set(branch.values()):
        on_it = [p.turn for p in placed if p.branch == one_branch]
        for before, after in itertools.pairwise(on_it):
            assert after.parent == before.node_id


def test_ids_of_a_conversation_share_one_array() -> None:
    graph = TurnGraph()
    prompt = [1, 2]
    for seq in range(1, 6):
        graph.add(make(graph, f"n{seq}", seq, prompt, [3], {}))
        prompt = [*prompt, 3, 4]
    owners = {id(turn.total.base if turn.total.base is not None else turn.total) for turn in graph.turns.values()}
    assert len(owners) == 1


def test_placement_does_not_depend_on_the_order_of_recording() -> None:
    def build(order: list[int]) -> list[Any]:
        graph = TurnGraph()
        turns = [make(TurnGraph(), f"n{seq}", seq, [seq], [3], {"n": seq}) for seq in (1, 2, 3)]
        for i in order:
            turns[i].base, turns[i].keep, before = graph.place(None, turns[i].prompt)
            turns[i].request = delta.encode(before, {"n": i})
            graph.add(turns[i])
        return [(p.turn.node_id, p.branch, p.role, p.reason) for p in graph.placed()]

    assert build([0, 1, 2]) == build([2, 1, 0]) == build([1, 2, 0])


KEEP_SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"content": " a "}, {"content": "a"}),
    ({"content": "a"}, {"content": [{"type": "text", "text": "a"}]}),
    ({"content": None}, {"content": ""}),
    ({"content": "<think>t</think>a"}, {"content": "a", "reasoning": "t"}),
    ({"content": "a", "reasoning": " t\n"}, {"content": "a", "reasoning": "t"}),
]


def call(name: str, arguments: str, call_id: str = "x") -> dict[str, Any]:
    return {"content": None, "tool_calls": [{"id": call_id, "function": {"name": name, "arguments": arguments}}]}


def test_message_key_ignores_what_clients_rewrite_and_nothing_else() -> None:
    def key(fields: dict[str, Any], role: str = "assistant") -> bytes:
        return message_key({"role": role, **fields})

    for one, other in KEEP_SAME:
        assert key(one) == key(other)
    assert key(call("f", '{"a": 5e3, "b":"\\u00e9"}')) == key(call("f", '{"a":5000.0,"b":"é"}', "y"))
    assert key(call("f", '{"a":1,"b":2}')) != key(call("f", '{"b":2,"a":1}'))
    assert key(call("f", "{}")) != key(call("g", "{}"))
    assert key(call("f", "{bad")) != key(call("f", "{}"))
    assert key({"content": "a b"}) != key({"content": "ab"})
    assert key({"content": " a"}, "user") != key({"content": "a"}, "user")
    assert key({"content": "a"}, "user") != key({"content": "a"}, "system")
    assert key({"content": "ab", "reasoning": "c"}) != key({"content": "a", "reasoning": "bc"})


def test_chain_keys_depend_on_tools_and_every_message() -> None:
    messages = [{"role": "user", "content": str(i)} for i in range(3)]
    keys = chain_keys(messages, context_key([], {}))
    assert keys[:3] == chain_keys(messages[:2], context_key([], {}))
    assert keys[3] != chain_keys(messages, context_key([{"a": 1}], {}))[3]
    assert keys[3] != chain_keys([messages[1], messages[0], messages[2]], context_key([], {}))[3]
