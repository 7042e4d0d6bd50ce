"""The user's reward function: outcome -> finite float, or None to leave the rollout out. Anything else is named, counted, and never
trained.

Invariant: user code never holds up the run. A synchronous function has a thread of its own for each call, so calls of several rollouts may
run at once; one that never returns costs its rollout (and its thread), an asynchronous one is left behind cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable

from harness_rl.errors import Cause
from harness_rl.imports import load_object
from harness_rl.sessions.base import HarnessRolloutOutcome, RolloutFailure
from harness_rl.sessions.ownthread import OwnThread, awaited

RewardFunction = Callable[[HarnessRolloutOutcome], float | None | Awaitable[float | None]]


async def score(outcome: HarnessRolloutOutcome, function: RewardFunction | None, deadline_s: float) -> float:
    """The rollout's reward: the verifier's, or the user's function of the outcome, which has `deadline_s` (`reward.deadline_s`).

    Raises RolloutFailure with cause `reward_none`, `reward_function`, `reward_timeout` or `verifier`; the reward is then None, never 0.
    """
    if function is None:
        if outcome.env_reward is None:
            raise RolloutFailure(Cause.VERIFIER, "the verifier gave no reward")
        return outcome.env_reward
    name = getattr(function, "__name__", type(function).__name__)
    value = await _value(name, function, outcome, deadline_s)
    if value is None:
        raise RolloutFailure(Cause.REWARD_NONE, f"{name} returned None")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RolloutFailure(
            Cause.REWARD_FUNCTION, f"{name} returned {value!r:.60}; return a finite float, or None to leave the rollout out"
        )
    return float(value)


async def _value(name: str, function: RewardFunction, outcome: HarnessRolloutOutcome, deadline_s: float) -> object:
    """What the function returns. It is waited for from outside, since it may ignore that it is cancelled."""
    work = asyncio.ensure_future(_call(name, function, outcome))
    try:
        done, _ = await asyncio.wait({work}, timeout=deadline_s)
    finally:
        work.cancel()
    if not done:
        raise RolloutFailure(
            Cause.REWARD_TIMEOUT, f"{name} did not return in {deadline_s:g} s; give what it waits for a limit, or raise reward.deadline_s"
        )
    if (error := work.exception()) is not None:
        raise RolloutFailure(Cause.REWARD_FUNCTION, f"{name} raised {type(error).__name__}: {error}") from error
    return work.result()


async def _call(name: str, function: RewardFunction, outcome: HarnessRolloutOutcome) -> object:
    if inspect.iscoroutinefunction(function):
        return await awaited(function(outcome))
    thread = OwnThread(f"reward function {name}")
    try:
        value = await thread.call(function, outcome)
    finally:
        thread.close()
    return await awaited(value) if inspect.isawaitable(value) else value


def load_reward_function(spec: str) -> RewardFunction:
    """`package.module:function` or `path/file.py:function`. Raises UserError."""
    function: RewardFunction = load_object(spec, "reward.function")
    return function
