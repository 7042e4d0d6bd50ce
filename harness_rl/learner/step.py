"""One optimizer step (or one per minibatch) on a batch of rows: admit, pack, prove, train, account.

Every row ends in exactly one state. A row that is not what the engine was given and sampled is left out before the forward pass, by hashes
recomputed from the packed arrays; rows whose gradient was not finite changed nothing, and are rejected.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness_rl.errors import InvariantError, LearnerError
from harness_rl.learner.metrics import TermLog, row_metrics
from harness_rl.learner.packing import Pack, pack_rows, split_groups, term_weights
from harness_rl.learner.policy import Policy
from harness_rl.learner.ranks import ALONE, Ranks
from harness_rl.learner.rows import PackedRow, Row, RowMismatch, RowState, verify_packed, verify_row
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.update import Clock, PackValues, Updater, empty_packs


@dataclass
class StepReport:
    states: dict[str, RowState]
    """Of every row, by row id."""
    reasons: dict[str, str]
    """Of the rejected rows."""
    metrics: dict[str, float] = field(default_factory=dict)
    worst: list[dict[str, Any]] = field(default_factory=list)
    """The ten rows on which engine and learner differ most (see mismatch.worst_rows)."""
    consumed: list[tuple[Row, PackedRow]] = field(default_factory=list)
    """The trained rows with what the loss consumed of each."""
    updated: bool = False
    """False: the weights are what they were (nothing to train, or a gradient that was not finite)."""


@dataclass
class Prepared:
    """A batch before its first forward: every row has a state, those to be trained are packed and proven."""

    rows: Sequence[Row]
    states: dict[str, RowState]
    reasons: dict[str, str]
    minibatches: list[list[Pack]]
    seconds: float
    """What it took."""


class Trainer:
    """Rank 0's part of a step: everything but the computing, which the updater does on all ranks."""

    def __init__(self, policy: Policy, spec: LearnerSpec, reference: Policy | None = None, ranks: Ranks = ALONE) -> None:
        """`reference` is the policy of the KL term; it is needed where `spec.kl_beta` is not 0, and never trained."""
        self.policy, self.spec = policy, spec
        self.updater = Updater(policy, spec, reference, ranks)
        self.shares = spec.packing == "auto" and policy.shares_prefixes
        self.rejected = 0
        self._skipped_in_a_row = 0

    def prepare(self, rows: Sequence[Row], rollouts: int | None = None) -> Prepared:
        """Admit, pack and prove one batch. Reads nothing that a step changes: another thread may do it while one trains.

        `rollouts`: the scored ones of the batch's groups, also those that gave no row; None: those of the rows.
        """
        began = time.perf_counter()
        states, reasons = self._admit(rows)
        counted = [i for i, row in enumerate(rows) if _counts(row, states[row.row_id])]
        parts = split_groups(rows, counted, self.spec.minibatches)
        share = (len({row.rollout_id for row in rows}) if rollouts is None else rollouts) / max(1, len(parts))
        minibatches = [self._pack(rows, members, states, reasons, share) for members in parts]
        return Prepared(rows, states, reasons, minibatches, time.perf_counter() - began)

    def step(self, batch: Sequence[Row] | Prepared, current: str) -> StepReport:
        """Train on one batch; `current` is the version of the weights as they are. Raises InvariantError or LearnerError at a bound."""
        clock = Clock(self.policy.device)
        with clock("pack"):
            prepared = batch if isinstance(batch, Prepared) else self.prepare(batch)
        rows, states, reasons = prepared.rows, prepared.states, prepared.reasons
        # The largest first, so that the packs that ranks run at one time are of like size.
        minibatches = [sorted(packs, key=lambda pack: -pack.tokens) for packs in prepared.minibatches if packs]
        self._count_rejected(reasons)
        self.updater.ranks.order("train", minibatches)
        found, norms = self.updater.train(minibatches, clock)
        log, updated = TermLog(), False
        for packs, values, norm in zip(minibatches, found, norms, strict=True):
            for pack, of_pack in zip(packs, values, strict=True):
                _record(log, pack, of_pack)
                log.date(pack, rows, current, self.spec.sync_kv)
            if math.isfinite(norm):
                updated = True
                continue
            for row in (rows[i] for pack in packs for i in pack.rows):
                states[row.row_id] = RowState.REJECTED
                reasons[row.row_id] = "its step was skipped: the gradient is not finite"
        self._skipped_in_a_row = 0 if updated or not norms else self._skipped_in_a_row + 1
        if self._skipped_in_a_row > self.spec.max_skipped_steps:
            raise LearnerError(f"{self._skipped_in_a_row} steps in a row had a gradient that is not finite; the last good weights are kept")
        consumed = [(rows[i], pack.view(r)) for packs in minibatches for pack in packs for r, i in enumerate(pack.rows)]
        metrics = self._metrics(rows, states, minibatches, log, norms, clock)
        return StepReport(states, reasons, metrics, log.worst(rows), consumed, updated)

    def _admit(self, rows: Sequence[Row]) -> tuple[dict[str, RowState], dict[str, str]]:
        """The state of every row before packing; TRAINED means that it goes on."""
        states: dict[str, RowState] = {}
        reasons: dict[str, str] = {}
        for row in rows:
            if row.row_id in states:
                raise InvariantError(f"row {row.row_id} is twice in a batch")
            states[row.row_id] = self._state(row, reasons)
        return states, reasons

    def _state(self, row: Row, reasons: dict[str, str]) -> RowState:
        try:
            verify_row(row)
        except RowMismatch as mismatch:
            reasons[row.row_id] = str(mismatch)
            return RowState.REJECTED
        if not row.mask.any():
            reasons[row.row_id] = f"row {row.row_id}: no token of it may be trained"
            return RowState.REJECTED
        if not row.trained.any():
            return RowState.STALE
        if len(row) > self.spec.longest_row:
            return RowState.OVERSIZE
        if row.without_credit and self.updater.objective.uses_advantage:
            return RowState.ZERO_ADVANTAGE
        return RowState.TRAINED

    def _pack(
        self, rows: Sequence[Row], members: Sequence[int], states: dict[str, RowState], reasons: dict[str, str], rollouts: float
    ) -> list[Pack]:
        """Packs of those of `members` that are trained, proven row by row; the others only count in the weights. A row whose packed form is
        wrong is rejected and the rest packed anew."""
        members = list(members)
        while any(states[rows[i].row_id] is RowState.TRAINED for i in members):
            weights = term_weights([rows[i] for i in members], self.spec.loss_normalisation, self.spec.loss_constant, rollouts)
            trained = [(i, weight) for i, weight in zip(members, weights, strict=True) if states[rows[i].row_id] is RowState.TRAINED]
            chosen, of_chosen = [i for i, _ in trained], [weight for _, weight in trained]
            packs = pack_rows(rows, chosen, self.spec.micro_batch_tokens, of_chosen, self.shares, self.spec.longest_row)
            wrong = {i: mismatch for pack in packs for i, mismatch in _mismatches(rows, pack)}
            if not wrong:
                return packs
            for i, mismatch in wrong.items():
                states[rows[i].row_id] = RowState.REJECTED
                reasons[rows[i].row_id] = str(mismatch)
            members = [i for i in members if i not in wrong]
        return []

    def _count_rejected(self, reasons: dict[str, str]) -> None:
        self.rejected += len(reasons)
        if self.rejected > self.spec.max_rejected_rows:
            raise InvariantError(
                f"{self.rejected} rows were rejected, {self.spec.max_rejected_rows} are allowed (learner.max_rejected_rows): "
                + next(iter(reasons.values()))
            )

    def _metrics(
        self,
        rows: Sequence[Row],
        states: dict[str, RowState],
        minibatches: Sequence[Sequence[Pack]],
        log: TermLog,
        norms: Sequence[float],
        clock: Clock,
    ) -> dict[str, float]:
        metrics = row_metrics(rows, states) | log.summary()
        metrics["tokens/forwarded"] = float(sum(pack.tokens for packs in minibatches for pack in packs))
        metrics["updates"] = float(sum(math.isfinite(norm) for norm in norms))
        metrics["updates_skipped"] = len(norms) - metrics["updates"]
        metrics["learning_rate"] = float(self.updater.optimizer.param_groups[0]["lr"])
        if norms:
            metrics["grad_norm"] = max(norms)
            metrics["grad_signal_share"] = self.updater.signal.value
        ranks = self.updater.ranks
        metrics["micro_batches"] = float(sum(len(packs) for packs in minibatches))
        metrics["micro_batches/empty"] = float(sum(empty_packs(packs, ranks) for packs in minibatches))
        spent = sum(clock.seconds.get(name, 0.0) for name in ("forward", "backward", "optimizer"))
        metrics["tokens_per_second"] = metrics["tokens/forwarded"] / spent if spent else 0.0
        return metrics | {f"seconds/{name}": seconds for name, seconds in clock.seconds.items()}

    def state(self) -> dict[str, Any]:
        """What a resumed trainer needs besides weights and optimizer; the other ranks ask their updaters at the same time."""
        return self.updater.state() | {"rejected": self.rejected, "skipped_in_a_row": self._skipped_in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        self.updater.restore(state)
        self.rejected, self._skipped_in_a_row = state["rejected"], state["skipped_in_a_row"]


def _counts(row: Row, state: RowState) -> bool:
    """Whether its tokens and rollout are part of what the loss is divided by. An advantage of 0 is one; a row that its group left out has
    none."""
    return state is RowState.TRAINED or (state is RowState.ZERO_ADVANTAGE and not row.left_out)


def _mismatches(rows: Sequence[Row], pack: Pack) -> Iterator[tuple[int, RowMismatch]]:
    for r, i in enumerate(pack.rows):
        try:
            verify_packed(rows[i], pack.view(r))
        except RowMismatch as mismatch:
            yield i, mismatch


def _record(log: TermLog, pack: Pack, found: PackValues) -> None:
    log.losses.append(found.losses)
    log.logprobs.append(found.logprobs)
    log.old.append(found.old)
    log.behaviour.append(np.asarray(pack.behaviour))
    log.entropies.append(found.entropies)
    for name, flag in found.flags.items():
        log.flags.setdefault(name, []).append(flag)
    for name, value in found.values.items():
        log.values.setdefault(name, []).append(value)
