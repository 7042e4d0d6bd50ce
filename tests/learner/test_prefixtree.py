from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_rl.learner.prefixtree import fold, prefix_order, shared_prefix, side_by_side

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


@given(sequences)
def test_every_sequence_is_its_path_and_every_prefix_is_held_once(raw: list[list[int]]) -> None:
    tree = fold([np.array(ids, dtype=np.int32) for ids in raw])
    for ids, path in zip(raw, tree.paths, strict=True):
        assert tree.ids[path].tolist() == ids
        assert tree.positions[path].tolist() == list(range(len(ids)))
    assert len(tree.ids) == len(tree.positions) == len({tuple(ids[: n + 1]) for ids in raw for n in range(len(ids))})


@given(sequences)
def test_segments_cover_the_tree_and_know_what_comes_before_them(raw: list[list[int]]) -> None:
    tree = fold([np.array(ids) for ids in raw])
    assert [s.start for s in tree.segments] == [0, *(s.end for s in tree.segments[:-1])] and tree.segments[-1].end == len(tree.ids)
    for index, segment in enumerate(tree.segments):
        assert segment.end > segment.start and (segment.parent is None or segment.parent < index)
        (path,) = {tuple(p[: p.tolist().index(segment.start)]) for p in tree.paths if segment.start in p}
        assert tuple(tree.context(index)) == path


@given(sequences)
def test_order_puts_each_next_to_its_nearest(raw: list[list[int]]) -> None:
    arrays = [np.array(ids) for ids in raw]
    ordered = [raw[i] for i in prefix_order(arrays)]
    assert ordered == sorted(raw)
    assert sum(len(ids) for ids in raw) - sum(shared_prefix(np.array(a), np.array(b)) for a, b in pairwise(ordered)) == len(
        fold(arrays).ids
    )


@given(sequences)
def test_side_by_side_shares_nothing(raw: list[list[int]]) -> None:
    tree = side_by_side([np.array(ids, dtype=np.int32) for ids in raw])
    assert np.concatenate(tree.paths).tolist() == list(range(sum(map(len, raw))))
    for index, (ids, path) in enumerate(zip(raw, tree.paths, strict=True)):
        assert tree.ids[path].tolist() == ids and tree.positions[path].tolist() == list(range(len(ids)))
        assert len(tree.context(index)) == 0 and (tree.segments[index].start, tree.segments[index].end) == (path[0], path[-1] + 1)


def test_equal_sequences_share_all_and_a_prefix_ends_inside() -> None:
    tree = fold([np.array([1, 2, 3]), np.array([1, 2]), np.array([1, 2, 3])])
    assert tree.paths[0].tolist() == tree.paths[2].tolist() == [0, 1, 2] and tree.paths[1].tolist() == [0, 1]


def test_large_ids_are_ordered_by_value() -> None:
    assert prefix_order([np.array([256]), np.array([1]), np.array([70_000])]) == [1, 0, 2]


def test_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        fold([np.array([1]), np.array([], dtype=np.int64)])
    with pytest.raises(ValueError, match="without tokens"):
        side_by_side([np.array([1]), np.array([], dtype=np.int64)])
