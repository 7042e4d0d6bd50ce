"""Whose tokens become too old to train: by task and by duration, so that slow tasks are never starved in silence.

Staleness belongs to tokens: a rollout with stale tokens stays in its group's baseline, but a task whose tokens are always too old is
sampled and never learned. `StaleWatch` says so once for each such task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness_rl.orchestrator.batches import Batch

QUARTERS = ("fastest", "fast", "slow", "slowest")


@dataclass(frozen=True)
class Used:
    """One rollout's captured tokens that could train, and how many of them are too old."""

    task: str
    seconds: float
    tokens: int
    stale: int


def used_rollouts(batch: Batch) -> list[Used]:
    """The rollouts of the batch's groups that gave rows."""
    tokens: Counter[str] = Counter()
    stale: Counter[str] = Counter()
    for row in batch.rows:
        tokens[row.rollout_id] += int(np.count_nonzero(row.mask))
        stale[row.rollout_id] += int(np.count_nonzero((row.mask == 1) & (row.stale == 1)))
    members = ((group.task, rollout) for group in batch.groups for rollout in group.rollouts)
    return [Used(task, r.seconds, tokens[r.rollout_id], stale[r.rollout_id]) for task, r in members if tokens[r.rollout_id]]


def stale_metrics(used: list[Used]) -> dict[str, float]:
    """Shares of stale tokens: of the step, of each of its tasks, and of each quarter of its rollouts by duration. Empty without any."""
    if not used:
        return {}
    metrics = {"sample/stale_share": _share(used)}
    for task in dict.fromkeys(rollout.task for rollout in used):
        metrics[f"sample/stale_share/task/{task}"] = _share(rollout for rollout in used if rollout.task == task)
    ordered = sorted(used, key=lambda rollout: rollout.seconds)
    for name, part in zip(QUARTERS, np.array_split(np.arange(len(ordered)), len(QUARTERS)), strict=True):
        if len(part):
            metrics[f"sample/stale_share/{name}"] = _share(ordered[i] for i in part)
    return metrics


def _share(used: Iterable[Used]) -> float:
    rollouts = list(used)
    return sum(rollout.stale for rollout in rollouts) / sum(rollout.tokens for rollout in rollouts)


@dataclass
class StaleWatch:
    """Over the whole run, its resumes included: tells of a task of which most is sampled in vain."""

    alarm_share: float = 0.5
    min_rollouts: int = 16
    """Of a task, before anything is said of it."""
    _rollouts: Counter[str] = field(default_factory=Counter)
    _tokens: Counter[str] = field(default_factory=Counter)
    _stale: Counter[str] = field(default_factory=Counter)
    _told: set[str] = field(default_factory=set)

    def observe(self, used: list[Used]) -> list[str]:
        """One line for each task that has just come to the bound."""
        for rollout in used:
            self._rollouts[rollout.task] += 1
            self._tokens[rollout.task] += rollout.tokens
            self._stale[rollout.task] += rollout.stale
        overall = self._stale.total() / max(1, self._tokens.total())
        lines = []
        for task in dict.fromkeys(rollout.task for rollout in used):
            share = self._stale[task] / self._tokens[task]
            if task not in self._told and self._rollouts[task] >= self.min_rollouts and share > self.alarm_share:
                self._told.add(task)
                lines.append(
                    f"task {task}: {share:.0%} of its sampled tokens were too old to train (all tasks: {overall:.0%}); "
                    "raise rollout.max_staleness, or lower rollout.max_concurrent_rollouts"
                )
        return lines

    @classmethod
    def after(cls, step: int, kept: Mapping[str, Any] | None) -> StaleWatch:
        """As it was after `step`, out of what `keep` gave; a new one where that does not know."""
        found = (kept or {}).get(str(step))
        if found is None:
            return cls()
        return cls(
            _rollouts=Counter(found["rollouts"]), _tokens=Counter(found["tokens"]), _stale=Counter(found["stale"]), _told=set(found["told"])
        )

    def keep(self, step: int, kept: Mapping[str, Any] | None, durable: int) -> dict[str, Any]:
        """`kept` (plain JSON) with the counts up to `step`, without what no resume can ask for: steps before the checkpoint `durable`."""
        mine = {"rollouts": self._rollouts, "tokens": self._tokens, "stale": self._stale, "told": sorted(self._told)}
        return {at: state for at, state in (kept or {}).items() if durable <= int(at) < step} | {str(step): mine}
