from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_helpers import branching_rows, conversation, random_rows, trace, turn

from harness_rl.learner.mismatch import token_ages
from harness_rl.learner.packing import loss_terms, pack_rows, split_groups, term_weights
from harness_rl.learner.rows import Row, build_rows, verify_packed


@given(
    make=st.sampled_from([random_rows, branching_rows]),
    seed=st.integers(0, 10_000),
    budget=st.integers(60, 400),
    rollouts=st.integers(1, 12),
)
@settings(max_examples=40, deadline=None)
def test_packs_hold_every_row_once_within_the_budget(make: Callable[[int, int], list[Row]], seed: int, budget: int, rollouts: int) -> None:
    rows = make(seed, rollouts)
    packs = pack_rows(rows, range(len(rows)), budget, term_weights(rows, "token"))
    assert sorted(i for pack in packs for i in pack.rows) == list(range(len(rows)))
    assert all(pack.tokens <= budget for pack in packs)
    assert sum(pack.terms for pack in packs) == sum(int(row.mask.sum()) for row in rows)
    assert sum(float(pack.weights.sum()) for pack in packs) == pytest.approx(1.0)
    for pack in packs:
        for r, i in enumerate(pack.rows):
            verify_packed(rows[i], pack.view(r))


def test_d03_no_term_crosses_a_border() -> None:
    trained = np.array([1, 0, 1], dtype=bool)  # it begins with a masked-in token, which only another row's last could predict
    predicts, sampled = loss_terms(trained, np.array([7, 8, 3]))
    assert predicts.tolist() == [8] and sampled.tolist() == [2]


@given(seed=st.integers(0, 10_000), budget=st.integers(30, 200))
@settings(max_examples=40, deadline=None)
def test_a_pack_forwards_each_prefix_once(seed: int, budget: int) -> None:
    rows = branching_rows(seed, rollouts=9)
    for pack in pack_rows(rows, range(len(rows)), budget, term_weights(rows, "token")):
        held = [rows[i].ids.tolist() for i in pack.rows]
        assert pack.tokens == len({tuple(ids[: n + 1]) for ids in held for n in range(len(ids))})


@pytest.mark.parametrize(("mask", "trained"), [([0, 1, 0], [12]), ([1, 0, 0], [11]), ([0, 0, 1], [13])])
def test_d04_exactly_the_masked_token_is_trained(mask: list[int], trained: list[int]) -> None:
    (row,) = build_rows(trace(turn("a", [10], [11, 12, 13], mask=mask)), "r", "g")
    (pack,) = pack_rows([row], [0], 100, [1.0])
    assert pack.targets.tolist() == trained
    assert pack.tree.ids[pack.predicts].tolist() == [trained[0] - 1]
    assert pack.behaviour.tolist() == [row.logprobs[trained[0] - 10]]


def test_c10_a_row_over_the_budget_is_never_cut() -> None:
    rows = random_rows(0, 1)
    with pytest.raises(ValueError, match="micro-batch"):
        pack_rows(rows, [0], len(rows[0]) - 1, [1.0])


def test_d25_per_token_weights_of_each_normalisation() -> None:
    short = build_rows(trace(turn("a", [1], [2] * 10)), "short", "g")
    long = build_rows(trace(turn("a", [1], [2] * 1000)), "long", "g")
    assert term_weights(short + long, "token") == pytest.approx([1 / 1010, 1 / 1010])
    assert term_weights(short + long, "rollout") == pytest.approx([1 / 20, 1 / 2000])
    assert term_weights(short + long, "constant", 500, rollouts=4) == pytest.approx([1 / 2000, 1 / 2000])


def test_invariant_3_splitting_a_rollout_changes_no_weight() -> None:
    whole = build_rows(trace(turn("a", [1], [2, 3, 4, 5])), "r", "g")
    split = build_rows(trace(turn("a", [1], [2, 3]), turn("b", [9], [4, 5])), "r", "g")
    other = build_rows(trace(turn("a", [1], [2] * 7)), "s", "g")
    for how in ("token", "rollout"):
        assert term_weights(whole + other, how)[0] == term_weights(split + other, how)[0] == term_weights(split + other, how)[1]


def test_ages() -> None:
    (row,) = build_rows(trace(turn("a", [1], [2, 3, 4], versions=[("k-3", 0, 1), ("k-5", 1, 2), ("old-5", 2, 3)])), "r", "g")
    assert token_ages(row, "k-5").tolist() == [0, 2, 0, 1]  # another lineage is never the policy in training


def test_minibatches_keep_groups_whole() -> None:
    rows = random_rows(2, rollouts=12, group_size=3)
    parts = split_groups(rows, range(12), 2)
    assert sorted(i for part in parts for i in part) == list(range(12))
    groups = [{rows[i].group_id for i in part} for part in parts]
    assert groups[0].isdisjoint(groups[1]) and all(groups)
    assert len(split_groups(rows, range(3), 5)) == 1


def test_stale_tokens_are_context_in_the_pack() -> None:
    row = build_rows(conversation(np.random.default_rng(0), 2), "r", "g")[0]
    row.stale[row.spans[0].start : row.spans[0].end] = 1
    (pack,) = pack_rows([row], [0], 100, [1.0])
    assert pack.targets.tolist() == row.ids[row.spans[1].start : row.spans[1].end].tolist()
    verify_packed(row, pack.view(0))
