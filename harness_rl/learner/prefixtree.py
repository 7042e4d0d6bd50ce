"""Token sequences folded into a tree: a prefix that several share is kept, and forwarded, once.

Rollouts of one task begin alike, and turns of one conversation repeat it; only where two sequences part does the tree branch. What holds
for every sequence: `tree.ids[tree.paths[r]]` is the sequence, and `tree.positions[tree.paths[r]]` counts it from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of the tree, none of which branches before the last."""

    start: int
    end: int
    parent: int | None
    """Index of the segment that comes before it in every sequence; None at a root."""


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """T tokens of R sequences."""

    ids: NDArray[np.int64]
    """[T]"""
    positions: NDArray[np.int64]
    """[T] depth of each token: its place in every sequence that holds it."""
    segments: list[Segment]
    """End to end over the T tokens, parents before children."""
    paths: list[NDArray[np.int64]]
    """[R] of [L_r]: where each token of a sequence is."""

    def context(self, segment: int) -> NDArray[np.int64]:
        """Indices of the tokens that come before the segment in every sequence that holds it, in order."""
        ranges = []
        parent = self.segments[segment].parent
        while parent is not None:
            ranges.append(np.arange(self.segments[parent].start, self.segments[parent].end))
            parent = self.segments[parent].parent
        return np.concatenate(ranges[::-1]) if ranges else np.zeros(0, dtype=np.int64)


def shared_prefix(a: NDArray[Any], b: NDArray[Any]) -> int:
    """How many tokens two sequences share from their start."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length


def prefix_order(sequences: Sequence[NDArray[Any]]) -> list[int]:
    """Indices of the sequences in lexicographic order: each stands next to those with which it shares most. Token ids are >= 0."""
    return sorted(range(len(sequences)), key=lambda i: (np.asarray(sequences[i]).astype(">i8").tobytes(), i))


def fold(sequences: Sequence[NDArray[Any]]) -> PrefixTree:
    """The prefix tree of sequences of at least one token each; equal sequences get equal paths. Raises ValueError for an empty one."""
    if any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("a sequence without tokens has no place in a prefix tree")
    order = prefix_order(sequences)
    shared = [0, *(shared_prefix(sequences[a], sequences[b]) for a, b in pairwise(order))]
    segments: list[Segment] = []
    pieces: list[NDArray[Any]] = []
    depths: list[int] = []
    lines: dict[int, tuple[int, ...]] = {}
    total = 0
    todo: list[tuple[int, int, int, tuple[int, ...]]] = [(low, high, 0, ()) for low, high in reversed(_runs(shared, 0, len(order), 0))]
    while todo:
        low, high, depth, line = todo.pop()  # sequences order[low:high] are alike up to depth at least, and lie below the segments of line
        end = min([len(sequences[order[low]]), *shared[low + 1 : high]])
        segments.append(Segment(total, total + end - depth, line[-1] if line else None))
        pieces.append(np.asarray(sequences[order[low]][depth:end], dtype=np.int64))
        depths.append(depth)
        total += end - depth
        line = (*line, len(segments) - 1)
        first = low
        while first < high and len(sequences[order[first]]) == end:
            lines[order[first]] = line
            first += 1
        todo += [(a, b, end, line) for a, b in reversed(_runs(shared, first, high, end))]
    return PrefixTree(
        ids=np.concatenate([np.zeros(0, dtype=np.int64), *pieces]),
        positions=np.concatenate([np.zeros(0, dtype=np.int64), *(d + np.arange(len(p)) for d, p in zip(depths, pieces, strict=True))]),
        segments=segments,
        paths=[np.concatenate([np.arange(segments[s].start, segments[s].end) for s in lines[i]]) for i in range(len(sequences))],
    )


def side_by_side(sequences: Sequence[NDArray[Any]]) -> PrefixTree:
    """As `fold`, but nothing is shared: each sequence is one segment, in the order given."""
    if any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("a sequence without tokens has no place in a prefix tree")
    bounds = np.cumsum([0, *(len(sequence) for sequence in sequences)])
    paths = [np.arange(start, end) for start, end in pairwise(bounds)]
    return PrefixTree(
        ids=np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(sequence, dtype=np.int64) for sequence in sequences)]),
        positions=np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(len(sequence)) for sequence in sequences)]),
        segments=[Segment(int(start), int(end), None) for start, end in pairwise(bounds)],
        paths=paths,
    )


def _runs(shared: Sequence[int], low: int, high: int, depth: int) -> list[tuple[int, int]]:
    """[low, high) in pieces whose neighbours share more than `depth` tokens."""
    starts = [i for i in range(low, high) if i == low or shared[i] <= depth]
    return list(pairwise([*starts, high])) if starts else []
