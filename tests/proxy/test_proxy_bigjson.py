"""JSON item by item is JSON: whatever `json` reads, and refuses."""

from __future__ import annotations

import json
from json import JSONDecoder
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_proxy import bigjson

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just("x" * 70_000)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12)
INDENTS = st.sampled_from([None, 0, 2, "\t"])


@given(value=VALUES, indent=INDENTS, ascii_only=st.booleans())
@settings(max_examples=100, deadline=None)
def test_it_reads_what_json_reads(value: Any, indent: Any, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    for raw in (text.encode("utf-8", "surrogatepass"), b"\xef\xbb\xbf" + text.encode("utf-8", "surrogatepass"), text.encode("utf-16")):
        assert repr(bigjson.loads(raw, JSONDecoder())) == repr(json.loads(raw))


@given(
    value=st.dictionaries(st.text(max_size=3), VALUES, max_size=3),
    cut=st.floats(0, 1),
    junk=st.sampled_from(["", ",", "}", "]", "x", '"', ":"]),
)
@settings(max_examples=100, deadline=None)
def test_it_refuses_what_json_refuses(value: dict[str, Any], cut: float, junk: str) -> None:
    text = json.dumps(value)
    at = int(cut * len(text))
    raw = (text[:at] + junk + text[at + len(junk) :]).encode()
    try:
        expected = json.loads(raw)
    except ValueError:
        with pytest.raises(ValueError):
            bigjson.loads(raw, JSONDecoder())
    else:
        assert repr(bigjson.loads(raw, JSONDecoder())) == repr(expected)


BROKEN = (b"", b" ", b"{", b"[", b'{"a"}', b'{"a":}', b'{"a":1,}', b'{"a":[1,]}', b'{"a":[1 2]}', b"{1:2}", b'{"a":1}x', b"\xff\xfe")


@pytest.mark.parametrize("raw", BROKEN)
def test_broken_objects_are_value_errors(raw: bytes) -> None:
    with pytest.raises(ValueError):
        bigjson.loads(raw, JSONDecoder())


def test_the_last_of_two_equal_names_counts() -> None:
    assert bigjson.loads(b'{"a": [1], "a": 2}', JSONDecoder()) == {"a": 2}
