"""Padding-free micro-batches: rows folded into a prefix tree, each with its own positions, and the loss terms of their trained tokens.

The one off-by-one of the learner lives in `loss_terms`: the hidden state of a row's token i predicts its token i + 1, so that no loss term
leaves its row's path through the tree. Rows are never cut: one that is longer than a micro-batch has a pack of its own that several ranks
share (see context.py), and where they cannot it is `oversize` and dropped whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness_rl.learner.prefixtree import PrefixTree, fold, prefix_order, shared_prefix, side_by_side
from harness_rl.learner.rows import PackedRow, Row

Normalisation = Literal["token", "rollout", "constant"]


@dataclass(eq=False)
class Pack:
    """One micro-batch: T tokens of R rows, N loss terms. Rows may share tokens, never terms."""

    rows: list[int]
    """[R] indices into the batch's rows."""
    tree: PrefixTree
    """Its sequences are the rows."""
    term_bounds: NDArray[np.int64]
    """[R + 1] row r has terms [term_bounds[r], term_bounds[r + 1])."""
    predicts: NDArray[np.int64]
    """[N] index into the T hidden states."""
    targets: NDArray[np.int64]
    """[N] the token that hidden state predicts."""
    behaviour: NDArray[np.float32]
    """[N] the engine's logprob of the target (mu)."""
    advantages: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    weights: NDArray[np.float32]
    """[N] share of each term in the optimizer step (see `term_weights`)."""
    sequence: NDArray[np.int64]
    """[N] place in `rows` of the row of each term."""
    split: bool = False
    """Its one row is more than one rank may hold: a context group's ranks share it."""

    @property
    def tokens(self) -> int:
        return len(self.tree.ids)

    @property
    def terms(self) -> int:
        return len(self.targets)

    @property
    def sampled(self) -> NDArray[np.int64]:
        """[N] place of each target in its row."""
        return self.tree.positions[self.predicts] + 1

    def view(self, r: int) -> PackedRow:
        """What the model is given and the loss reads for row r, for `rows.verify_packed`. A term off the row's path predicts from -1."""
        path, terms = self.tree.paths[r], slice(int(self.term_bounds[r]), int(self.term_bounds[r + 1]))
        return PackedRow(
            ids=self.tree.ids[path],
            positions=self.tree.positions[path],
            predicts=np.where(np.isin(self.predicts[terms], path), self.tree.positions[self.predicts[terms]], -1),
            targets=self.targets[terms],
            behaviour=self.behaviour[terms],
            advantages=self.advantages[terms],
            temperatures=self.temperatures[terms],
        )


