from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from learner_helpers import conversation, random_rows, trace, turn

from capture_proxy.trace import hash_ids
from harness_rl.learner.packing import pack_rows, term_weights
from harness_rl.learner.rows import (
    Row,
    RowMismatch,
    TurnSpan,
    build_rows,
    mark_stale,
    parse_version,
    rows_from_wire,
    rows_to_wire,
    verify_packed,
    verify_row,
)


def trained_ids(row: Row) -> list[int]:
    return row.ids[row.trained].tolist()


def test_design_example_trains_20_and_22() -> None:
    (row,) = build_rows(trace(turn("a", [10, 11], [20, 21, 22], mask=[1, 0, 1])), "r", "g")
    assert row.ids.tolist() == [10, 11, 20, 21, 22]
    assert trained_ids(row) == [20, 22]
    verify_row(row)


def test_chain_becomes_one_row_with_tool_tokens_as_context() -> None:
    t = trace(turn("a", [1, 2], [3, 4]), turn("b", [1, 2, 3, 4, 50, 51], [5, 6], parent="a"))
    (row,) = build_rows(t, "r", "g")
    assert row.ids.tolist() == [1, 2, 3, 4, 50, 51, 5, 6]
    assert trained_ids(row) == [3, 4, 5, 6]
    assert np.isnan(row.logprobs[[0, 1, 4, 5]]).all()
    verify_row(row)


def test_c01_two_lineages_interleaved_are_two_rows() -> None:
    a1, b1 = turn("a1", [1, 2], [3]), turn("b1", [7, 8], [9])
    a2, b2 = turn("a2", [1, 2, 3, 60], [4], parent="a1"), turn("b2", [7, 8, 9, 61], [5], parent="b1")
    for order in ((a1, b1, a2, b2), (a1, b1, b2, a2)):
        rows = build_rows(trace(*order), "r", "g")
        assert sorted(row.ids.tolist() for row in rows) == [[1, 2, 3, 60, 4], [7, 8, 9, 61, 5]]


def test_c02_compaction_opens_a_row_and_trains_no_token_twice() -> None:
    counts: Counter[str] = Counter()
    t = trace(
        turn("a", [1, 2], [3, 4]),
        turn("sum", [1, 2, 3, 4, 90], [70, 71], parent="a"),
        turn("c", [1, 70, 71, 91], [5], parent="sum"),
        turn("d", [80, 81], [6]),
    )
    rows = build_rows(t, "r", "g", counts=counts)
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 4, 90, 70, 71], [1, 70, 71, 91, 5], [80, 81, 6]]
    assert sum(len(trained_ids(row)) for row in rows) == 6
    assert counts["forks"] == 1 and counts["rows"] == 3


def test_b06_dropped_reasoning_forks_and_each_turn_is_owned_once() -> None:
    t = trace(turn("a", [1], [2, 99, 3]), turn("b", [1, 2, 3, 50], [4], parent="a"), turn("c", [1, 2, 3, 50, 4, 51], [5], parent="b"))
    rows = build_rows(t, "r", "g")
    assert [row.ids.tolist() for row in rows] == [[1, 2, 99, 3], [1, 2, 3, 50, 4, 51, 5]]
    assert [trained_ids(row) for row in rows] == [[2, 99, 3], [4, 5]]


def test_a_fork_holds_the_shared_turn_as_context_only() -> None:
    t = trace(turn("a", [1], [2]), turn("b", [1, 2, 50], [3], parent="a"), turn("c", [1, 2, 51], [4], parent="a"))
    rows = build_rows(t, "r", "g")
    assert [trained_ids(row) for row in rows] == [[2, 3], [4]]
    assert [[s.node_id for s in row.spans] for row in rows] == [["a", "b"], ["c"]]


def test_untrained_turns_are_context_and_trailing_context_is_dropped() -> None:
    counts: Counter[str] = Counter()
    t = trace(
        turn("a", [1], [2], mask=[0]),
        turn("b", [1, 2, 50], [3], parent="a"),
        turn("c", [1, 2, 50, 3, 51], [4, 5], parent="b", mask=[0, 0]),
        turn("x", [9], [8], mask=[0]),
    )
    (row,) = build_rows(t, "r", "g", counts=counts)
    assert row.ids.tolist() == [1, 2, 50, 3]
    assert counts["rows_without_trained_tokens"] == 1


def test_demonstrations_are_trained_only_when_asked_for() -> None:
    t = trace(turn("a", [1], [2], origin="demonstration"))
    assert build_rows(t, "r", "g") == []
    assert len(build_rows(t, "r", "g", origins=frozenset({"demonstration"}))) == 1


def test_b12_a_turn_without_sampling_temperature_is_refused() -> None:
    with pytest.raises(RowMismatch, match=r"turn a: .*temperature"):
        build_rows(trace(turn("a", [1], [2], temperature=None)), "r", "g")


