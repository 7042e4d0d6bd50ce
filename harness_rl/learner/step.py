"""One optimizer step (or one per minibatch) on a batch of rows: admit, pack, prove, forward, loss, backward, update.

Every row ends in exactly one state. A row that is not what the engine was given and sampled is left out before the forward pass, by hashes
recomputed from the packed arrays; a gradient that is not finite changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harness_rl.errors import InvariantError, LearnerError
from harness_rl.learner import objectives, rng
from harness_rl.learner.metrics import TermLog, row_metrics
from harness_rl.learner.objectives.base import Terms, TokenLoss
from harness_rl.learner.packing import Pack, pack_rows, split_groups, term_weights
from harness_rl.learner.policy import Policy
from harness_rl.learner.rows import PackedRow, Row, RowMismatch, RowState, verify_packed, verify_row
from harness_rl.learner.signal import SignalShare
from harness_rl.learner.spec import LearnerSpec


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


class Clock:
    """Seconds by name; on a GPU each span waits for the work it started."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self._cuda:
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class Trainer:
    def __init__(self, policy: Policy, spec: LearnerSpec, reference: Policy | None = None) -> None:
        """`reference` is the policy of the KL term; it is needed where `spec.kl_beta` is not 0, and never trained."""
        self.policy, self.spec, self.reference = policy, spec, reference
        self.objective = objectives.build(spec)
        self.shares = spec.packing == "auto" and policy.shares_prefixes
        if self.objective.needs_reference and reference is None:
            raise ValueError("kl_beta is not 0 and there is no reference policy")
        self.parameters = [p for p in policy.model.parameters() if p.requires_grad]
        decay = [p for p in self.parameters if p.ndim >= 2]
        rest = [p for p in self.parameters if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": spec.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=spec.learning_rate,
            betas=(spec.adam_beta1, spec.adam_beta2),
            eps=spec.adam_epsilon,
            fused=True,
        )
        self.signal = SignalShare(spec.adam_beta1)
        self.updates = 0
        """Optimizer steps done, over all lineages."""
        self.rejected = 0
        self._skipped_in_a_row = 0

    def prepare(self, rows: Sequence[Row]) -> Prepared:
        """Admit, pack and prove one batch. Reads nothing that a step changes: another thread may do it while one trains."""
        began = time.perf_counter()
        states, reasons = self._admit(rows)
        chosen = [i for i, row in enumerate(rows) if states[row.row_id] is RowState.TRAINED]
        minibatches = [self._pack(rows, members, states, reasons) for members in split_groups(rows, chosen, self.spec.minibatches)]
        return Prepared(rows, states, reasons, minibatches, time.perf_counter() - began)

    def step(self, batch: Sequence[Row] | Prepared, current: str) -> StepReport:
        """Train on one batch; `current` is the version of the weights as they are. Raises InvariantError or LearnerError at a bound."""
        clock = Clock(self.policy.device)
        with clock("pack"):
            prepared = batch if isinstance(batch, Prepared) else self.prepare(batch)
        rows, states, reasons, minibatches = prepared.rows, prepared.states, prepared.reasons, prepared.minibatches
        self._count_rejected(reasons)
        with clock("forward"):
            old = self._old_logprobs(minibatches)
        log, norms, updated = TermLog(), [], False
        for packs in minibatches:
            if not packs:
                continue
            for pack in packs:
                self._accumulate(pack, old.get(id(pack)), log, clock)
                log.date(pack, rows, current)
            with clock("optimizer"):
                norms.append(self._update())
            if math.isfinite(norms[-1]):
                updated = True
            else:
                for row in (rows[i] for pack in packs for i in pack.rows):
                    states[row.row_id] = RowState.REJECTED
                    reasons[row.row_id] = "its step was skipped: the gradient is not finite"
        self._skipped_in_a_row = 0 if updated or not norms else self._skipped_in_a_row + 1
        if self._skipped_in_a_row > self.spec.max_skipped_steps:
            raise LearnerError(f"{self._skipped_in_a_row} steps in a row had a gradient that is not finite; the last good weights are kept")
        consumed = [(rows[i], pack.view(r)) for packs in minibatches for pack in packs for r, i in enumerate(pack.rows)]
        forwarded = sum(pack.tokens for packs in minibatches for pack in packs)
        metrics = self._metrics(rows, states, forwarded, log, norms, clock)
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
        if len(row) > self.spec.micro_batch_tokens:
            return RowState.OVERSIZE
        if row.without_credit and self.objective.uses_advantage:
            return RowState.ZERO_ADVANTAGE
        return RowState.TRAINED

    def _pack(self, rows: Sequence[Row], members: Sequence[int], states: dict[str, RowState], reasons: dict[str, str]) -> list[Pack]:
        """Packs of `members`, proven row by row. A row whose packed form is wrong is rejected and the rest packed anew."""
        members = list(members)
        while members:
            groups = {rows[i].group_id for i in members}
            rollouts = len({row.rollout_id for row in rows if row.group_id in groups})
            picked = [rows[i] for i in members]
            weights = term_weights(picked, self.spec.loss_normalisation, self.spec.loss_constant, rollouts)
            packs = pack_rows(rows, members, self.spec.micro_batch_tokens, weights, self.shares)
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

    def _old_logprobs(self, minibatches: Sequence[Sequence[Pack]]) -> dict[int, torch.Tensor]:
        """Logprobs at the start of the batch, by pack. Empty for one minibatch: there the training forward itself gives them, exactly."""
        if len(minibatches) <= 1:
            return {}
        with torch.no_grad():
            return {id(pack): self.policy.score(pack)[0] for packs in minibatches for pack in packs}

    @torch.no_grad()
    def _reference_logprobs(self, pack: Pack) -> torch.Tensor | None:
        return self.reference.score(pack)[0] if self.reference is not None and self.objective.needs_reference else None

    def _accumulate(self, pack: Pack, old: torch.Tensor | None, log: TermLog, clock: Clock) -> None:
        """Add the pack's share of the step's gradient."""

        def put(array: Any) -> torch.Tensor:
            return torch.from_numpy(array).to(self.policy.device)

        with clock("forward"):
            logprobs, entropies = self.policy.score(pack)
            old = logprobs.detach() if old is None else old
            reference = self._reference_logprobs(pack)
            result = self.objective(Terms(logprobs, old, put(pack.behaviour), put(pack.advantages), put(pack.sequence), reference))
            weighted = result.loss * put(pack.weights)
        with clock("backward"):
            weighted.sum().backward()
        _record(log, pack, weighted, logprobs, old, entropies, result)

    def _update(self) -> float:
        """Clip and apply the accumulated gradient; returns its norm before clipping. A norm that is not finite applies nothing."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.spec.max_grad_norm))
        if math.isfinite(norm):
            self.signal.observe(self._along_momentum(), min(norm, self.spec.max_grad_norm) ** 2)
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _along_momentum(self) -> float:
        """Inner product of the gradient and Adam's first moment as the last update left it."""
        moments = ((p.grad, self.optimizer.state[p].get("exp_avg")) for p in self.parameters if p.grad is not None)
        return sum(float(torch.dot(grad.flatten(), moment.flatten())) for grad, moment in moments if moment is not None)

    def learning_rate(self) -> float:
        """Of the next update: by the schedule; times the gradient's share of signal where that is asked for."""
        share = scheduled(self.updates, self.spec.warmup_steps, self.spec.total_updates, self.spec.schedule)
        return self.spec.learning_rate * share * (self.signal.value if self.spec.scale_by_signal else 1.0)

    def _metrics(
        self, rows: Sequence[Row], states: dict[str, RowState], forwarded: int, log: TermLog, norms: Sequence[float], clock: Clock
    ) -> dict[str, float]:
        metrics = row_metrics(rows, states) | log.summary()
        metrics["tokens/forwarded"] = float(forwarded)
        metrics["updates"] = float(sum(math.isfinite(norm) for norm in norms))
        metrics["updates_skipped"] = len(norms) - metrics["updates"]
        metrics["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        if norms:
            metrics["grad_norm"] = max(norms)
            metrics["grad_signal_share"] = self.signal.value
        spent = sum(clock.seconds.get(name, 0.0) for name in ("forward", "backward", "optimizer"))
        metrics["tokens_per_second"] = metrics["tokens/forwarded"] / spent if spent else 0.0
        return metrics | {f"seconds/{name}": seconds for name, seconds in clock.seconds.items()}

    def state(self) -> dict[str, Any]:
        """What a resumed trainer needs besides the weights."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "signal": self.signal.state(),
            "updates": self.updates,
            "rejected": self.rejected,
            "skipped_in_a_row": self._skipped_in_a_row,
            "rng": rng.states(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.signal.restore(state["signal"])
        self.updates, self.rejected, self._skipped_in_a_row = state["updates"], state["rejected"], state["skipped_in_a_row"]
        rng.restore(state["rng"])


def scheduled(done: int, warmup: int, total: int, schedule: str) -> float:
    """Share of the learning rate for the update after `done` ones: linear up to 1 over `warmup` updates, then 1, or down to 0 at `total`
    along a line or half a cosine."""
    if done < warmup:
        return (done + 1) / warmup
    if schedule == "constant":
        return 1.0
    gone = min(1.0, (done - warmup) / (total - warmup))
    return 1.0 - gone if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))


def _mismatches(rows: Sequence[Row], pack: Pack) -> Iterator[tuple[int, RowMismatch]]:
    for r, i in enumerate(pack.rows):
        try:
            verify_packed(rows[i], pack.view(r))
        except RowMismatch as mismatch:
            yield i, mismatch


def _record(
    log: TermLog,
    pack: Pack,
    weighted: torch.Tensor,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    entropies: torch.Tensor,
    result: TokenLoss,
) -> None:
    def take(tensor: torch.Tensor) -> Any:
        return tensor.detach().cpu().numpy()

    log.losses.append(take(weighted))
    log.logprobs.append(take(logprobs))
    log.old.append(take(old))
    log.behaviour.append(np.asarray(pack.behaviour))
    log.entropies.append(take(entropies))
    for name, flag in result.flags.items():
        log.flags.setdefault(name, []).append(take(flag))
    for name, value in result.values.items():
        log.values.setdefault(name, []).append(take(value))
