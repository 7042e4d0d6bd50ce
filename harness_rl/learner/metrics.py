"""What a step did, in numbers: counts and means are over the whole step, never over its last micro-batch.

Every mean is over the tokens of the step with equal weight, whatever the loss normalisation. `logprob_gap` compares engine and learner on
tokens of the very version in training; `mismatch/<cause>` splits all tokens by why the two may differ (see mismatch.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness_rl.learner.mismatch import CAUSES, token_ages, token_causes, worst_rows
from harness_rl.learner.packing import Pack
from harness_rl.learner.rows import Row, RowState

Floats = NDArray[np.float32]


@dataclass
class TermLog:
    """Per-token values of a step, collected pack by pack."""

    losses: list[Floats] = field(default_factory=list)
    """Already weighted: their sum is the loss."""
    logprobs: list[Floats] = field(default_factory=list)
    old: list[Floats] = field(default_factory=list)
    behaviour: list[Floats] = field(default_factory=list)
    entropies: list[Floats] = field(default_factory=list)
    ages: list[NDArray[np.int32]] = field(default_factory=list)
    causes: list[NDArray[np.uint8]] = field(default_factory=list)
    owner: list[NDArray[np.int64]] = field(default_factory=list)
    """Index of each token's row in the batch."""
    position: list[NDArray[np.int64]] = field(default_factory=list)
    """Of each token in its row."""
    flags: dict[str, list[NDArray[np.bool_]]] = field(default_factory=dict)
    values: dict[str, list[Floats]] = field(default_factory=dict)

    def summary(self) -> dict[str, float]:
        """Metrics of the trained tokens; empty when there were none."""
        old, behaviour, logprobs, ages = (_join(x) for x in (self.old, self.behaviour, self.logprobs, self.ages))
        if not len(old):
            return {}
        ratio = np.exp((logprobs - old).astype(np.float64))
        metrics = {
            "loss": float(np.sum(_join(self.losses), dtype=np.float64)),
            "entropy": float(np.mean(_join(self.entropies), dtype=np.float64)),
            "ratio": float(ratio.mean()),
            "kl": _k3(old, behaviour),
            "staleness/mean": float(ages.mean()),
            "staleness/max": float(ages.max()),
            **gap_metrics("logprob_gap", old[ages == 0], behaviour[ages == 0]),
        }
        causes = _join(self.causes)
        for index, cause in enumerate(CAUSES):
            metrics |= gap_metrics(f"mismatch/{cause}", old[causes == index], behaviour[causes == index])
        for name, parts in self.flags.items():
            metrics[f"{name}_ratio"] = float(np.mean(_join(parts)))
        for name, values in self.values.items():
            metrics[name] = float(np.mean(_join(values), dtype=np.float64))
        if "clip_low" in self.flags:
            metrics["clip_ratio"] = metrics["clip_low_ratio"] + metrics["clip_high_ratio"]
        return metrics

    def date(self, pack: Pack, rows: Sequence[Row], current: str, kv: Literal["recompute", "keep"]) -> None:
        """Add what depends on the policy in training: the age of each term's token, and why engine and learner may differ on it."""
        sampled = pack.sampled
        for r, i in enumerate(pack.rows):
            mine = sampled[pack.term_bounds[r] : pack.term_bounds[r + 1]]
            self.ages.append(token_ages(rows[i], current)[mine])
            self.causes.append(token_causes(rows[i], current, kv)[mine])
        self.owner.append(np.asarray(pack.rows)[pack.sequence])
        self.position.append(sampled)

    def worst(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """The ten rows on which engine and learner differ most; see `mismatch.worst_rows`."""
        if not self.old:
            return []
        owner, position = _join(self.owner), _join(self.position)
        return worst_rows(rows, owner, position, _join(self.old), _join(self.behaviour), _join(self.causes))


def gap_metrics(name: str, learner: Floats, engine: Floats) -> dict[str, float]:
    """tokens, mean, p99 and max of |learner - engine|, kl (k3 estimate of KL(engine || learner), Schulman 2020), and the share of tokens
    whose probability differs by more than a tenth. Only `tokens` when there are none."""
    if not len(learner):
        return {f"{name}/tokens": 0.0}
    gap = np.abs(learner.astype(np.float64) - engine)
    return {
        f"{name}/tokens": float(len(gap)),
        f"{name}/mean": float(gap.mean()),
        f"{name}/p99": float(np.quantile(gap, 0.99, method="higher")),
        f"{name}/max": float(gap.max()),
        f"{name}/kl": _k3(learner, engine),
        f"{name}/over_10_percent": float(np.mean(gap > 0.1)),
    }


def row_metrics(rows: Iterable[Row], states: Mapping[str, RowState]) -> dict[str, float]:
    """Rows by state, and the tokens that could train by theirs: each is counted once. A stale token is `stale` in any row; another has its
    row's state. `tokens/rows` are all that the trained rows hold, context included."""
    metrics = {f"rows/{state.value}": 0.0 for state in RowState} | {f"tokens/{state.value}": 0.0 for state in RowState}
    held = 0
    for row in rows:
        state = states[row.row_id]
        metrics[f"rows/{state.value}"] += 1
        metrics[f"tokens/{RowState.STALE.value}"] += int(np.count_nonzero((row.mask == 1) & (row.stale == 1)))
        metrics[f"tokens/{state.value}"] += int(np.count_nonzero(row.trained))
        held += len(row) if state is RowState.TRAINED else 0
    return metrics | {"tokens/rows": float(held)}


def _k3(learner: Floats, engine: Floats) -> float:
    """mean of r - 1 - log r with r = pi_learner / pi_engine on tokens that the engine sampled: unbiased for KL(engine || learner), never
    negative."""
    log_ratio = learner.astype(np.float64) - engine
    return float(np.mean(np.expm1(log_ratio) - log_ratio))


def _join(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