def test_a_temperature_change_opens_a_row() -> None:
    t = trace(turn("a", [1], [2]), turn("b", [1, 2, 50], [3], parent="a", temperature=0.7))
    assert [row.temperature for row in build_rows(t, "r", "g")] == [1.0, 0.7]


def test_d06_none_as_rollout_id_is_refused() -> None:
    with pytest.raises(ValueError, match="rollout_id"):
        build_rows(trace(turn("a", [1], [2])), None, "g")  # type: ignore[arg-type]


def test_a_turn_without_hashes_is_refused_by_name() -> None:
    bare = turn("a", [1], [2])
    del bare["metadata"]["sample_hash"]
    with pytest.raises(RowMismatch, match="turn a: metadata lacks sample_hash"):
        build_rows(trace(bare), "r", "g")


def test_rows_do_not_depend_on_json_or_binary_form() -> None:
    rng = np.random.default_rng(1)
    t = conversation(rng, 4)
    (a,), (b,) = build_rows(t, "r", "g"), build_rows(type(t).from_bytes(t.to_bytes()), "r", "g")
    assert a.ids.tolist() == b.ids.tolist() and a.logprobs.tobytes() == b.logprobs.tobytes() and a.spans == b.spans


def test_stale_by_token_versions() -> None:
    t = trace(turn("a", [1], [2, 3, 4], versions=[("k-3", 0, 1), ("k-4", 1, 3)]))
    (row,) = build_rows(t, "r", "g")
    assert mark_stale(row, current_step=5, max_staleness=1, lineage_steps={"k": 5}) == 1
    assert trained_ids(row) == [3, 4]
    verify_row(row)  # staleness never touches the captured mask
    assert mark_stale(row, current_step=5, max_staleness=2, lineage_steps={"k": 5}) == 0
    assert mark_stale(row, current_step=6, max_staleness=1, lineage_steps={"k": 6}) == 3


def test_versions_off_the_surviving_line_are_stale() -> None:
    (row,) = build_rows(trace(turn("a", [1], [2, 3], versions=[("old-4", 0, 1), ("old-6", 1, 2)])), "r", "g")
    lines = {"old": 5, "new": 6}  # resumed from step 5: old-6 was taken back
    assert mark_stale(row, 6, 3, lines) == 1 and trained_ids(row) == [2]
    assert mark_stale(row, 6, 3, {"new": 6}) == 2


@pytest.mark.parametrize("text", ["k3", "-3", "k-", "k-x"])
def test_malformed_version(text: str) -> None:
    with pytest.raises(ValueError, match="<lineage>-<step>"):
        parse_version(text)
    assert parse_version("a-b-12") == ("a-b", 12)


def test_wire_round_trip() -> None:
    rows = random_rows(3)
    metas, arrays = rows_to_wire(rows)
    for a, b in zip(rows, rows_from_wire(metas, arrays), strict=True):
        assert (a.row_id, a.rollout_id, a.group_id, a.advantage, a.temperature, a.spans) == (
            b.row_id,
            b.rollout_id,
            b.group_id,
            b.advantage,
            b.temperature,
            b.spans,
        )
        for name in ("ids", "logprobs", "mask", "stale"):
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes()
    arrays["mask"] = arrays["mask"][:-1]
    with pytest.raises(ValueError, match="'mask'"):
        rows_from_wire(metas, arrays)


def test_wire_round_trip_of_per_token_advantages() -> None:
    rows = random_rows(4, rollouts=3)
    rows[1].token_advantages = np.arange(len(rows[1]), dtype=np.float32)
    metas, arrays = rows_to_wire(rows)
    back = rows_from_wire(metas, arrays)
    assert [row.token_advantages is None for row in back] == [True, False, True]
    assert back[1].credit.tolist() == list(range(len(rows[1]))) and set(back[0].credit.tolist()) == {rows[0].advantage}
    arrays["token_advantages"] = arrays["token_advantages"][1:]
    with pytest.raises(ValueError, match="'token_advantages'"):
        rows_from_wire(metas, arrays)


@pytest.mark.parametrize("bad", [np.ones(3, np.float32), np.full(1, np.nan, np.float32)])
def test_per_token_advantages_of_another_length_or_not_finite_are_refused(bad: np.ndarray) -> None:  # type: ignore[type-arg]
    (row,) = random_rows(5, rollouts=1)
    row.token_advantages = bad if len(bad) > 1 else np.resize(bad, len(row))
    with pytest.raises(RowMismatch, match=r"token_advantages is|not usable"):
        verify_row(row)


def test_packed_per_token_advantages_are_checked() -> None:
    (row,) = random_rows(6, rollouts=1)
    row.token_advantages = np.arange(len(row), dtype=np.float32)
    (pack,) = pack_rows([row], [0], 4096, [1.0])
    verify_packed(row, pack.view(0))
    pack.advantages[0] += 1
    with pytest.raises(RowMismatch, match="advantage"):
        verify_packed(row, pack.view(0))