def loss_terms(trained: NDArray[np.bool_], path: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(predicts, sampled) of one row: the hidden states, by index into the tree, and the row's tokens that they predict.

    `trained` and `path` are [L]; a row's first token has nothing before it that could predict it, so it is never a term.
    """
    sampled = np.flatnonzero(trained[1:]) + 1
    return path[sampled - 1], sampled


def term_weights(rows: Sequence[Row], normalisation: Normalisation, constant: float = 0.0, rollouts: float = 0.0) -> list[float]:
    """Weight of each trained token of each row. `rows` are all that count in the optimizer step, also those whose advantage is 0 and whose
    forward is spared: by token and by rollout the weights of them all sum to 1.

    `token`: the same for every token of the step (DAPO, arXiv 2503.14476: no length bias). `rollout`: each rollout has the same weight,
    shared by its tokens over all its rows (GRPO's per-sample mean, arXiv 2402.03300), so that splitting one changes nothing. `constant`:
    1 / (`rollouts` * `constant` tokens), whatever they hold (Dr. GRPO, arXiv 2503.20783): longer ones push more. There `rollouts` are all
    scored ones of the step's groups, those without advantage or rows included.
    """
    if normalisation == "constant":
        return [1.0 / (rollouts * constant)] * len(rows)
    counts = [int(np.count_nonzero(row.trained)) for row in rows]
    if normalisation == "token":
        total = sum(counts)
        return [1.0 / total if total else 0.0] * len(rows)
    of_rollout: dict[str, int] = {}
    for row, count in zip(rows, counts, strict=True):
        of_rollout[row.rollout_id] = of_rollout.get(row.rollout_id, 0) + count
    trained = sum(1 for count in of_rollout.values() if count)
    return [1.0 / (trained * of_rollout[row.rollout_id]) if of_rollout[row.rollout_id] else 0.0 for row in rows]


def pack_rows(
    rows: Sequence[Row], chosen: Sequence[int], budget: int, weights: Sequence[float], share: bool = True, longest: int = 0
) -> list[Pack]:
    """Pack `rows[i] for i in chosen` (weights aligned with `chosen`) into micro-batches of at most `budget` tokens, shared ones once.

    Rows that begin alike stay together; such families go largest first into the fullest pack that still has room. Without `share` each row
    lies whole beside the others. A row over the budget, of up to `longest` tokens, is a pack that is split, and they come first. Raises
    ValueError for a longer one: the caller has counted it as oversize.
    """
    for i in chosen:
        if len(rows[i]) > max(budget, longest):
            raise ValueError(f"row {rows[i].row_id} has {len(rows[i])} tokens, a micro-batch {max(budget, longest)}")
    alone = [_lay_out(rows, [i], [weight], share, split=True) for i, weight in zip(chosen, weights, strict=True) if len(rows[i]) > budget]
    kept = [k for k, i in enumerate(chosen) if len(rows[i]) <= budget]
    chosen, weights = [chosen[k] for k in kept], [weights[k] for k in kept]
    sequences = [rows[i].ids for i in chosen]
    found = _families(sequences, budget) if share else [([k], len(ids)) for k, ids in enumerate(sequences)]
    families = sorted(found, key=lambda family: -family[1])
    bins: list[list[int]] = []
    room: list[int] = []
    for members, size in families:
        fitting = [b for b in range(len(bins)) if room[b] >= size]
        if fitting:
            best = min(fitting, key=lambda b: room[b])
        else:
            best = len(bins)
            bins.append([])
            room.append(budget)
        bins[best] += members
        room[best] -= size
    return alone + [_lay_out(rows, [chosen[k] for k in members], [weights[k] for k in members], share) for members in bins]


def _families(sequences: Sequence[NDArray[np.int32]], budget: int) -> list[tuple[list[int], int]]:
    """(members, tokens without the shared ones) of runs of sequences that begin alike, each run within the budget."""
    families: list[tuple[list[int], int]] = []
    before: int | None = None
    for k in prefix_order(sequences):
        shared = 0 if before is None else shared_prefix(sequences[before], sequences[k])
        more = len(sequences[k]) - shared
        if shared and families[-1][1] + more <= budget:
            families[-1] = ([*families[-1][0], k], families[-1][1] + more)
        else:
            families.append(([k], len(sequences[k])))
        before = k
    return families


def _lay_out(rows: Sequence[Row], members: list[int], weights: list[float], share: bool, split: bool = False) -> Pack:
    picked = [rows[i] for i in members]
    tree = (fold if share else side_by_side)([row.ids for row in picked])
    found = [loss_terms(row.trained, path) for row, path in zip(picked, tree.paths, strict=True)]
    counts = [len(sampled) for _, sampled in found]

    def of_terms(arrays: Iterable[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([array[sampled] for array, (_, sampled) in zip(arrays, found, strict=True)])

    def of_rows(values: Iterable[float]) -> NDArray[np.float32]:
        return np.repeat(np.array(list(values), dtype=np.float32), counts)

    return Pack(
        rows=members,
        tree=tree,
        term_bounds=np.cumsum([0, *counts], dtype=np.int64),
        predicts=np.concatenate([predicts for predicts, _ in found]),
        targets=of_terms(row.ids for row in picked).astype(np.int64),
        behaviour=of_terms(row.logprobs for row in picked),
        advantages=of_terms(row.credit for row in picked),
        temperatures=of_rows(row.temperature for row in picked),
        weights=of_rows(weights),
        sequence=np.repeat(np.arange(len(members)), counts),
        split=split,
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
