"""The user's reward function: outcome -> finite float, or None to leave the rollout out. Anything else is named, counted, and never
trained."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable

from harness_rl.errors import Cause
from harness_rl.imports import load_object
from harness_rl.sessions.base import HarnessRolloutOutcome, RolloutFailure

RewardFunction = Callable[[HarnessRolloutOutcome], float | None | Awaitable[float | None]]


async def score(outcome: HarnessRolloutOutcome, function: RewardFunction | None) -> float:
    """The rollout's reward: the verifier's, or the user's function of the outcome.

    Raises RolloutFailure with cause `reward_none`, `reward_function` or `verifier`; the reward is then None, never 0.
    """
    if function is None:
        if outcome.env_reward is None:
            raise RolloutFailure(Cause.VERIFIER, "the verifier gave no reward")
        return outcome.env_reward
    name = getattr(function, "__name__", type(function).__name__)
    try:
        value = function(outcome)
        if inspect.isawaitable(value):
            value = await value
    except Exception as error:
        raise RolloutFailure(Cause.REWARD_FUNCTION, f"{name} raised {type(error).__name__}: {error}") from error
    if value is None:
        raise RolloutFailure(Cause.REWARD_NONE, f"{name} returned None")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RolloutFailure(
            Cause.REWARD_FUNCTION, f"{name} returned {value!r:.60}; return a finite float, or None to leave the rollout out"
        )
    return float(value)


def load_reward_function(spec: str) -> RewardFunction:
    """`package.module:function` or `path/file.py:function`. Raises UserError."""
    function: RewardFunction = load_object(spec, "reward.function")
    return function
