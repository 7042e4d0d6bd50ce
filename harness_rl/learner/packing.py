"""Padding-free micro-batches: rows laid end to end, each with its own positions, and the loss terms of their trained tokens.

The one off-by-one of the learner lives in `loss_terms`: the hidden state at index i predicts token i + 1, and no loss term crosses a row's
border. Rows are never cut: one that is longer than a micro-batch is `oversize` and dropped whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness_rl.learner.rows import PackedRow, Row, parse_version


@dataclass(eq=False)
class Pack:
    """One micro-batch: T tokens of R rows, N loss terms."""

    rows: list[int]
    """[R] indices into the batch's rows."""
    bounds: NDArray[np.int64]
    """[R + 1] row r occupies ids[bounds[r]:bounds[r + 1]]."""
    ids: NDArray[np.int64]
    """[T]"""
    positions: NDArray[np.int64]
    """[T] from 0 in each row."""
    predicts: NDArray[np.int64]
    """[N] index into the T hidden states."""
    targets: NDArray[np.int64]
    """[N] the token that hidden state predicts."""
    behaviour: NDArray[np.float32]
    """[N] the engine's logprob of the target (mu)."""
    advantages: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    weights: NDArray[np.float32]
    """[N] share of each term in the mean over the optimizer step; they sum to 1 over all its packs."""
    ages: NDArray[np.int32]
    """[N] optimizer steps since the policy that sampled the target; 0 = the one in training."""

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def terms(self) -> int:
        return len(self.targets)

    def view(self, r: int) -> PackedRow:
        """What this pack holds at row r's place, selected by position alone, for `rows.verify_packed`."""
        start, end = int(self.bounds[r]), int(self.bounds[r + 1])
        here = (self.predicts >= start) & (self.predicts < end)
        return PackedRow(
            ids=self.ids[start:end],
            positions=self.positions[start:end],
            predicts=self.predicts[here] - start,
            targets=self.targets[here],
            behaviour=self.behaviour[here],
            advantages=self.advantages[here],
            temperatures=self.temperatures[here],
        )


def loss_terms(trained: NDArray[np.bool_], bounds: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(predicts, sampled): indices of the hidden states and of the tokens they predict, for every trained token of a pack.

    `trained` is [T]; a row's first token has nothing before it that could predict it, so it is never a term.
    """
    first = np.zeros(len(trained), dtype=bool)
    first[bounds[:-1]] = True
    sampled = np.flatnonzero(trained & ~first)
    return sampled - 1, sampled


def token_ages(row: Row, current: str) -> NDArray[np.int32]:
    """[L] optimizer steps between the policy that sampled each token and `current`; 0 where the token is not sampled.

    A token of another lineage (sampled before a restart) is never taken for one of the current policy: its age is at least 1.
    """
    lineage, step = parse_version(current)
    ages = np.zeros(len(row), dtype=np.int32)
    for span in row.spans:
        for version, start, end in span.versions:
            token_lineage, token_step = parse_version(version)
            ages[start:end] = step - token_step if token_lineage == lineage else max(1, step - token_step)
    return ages


def term_weights(rows: Sequence[Row], normalisation: Literal["token", "rollout"]) -> list[float]:
    """Weight of each trained token of each row, so that they sum to 1 over the optimizer step.

    `token`: the same for every token of the step (DAPO, arXiv 2503.14476: no length bias). `rollout`: each rollout has the same weight,
    shared by its tokens over all its rows (GRPO's per-sample mean, arXiv 2402.03300), so that splitting one changes nothing.
    """
    counts = [int(np.count_nonzero(row.trained)) for row in rows]
    if normalisation == "token":
        total = sum(counts)
        return [1.0 / total if total else 0.0] * len(rows)
    of_rollout: dict[str, int] = {}
    for row, count in zip(rows, counts, strict=True):
        of_rollout[row.rollout_id] = of_rollout.get(row.rollout_id, 0) + count
    rollouts = sum(1 for count in of_rollout.values() if count)
    return [1.0 / (rollouts * of_rollout[row.rollout_id]) if of_rollout[row.rollout_id] else 0.0 for row in rows]


def pack_rows(rows: Sequence[Row], chosen: Sequence[int], budget: int, weights: Sequence[float], current: str) -> list[Pack]:
    """Pack `rows[i] for i in chosen` (weights aligned with `chosen`) into micro-batches of at most `budget` tokens.

    Longest first into the fullest pack that still has room, so that lengths inside a pack are close and few packs are needed. Raises
    ValueError for a row over the budget: the caller has counted it as oversize.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for k in sorted(range(len(chosen)), key=lambda k: (-len(rows[chosen[k]]), k)):
        length = len(rows[chosen[k]])
        if length > budget:
            raise ValueError(f"row {rows[chosen[k]].row_id} has {length} tokens, a micro-batch {budget}")
        fitting = [b for b in range(len(bins)) if room[b] >= length]
        if fitting:
            best = min(fitting, key=lambda b: room[b])
        else:
            best = len(bins)
            bins.append([])
            room.append(budget)
        bins[best].append(k)
        room[best] -= length
    return [_lay_out(rows, [chosen[k] for k in members], [weights[k] for k in members], current) for members in bins]


def _lay_out(rows: Sequence[Row], members: list[int], weights: list[float], current: str) -> Pack:
    picked = [rows[i] for i in members]
    lengths = [len(row) for row in picked]
    bounds = np.cumsum([0, *lengths], dtype=np.int64)
    ids = np.concatenate([row.ids for row in picked]).astype(np.int64)
    predicts, sampled = loss_terms(np.concatenate([row.trained for row in picked]), bounds)
    owner = np.repeat(np.arange(len(picked)), lengths)[sampled]
    return Pack(
        rows=members,
        bounds=bounds,
        ids=ids,
        positions=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]),
        predicts=predicts,
        targets=ids[sampled],
        behaviour=np.concatenate([row.logprobs for row in picked])[sampled],
        advantages=np.array([row.advantage for row in picked], dtype=np.float32)[owner],
        temperatures=np.array([row.temperature for row in picked], dtype=np.float32)[owner],
        weights=np.array(weights, dtype=np.float32)[owner],
        ages=np.concatenate([token_ages(row, current) for row in picked])[sampled],
    )


def split_groups(rows: Sequence[Row], chosen: Sequence[int], parts: int) -> list[list[int]]:
    """`chosen` in at most `parts` minibatches of about equal trained tokens; the rows of a group stay together, in order of arrival."""
    groups: dict[str, list[int]] = {}
    for i in chosen:
        groups.setdefault(rows[i].group_id, []).append(i)
    minibatches: list[list[int]] = [[] for _ in range(min(parts, len(groups)))]
    load = [0] * len(minibatches)
    for members in groups.values():
        lightest = load.index(min(load))
        minibatches[lightest] += members
        load[lightest] += sum(int(np.count_nonzero(rows[i].trained)) for i in members)
    return minibatches
