"""The fast ways give what the plain ones give: JSON with ids, equality of bodies, digests of prefixes, keys of conversations."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_proxy import fastjson
from capture_proxy.delta import strictly_equal
from capture_proxy.history import History
from capture_proxy.ids import PrefixHash
from capture_proxy.messages import chain_keys

NUMBERS = st.one_of(
    st.integers(), st.integers(2**63 - 2, 2**64 + 2), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none()
)
TEXT = st.one_of(st.text(max_size=8), st.sampled_from(["\ud800", '"token_ids":[1,2]', 'a"', "\\", "\u2028\x00\U0001f600"]))
VALUES = st.recursive(
    st.one_of(NUMBERS, TEXT), lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)), max_leaves=8
)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=12)
NOT_IDS = st.one_of(st.integers(-3, -1), st.integers(2**31, 2**70), st.floats(0, 9), st.booleans(), st.none(), st.just("7"), st.just([1]))


def same(a: Any, b: Any) -> bool:
    return json.dumps(a) == json.dumps(b)


def bounded(value: Any) -> Any:
    """The value with whole numbers beyond 64 bits as floats."""
    return json.loads(json.dumps(value), parse_int=lambda text: int(text) if -(2**63) <= int(text) < 2**64 else float(text))


@given(VALUES)
def test_what_is_written_reads_back_the_same(value: Any) -> None:
    assert same(json.loads(fastjson.dumps(value)), value)


@given(VALUES)
def test_what_is_read_is_what_json_reads(value: Any) -> None:
    # A whole number beyond 64 bits may come as a float; no field of an engine's answer is one.
    assert same(bounded(fastjson.loads(json.dumps(value).encode())), bounded(value))


@given(IDS, st.dictionaries(TEXT, VALUES, max_size=3), st.sampled_from([(",", ":"), (", ", ": "), (",\n ", ":\n")]), st.data())
def test_ids_are_read_apart(ids: list[int], beside: dict[str, Any], separators: tuple[str, str], data: st.DataObject) -> None:
    document = {**beside, "token_ids": ids, "after": beside}
    known = data.draw(st.one_of(st.none(), IDS, st.integers(0, len(ids)).map(lambda n: ids[:n])))
    read = fastjson.loads_with_ids(
        json.dumps(document, separators=separators).encode(), "token_ids", None if known is None else np.array(known, np.int32)
    )
    got = read.pop("token_ids")
    assert (got if isinstance(got, list) else got.tolist()) == ids
    assert same(bounded(read), bounded({**beside, "after": beside}))


@given(IDS, NOT_IDS, IDS)
def test_a_list_with_anything_else_stays_a_list(before: list[int], odd: Any, after: list[int]) -> None:
    raw = json.dumps({"token_ids": [*before, odd, *after]}).encode()
    for known in (None, np.array(before, np.int32)):
        read = fastjson.loads_with_ids(raw, "token_ids", known)["token_ids"]
        assert isinstance(read, list) and len(read) == len(before) + 1 + len(after)


@pytest.mark.parametrize("text", [b"1,", b",1", b"1,,2", b"1 2", b" , ", b"1]", b"0x1", b"1e3", b"99999999999999999999"])
def test_half_lists_are_no_ids(text: bytes) -> None:
    assert fastjson.parse_ids(text) is None


def test_ids_elsewhere_in_the_answer_are_not_taken_for_it() -> None:
    for text in (b'{"a":{"token_ids":[1]},"token_ids":[]}', b'{"a":{"token_ids":[1]}}', b'[{"token_ids":[1]}]', b'{"token_ids":[[1]]}'):
        assert fastjson.loads_with_ids(text, "token_ids") == json.loads(text)


@given(VALUES, VALUES)
def test_bodies_are_equal_when_their_json_is(a: Any, b: Any) -> None:
    assert strictly_equal(a, b) == (json.dumps(a) == json.dumps(b))
    assert strictly_equal(a, json.loads(json.dumps(a)))


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (1, True), (0.0, -0.0), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ([0], [False]), (None, 0)])
def test_values_that_are_written_differently_differ(a: Any, b: Any) -> None:
    assert not strictly_equal({"x": [a]}, {"x": [b]})


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.lists(st.integers(0, 40), max_size=6), IDS)
def test_digests_of_prefixes(ids: list[int], lengths: list[int], more: list[int]) -> None:
    def digest(part: list[int]) -> bytes:
        return hashlib.blake2b(np.array(part, "<i4").tobytes(), digest_size=16).digest()

    hashed = PrefixHash(np.array(ids, np.int32))
    for n in lengths:  # in any order
        n = min(n, len(ids))
        assert hashed.at(n) == digest(ids[:n])
    assert hashed.followed_by(np.array(more, np.int32)) == digest(ids + more)
    assert hashed.whole() == digest(ids)


MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.sampled_from(["a", "b", ""])})


@given(st.lists(st.tuples(st.lists(MESSAGE, max_size=5), st.sampled_from([b"x", b"y"])), max_size=12))
def test_keys_of_a_conversation_do_not_depend_on_what_was_asked_before(calls: list[tuple[list[dict[str, Any]], bytes]]) -> None:
    history = History()
    for messages, seed in calls:
        assert history.keys(messages, seed) == chain_keys(messages, seed)
