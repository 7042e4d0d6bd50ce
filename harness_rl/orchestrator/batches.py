"""From finished groups to the batch of a step.

A rollout counts once: its advantage is computed from the group's scored rollouts and stamped on each of its rows, however many they are.
Groups whose rewards are all equal carry no signal; they are counted and replaced, up to a bound, and then the step is short.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from harness_rl.learner.advantages import balanced_group_advantages, balanced_selection, group_advantages, has_signal
from harness_rl.learner.rows import Row, build_rows
from harness_rl.orchestrator.credit import AdvantageFunction, ask, give
from harness_rl.orchestrator.rollout import Rollout

SHAPING = 0.1
"""Up to this spread, rewards of a group whose rollouts all had one outcome are shaping (a penalty for length, say), and not divided by
their standard deviation: that would make a full-size signal of them."""


@dataclass
class Group:
    group_id: str
    task: str
    rollouts: list[Rollout]

    @property
    def rewards(self) -> list[float]:
        """Of the scored rollouts."""
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]

    @property
    def usable(self) -> bool:
        """At least two scored rollouts that differ in reward."""
        return has_signal([rollout.reward for rollout in self.rollouts])

    @property
    def outcome_tied(self) -> bool:
        """Its scored rollouts' verifiers all said the same: what rewards differ by is a reward function's."""
        found = [rollout.outcome.env_reward if rollout.outcome else None for rollout in self.rollouts if rollout.reward is not None]
        said = [reward for reward in found if reward is not None]
        return len(said) == len(found) > 1 and not has_signal(said)

    @property
    def drop_reason(self) -> str | None:
        if self.usable:
            return None
        return "zero_variance" if len(self.rewards) > 1 else "unscorable"


@dataclass
class Batch:
    """What the learner gets for one step, and what the step saw on the way."""

    step: int
    """The optimizer step that trains it, from 1; it starts from the weights of step - 1."""
    groups: list[Group]
    rows: list[Row]
    considered: list[Group]
    """All groups that finished for this step, those without signal included."""
    short: bool
    """True if the replacement bound was reached before `groups_per_step` usable groups were found."""

    @property
    def rollouts(self) -> int:
        """Scored ones of its groups, whether or not they gave rows."""
        return sum(len(group.rewards) for group in self.groups)


@dataclass
class Assembler:
    """Collects finished groups and closes batches of whole groups, the oldest first: one that was overtaken is not overtaken again."""

    groups_per_step: int
    max_replacements: float
    scale: Literal["std", "none"]
    _: KW_ONLY
    baseline: Literal["mean", "leave_one_out"] = "mean"
    function: AdvantageFunction | None = None
    """The user's own, in place of all the above."""
    balance: bool = False
    mask_truncated: bool = False
    """Rollouts that a limit cut give a reward to the baseline and no rows."""
    shuffle: bool = False
    seed: int = 0
    batches_closed: int = 0
    ready: list[Group] = field(default_factory=list)
    considered: list[Group] = field(default_factory=list)
    idle_rounds: int = 0
    """Rounds in a row that reached the replacement bound without one usable group."""
    _in_idle_rounds: int = 0
    """How many of `considered` belong to rounds that ended without a batch; their rewards still count in the next step's."""
    row_counts: Counter[str] = field(default_factory=Counter)
    """See `build_rows`; over the whole run."""

    def restore(self, groups: list[Group], batches_closed: int) -> None:
        """Start from what an earlier process left: usable groups, and how many batches it closed."""
        self.batches_closed = batches_closed
        for group in groups:
            self.add(group)

    def add(self, group: Group) -> None:
        self.considered.append(group)
        if group.usable:
            self.ready.append(group)
            self.ready.sort(key=lambda ready: (len(ready.group_id), ready.group_id))

    @property
    def bound(self) -> int:
        return round(self.groups_per_step * (1 + self.max_replacements))

    def latest_batch(self, running: int) -> int:
        """Index (from 0) of the latest batch that a group started now could join, when `running` groups are under way.

        The batches ahead of it fill with usable groups; or the one that is being filled is closed short by groups without signal, and the
        rest then fill from nothing. Groups that are overtaken by later ones can still end in a later batch.
        """
        by_usable = (len(self.ready) + running) // self.groups_per_step
        until_short = self.bound - (len(self.considered) - self._in_idle_rounds)
        after_short = 0 if running < until_short else 1 + (running - until_short) // self.groups_per_step
        return self.batches_closed + max(by_usable, after_short)

    @property
    def can_close(self) -> bool:
        """A batch is full, or has all the groups that it may consider."""
        return len(self.ready) >= self.groups_per_step or len(self.considered) - self._in_idle_rounds >= self.bound

    def close(self) -> Batch | None:
        """The next batch, or None if more groups are needed."""
        full = len(self.ready) >= self.groups_per_step
        if not self.can_close:
            return None
        if not self.ready:
            self.idle_rounds += 1
            self._in_idle_rounds = len(self.considered)
            return None
        considered, self.considered = self.considered, []
        self.idle_rounds = self._in_idle_rounds = 0
        groups, self.ready = self.ready[: self.groups_per_step], self.ready[self.groups_per_step :]
        rows = [row for group in groups for row in self._rows(group)]
        self.batches_closed += 1
        return Batch(self.batches_closed, groups, rows, considered, short=not full)

    def _rows(self, group: Group) -> list[Row]:
        if self.function is not None:
            return self._rows_by(self.function, group)
        rewards = [rollout.reward for rollout in group.rollouts]
        only_shaped = group.outcome_tied and max(group.rewards) - min(group.rewards) <= SHAPING
        scale = "none" if only_shaped else self.scale
        advantages = balanced_group_advantages(rewards, scale) if self.balance else group_advantages(rewards, scale, self.baseline)
        if self.shuffle:
            advantages = shuffled(advantages, f"{self.seed}/{group.group_id}")
        kept, rows = balanced_selection(rewards) if self.balance else set(range(len(rewards))), []
        for index, (rollout, advantage) in enumerate(zip(group.rollouts, advantages, strict=True)):
            if advantage is None or rollout.outcome is None or (self.mask_truncated and rollout.outcome.truncated):
                continue
            for row in build_rows(rollout.outcome.trace, rollout.rollout_id, group.group_id, counts=self.row_counts):
                row.advantage, row.left_out = advantage, index not in kept
                rows.append(row)
        return rows

    def _rows_by(self, function: AdvantageFunction, group: Group) -> list[Row]:
        scored = [(r.rollout_id, r.outcome, r.reward) for r in group.rollouts if r.outcome is not None and r.reward is not None]
        credits = ask(function, [outcome for _, outcome, _ in scored], [reward for _, _, reward in scored])
        rows = []
        for (rollout_id, outcome, _), credit in zip(scored, credits, strict=True):
            if self.mask_truncated and outcome.truncated:
                continue
            built = build_rows(outcome.trace, rollout_id, group.group_id, counts=self.row_counts)
            give(built, credit)
            rows += built
        return rows


def shuffled(advantages: list[float | None], seed: str) -> list[float | None]:
    """The same advantages on other rollouts of those that have one; None and 0 stay, so that the same rollouts are trained."""
    places = [index for index, value in enumerate(advantages) if value]
    values = [advantages[index] for index in places]
    random.Random(seed).shuffle(values)
    result = list(advantages)
    for place, value in zip(places, values, strict=True):
        result[place] = value
    return result
