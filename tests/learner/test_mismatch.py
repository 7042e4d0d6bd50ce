"""Each token's cause by construction, and the worst rows by arithmetic."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_helpers import random_rows, trace, turn

from harness_rl.learner.mismatch import CAUSES, Cause, token_causes, worst_rows
from harness_rl.learner.rows import build_rows, rows_from_wire, rows_to_wire


def causes(row, current: str = "k-5", kv: Literal["recompute", "keep"] = "recompute") -> list[str]:  # type: ignore[no-untyped-def]
    found = token_causes(row, current, kv)
    return [CAUSES[found[at]].value for at in np.flatnonzero(row.mask)]


def test_each_cause_by_construction() -> None:
    (plain,) = build_rows(trace(turn("a", [1], [2, 3], version="k-5")), "r", "g")
    assert causes(plain) == ["numeric", "numeric"]
    (warm,) = build_rows(trace(turn("a", [1], [2, 3], version="k-5", temperature=0.6)), "r", "g")
    assert causes(warm) == ["temperature", "temperature"]
    # one call over an update: the first token is the older policy's; the others stand on its keys and values where these are kept
    (mixed,) = build_rows(trace(turn("a", [1], [2, 3, 4], versions=[("k-4", 0, 1), ("k-5", 1, 3)], temperature=0.6)), "r", "g")
    assert causes(mixed, kv="keep") == ["stale", "kv_mixed", "kv_mixed"]
    assert causes(mixed) == ["stale", "temperature", "temperature"]  # its history was read again
    # two calls with an update between them: the second begins with the first one's cached blocks
    turns = turn("a", [1], [2], version="k-4"), turn("b", [1, 2, 3], [4, 5], parent="a", version="k-5")
    (later,) = build_rows(trace(*turns), "r", "g")
    assert causes(later, kv="keep") == ["stale", "kv_mixed", "kv_mixed"]
    assert causes(later) == ["stale", "numeric", "numeric"]
    (older,) = build_rows(trace(turn("a", [1], [2, 3], versions=[("k-3", 0, 1), ("k-4", 1, 2)])), "r", "g")
    assert causes(older) == ["stale", "stale"]
    first, second = build_rows(trace(turn("a", [1], [2], version="k-5"), turn("b", [1, 9], [3], parent="a", version="k-5")), "r", "g")
    assert causes(first) == ["numeric"] and causes(second) == ["template"]  # [1, 2] was rendered anew as [1, 9]
    (restarted,) = build_rows(trace(turn("a", [1], [2], version="old-5")), "r", "g")
    assert causes(restarted) == ["stale"]
    back = rows_from_wire(*rows_to_wire([first, second]))
    assert [row.forked for row in back] == [False, True]


def test_worst_rows_by_hand() -> None:
    rows = random_rows(0, rollouts=3)
    owner = np.array([0, 0, 1, 1, 2])
    position = np.array([6, 7, 6, 8, 6])
    learner = np.array([-1.0, -1.0, -1.0, -1.0, -1.0], dtype=np.float32)
    engine = np.array([-1.5, -1.0, -1.0, -4.0, -1.25], dtype=np.float32)
    numeric, stale = CAUSES.index(Cause.NUMERIC), CAUSES.index(Cause.STALE)
    kinds = np.array([numeric, numeric, numeric, stale, numeric], dtype=np.uint8)
    found = worst_rows(rows, owner, position, learner, engine, kinds)
    # fresh means: row 0 (0.5 + 0) / 2, row 1 0 (its 3.0 is a moved policy's), row 2 0.25: a tie of 0 and 2, broken by the mean of all
    assert [entry["row_id"] for entry in found] == [rows[0].row_id, rows[2].row_id, rows[1].row_id]
    assert found[0]["mean"] == 0.25 and found[0]["mean_fresh"] == 0.25 and found[0]["tokens"] == 2
    assert found[0]["worst"] == {"position": 6, "token": int(rows[0].ids[6]), "cause": "numeric", "engine": -1.5, "learner": -1.0}
    assert found[2]["by_cause"] == {"stale": 1, "numeric": 1} and found[2]["worst"]["position"] == 6
    assert len(worst_rows(rows, owner, position, learner, engine, kinds, count=2)) == 2


@given(seed=st.integers(0, 10_000), count=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_no_row_left_out_is_worse_than_one_that_is_named(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    rows = random_rows(1, rollouts=12)
    owner = rng.integers(0, 12, 60)
    learner, engine = (rng.normal(size=60).astype(np.float32) for _ in range(2))
    kinds = np.full(60, CAUSES.index(Cause.NUMERIC), dtype=np.uint8)
    named = worst_rows(rows, owner, np.full(60, 6), learner, engine, kinds, count)
    means = {rows[r].row_id: np.abs(learner[owner == r].astype(float) - engine[owner == r]).mean() for r in set(owner.tolist())}
    assert len(named) == min(count, len(means))
    bar = min(means[entry["row_id"]] for entry in named)
    assert all(mean <= bar + 1e-12 for row_id, mean in means.items() if row_id not in {entry["row_id"] for entry in named})
    assert [means[entry["row_id"]] for entry in named] == pytest.approx([entry["mean"] for entry in named])
