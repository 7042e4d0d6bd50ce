"""The user's reward function: outcome -> finite float, or None to leave the rollout out. Anything else is named, counted, and never
trained."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

from harness_rl.errors import Cause, UserError
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
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise UserError(f"reward.function = {spec!r}: write module:function or file.py:function")
    try:
        if where.endswith(".py"):
            loader = importlib.util.spec_from_file_location(Path(where).stem, where)
            if loader is None or loader.loader is None or not Path(where).is_file():
                raise UserError(f"reward.function: {where} does not exist")
            module = importlib.util.module_from_spec(loader)
            loader.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - importing runs the user's code, which may raise anything
        raise UserError(f"reward.function: {where} cannot be imported: {type(error).__name__}: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"reward.function: {where} has no function {name}")
    return function
