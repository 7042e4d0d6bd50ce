"""Group-relative advantages: each rollout counts once (invariant 3), and None is not zero (invariant 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

EPSILON = 1e-6
"""A group whose rewards differ by no more than this has no signal."""


def has_signal(rewards: Sequence[float | None]) -> bool:
    """False for a group that cannot teach: fewer than two scored rollouts, or all scored alike (`zero variance`)."""
    scored = [reward for reward in rewards if reward is not None]
    return len(scored) >= 2 and max(scored) - min(scored) > EPSILON


Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["std", "none"]


def group_advantages(rewards: Sequence[float | None], scale: Scale = "std", baseline: Baseline = "mean") -> list[float | None]:
    """Advantage of each *rollout* of one group (GRPO, arXiv 2402.03300, section 4.1.2): A_i = r_i - mean(r), over the scored rollouts.

    `baseline="leave_one_out"` takes the mean of the n - 1 others instead (RLOO, arXiv 2402.14740, eq. 8), which makes the estimate of the
    gradient unbiased: n / (n - 1) times as much.

    `scale="std"` divides by the population standard deviation; `"none"` does not (Dr. GRPO, arXiv 2503.20783), so that a spread made of
    small shaping terms stays small. An unscored rollout (None) is left out of mean and spread and gets None: it has no advantage, and no
    rows. A group without signal gets 0.0 for its scored rollouts. A rollout that became several rows gives each the same advantage.
    Raises ValueError for a reward that is not finite.
    """
    scored = [reward for reward in rewards if reward is not None]
    for reward in scored:
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ValueError(f"reward {reward!r} is not a finite number; use None for a rollout that cannot be scored")
    if scale not in get_args(Scale) or baseline not in get_args(Baseline):
        raise ValueError(f"advantage scale {scale!r} and baseline {baseline!r}: use std or none, and mean or leave_one_out")
    if not has_signal(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(scored) / len(scored)
    spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / len(scored)) if scale == "std" else 1.0
    others = len(scored) / (len(scored) - 1) if baseline == "leave_one_out" else 1.0
    return [None if reward is None else (reward - mean) * others / spread for reward in rewards]


def balanced_group_advantages(rewards: Sequence[float | None], scale: Scale = "std") -> list[float | None]:
    """Advantages of as many rollouts above the group's mean as below it: the best and the worst, the rest 0.0.

    Max-variance down-sampling (PODS, arXiv 2504.13818) with the size left to the group. Two-valued rewards give +1 and -1 in equal number,
    however lopsided the group. Without it a group with one success in ten is one large push up and nine small ones down; an optimizer that
    normalises each weight's gradient (Adam) keeps their number, not their sum, and the policy drifts away from all of its samples, also
    from good ones, and also where rewards are noise. A rollout outside the selection has left the baseline: mean and spread are the
    selection's. None, `scale` and errors as in `group_advantages`.
    """
    selected = balanced_selection(rewards)
    advantages = group_advantages([reward if index in selected else None for index, reward in enumerate(rewards)], scale)
    return [0.0 if reward is not None and advantage is None else advantage for advantage, reward in zip(advantages, rewards, strict=True)]


def balanced_selection(rewards: Sequence[float | None]) -> set[int]:
    """Which rollouts `balanced_group_advantages` keeps; the others are not trained and count in no normalisation."""
    whole = group_advantages(rewards, "none")
    above = [(advantage, index) for index, advantage in enumerate(whole) if advantage is not None and advantage > 0]
    below = [(advantage, index) for index, advantage in enumerate(whole) if advantage is not None and advantage < 0]
    size = min(len(above), len(below))
    best = sorted(above, key=lambda found: (-found[0], found[1]))[:size]
    return {index for _, index in best + sorted(below)[:size]}