# The checks of invariant 1, each fired by the fault it is there for.


def row_of(seed: int = 0) -> Row:
    return random_rows(seed, rollouts=1, turns=3)[0]


def test_fires_on_one_logprob_shifted_by_a_position() -> None:
    row = row_of()
    part = slice(row.spans[1].start, row.spans[1].end)
    row.logprobs[part] = np.roll(row.logprobs[part], 1)
    with pytest.raises(RowMismatch, match=r"turn n1: logprobs or mask"):
        verify_row(row)


def test_fires_on_a_shifted_mask() -> None:
    (row,) = build_rows(trace(turn("a", [1, 2], [3, 4, 5], mask=[1, 0, 1])), "r", "g")
    row.mask[2:5] = [0, 1, 1]
    with pytest.raises(RowMismatch, match="turn a: logprobs or mask"):
        verify_row(row)


def test_fires_on_a_mask_outside_sampled_tokens() -> None:
    row = row_of()
    row.mask[0] = 1
    with pytest.raises(RowMismatch, match="no turn of the row sampled"):
        verify_row(row)


def test_fires_on_dropped_tool_tokens() -> None:
    row = row_of()
    cut = row.spans[0].end  # the tool result lies between the first two turns
    keep = np.r_[0:cut, cut + 3 : len(row)]
    spans = [row.spans[0]] + [
        TurnSpan(
            s.node_id,
            s.start - 3,
            s.end - 3,
            s.prompt_hash,
            s.completion_hash,
            s.sample_hash,
            [(v, a - 3, b - 3) for v, a, b in s.versions],
        )
        for s in row.spans[1:]
    ]
    cut_row = replace(row, ids=row.ids[keep], logprobs=row.logprobs[keep], mask=row.mask[keep], stale=row.stale[keep], spans=spans)
    with pytest.raises(RowMismatch, match=r"turn n1: the .* not the prompt the engine was given"):
        verify_row(cut_row)


def test_fires_on_a_swapped_branch() -> None:
    shared = [1, 2, 3, 4]
    t = trace(turn("a", shared, [5]), turn("b", [*shared, 5, 50], [6], parent="a"), turn("c", [*shared, 5, 51], [7], parent="a"))
    ab, c = build_rows(t, "r", "g")
    ab.ids[: len(c) - 1], c.ids[: len(c) - 1] = c.ids[: len(c) - 1].copy(), ab.ids[: len(c) - 1].copy()
    with pytest.raises(RowMismatch, match=r"turn b: the .* prompt"):
        verify_row(ab)
    with pytest.raises(RowMismatch, match=r"turn c: the .* prompt"):
        verify_row(c)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 0.5])
def test_b14_fires_on_values_that_are_no_logprobs(value: float) -> None:
    row = row_of()
    row.logprobs[row.spans[0].start] = value
    with pytest.raises(RowMismatch):
        verify_row(row)


def test_fires_on_a_version_gap() -> None:
    (row,) = build_rows(trace(turn("a", [1], [2, 3], versions=[("k-0", 0, 1)])), "r", "g")
    with pytest.raises(RowMismatch, match="weight versions"):
        verify_row(row)


@pytest.mark.parametrize("fault", ["predicts", "branch", "targets", "behaviour", "advantages", "positions", "ids", "short"])
def test_fires_on_a_packer_that_is_off(fault: str) -> None:
    rows = random_rows(5)
    (pack,) = pack_rows(rows, range(len(rows)), 4096, term_weights(rows, "token"))
    for r, i in enumerate(pack.rows):
        verify_packed(rows[i], pack.view(r))
    if fault == "predicts":
        pack.predicts = pack.predicts + 1  # the classic: the hidden state at i is taken for token i
    elif fault == "branch":
        pack.predicts[0] = pack.tree.paths[1][pack.tree.positions[pack.predicts[0]]]  # the same depth, on another row's path
    elif fault == "targets":
        pack.targets = np.roll(pack.targets, 1)
    elif fault == "behaviour":
        pack.behaviour = np.roll(pack.behaviour, 1)
    elif fault == "advantages":
        pack.advantages = pack.advantages[::-1].copy()
    elif fault == "positions":
        pack.tree.positions[:] = np.arange(pack.tokens)  # positions that go on over the border
    elif fault == "ids":
        pack.tree.ids[:] = np.roll(pack.tree.ids, 1)
    else:
        pack.predicts, pack.targets, pack.behaviour = pack.predicts[:-1], pack.targets[:-1], pack.behaviour[:-1]
        pack.advantages, pack.temperatures = pack.advantages[:-1], pack.temperatures[:-1]
    with pytest.raises(RowMismatch):
        for r, i in enumerate(pack.rows):
            verify_packed(rows[i], pack.view(r))


def test_hashes_are_the_proxys() -> None:
    row = row_of()
    assert row.spans[0].prompt_hash == hash_ids(row.ids[: row.spans[0].start])
