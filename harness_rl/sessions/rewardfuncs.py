"""TRL's reward functions and an environment's own `get_reward`, for one finished episode.

Invariant: a reward is the weighted sum of the parts that apply (None and NaN do not), and None when none does: never 0 by default. What
raises, or returns something that is not a number, is a named failure of the rollout.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness_rl.errors import Cause, UserError, first_error
from harness_rl.metrics import mean
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.environments import RESERVED, EnvironmentKind, Instance, is_lost
from harness_rl.sessions.toolschema import function_name

RewardFunc = Callable[..., Any]


@dataclass(frozen=True)
class WeightedReward:
    name: str
    """What it is logged by."""
    function: RewardFunc
    weight: float = 1.0


@dataclass(frozen=True)
class Sample:
    """What reward functions see of an episode."""

    prompt: Any
    """As the data set has it (text or messages), the observation of `reset` included."""
    completion: Any
    """Everything after the prompt: messages, or a text where the prompt is one."""
    completion_ids: list[int]
    """All ids after the first prompt of the last branch, tool tokens included."""
    columns: Mapping[str, Any]
    """The data set row, without prompt and completion."""
    instance: Instance
    kind: EnvironmentKind
    trainer_state: Any = None


@dataclass
class Scored:
    reward: float | None
    """None: no part applies."""
    parts: dict[str, float]
    """Of each function that applies, unweighted."""
    logged: dict[str, float] = field(default_factory=dict)
    """By `log_metric`: the mean of what was logged under each name."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """By `log_extra`."""


def weighted_rewards(functions: Sequence[RewardFunc] | RewardFunc | None, weights: Sequence[float] = ()) -> list[WeightedReward]:
    """The run's reward functions. Raises UserError."""
    given: list[Any] = [] if functions is None else list(functions) if isinstance(functions, list | tuple) else [functions]
    for function in given:
        if not callable(function) or isinstance(function, str):
            raise UserError(
                f"reward_funcs: {function!r:.80} is not a function; reward models are not loaded here: "
                "serve it and call it from a function of your own"
            )
    if weights and len(weights) != len(given):
        raise UserError(f"reward_weights: {len(weights)} weights for {len(given)} reward functions; give one for each")
    names = [function_name(function) for function in given]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"reward_funcs: two functions are called {twice[0]}; each is logged by its own name: rename one")
    return [WeightedReward(*entry) for entry in zip(names, given, weights or [1.0] * len(given), strict=True)]


async def score_sample(functions: Sequence[WeightedReward], sample: Sample) -> Scored:
    """Every function's part and their weighted sum. Synchronous ones run in the environment's thread, one after the other.

    Raises RolloutFailure with cause `reward_function` or `environment_lost`.
    """
    logs: dict[str, list[float]] = {}
    extra: dict[str, list[Any]] = {}
    everything: dict[str, Any] = {name: [value] for name, value in sample.columns.items() if name not in ("prompt", "completion")}
    everything |= {
        "prompts": [sample.prompt],
        "completions": [sample.completion],
        "completion_ids": [sample.completion_ids],
        "trainer_state": sample.trainer_state,
        "log_metric": lambda name, value: logs.setdefault(str(name), []).append(float(value)),
        "log_extra": lambda column, values: extra.setdefault(str(column), []).extend(values),
    }
    if sample.instance.environment is not None:
        everything["environments"] = [sample.instance.environment]

    async def part(reward: WeightedReward) -> float | None:
        values = await _run(sample.instance, reward.name, reward.function, **_accepted(reward.function, everything))
        return _one(reward.name, values)

    async def own() -> float | None:
        name = f"{sample.kind.label}.get_reward"
        return _number(name, await _run(sample.instance, name, sample.instance.environment.get_reward))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = {reward.name: group.create_task(part(reward)) for reward in functions}
            if sample.kind.has_reward:
                tasks[sample.kind.label] = group.create_task(own())
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None
    values = {name: task.result() for name, task in tasks.items()}
    parts = {name: value for name, value in values.items() if value is not None}
    weights = {reward.name: reward.weight for reward in functions}
    total = sum(weights.get(name, 1.0) * value for name, value in parts.items())
    return Scored(total if parts else None, parts, {name: mean(found) for name, found in logs.items()}, extra)


async def _run(instance: Instance, name: str, function: Callable[..., Any], **arguments: Any) -> Any:
    try:
        return await instance.call(function, **arguments)
    except RolloutFailure:
        raise
    except Exception as error:
        cause = Cause.ENVIRONMENT_LOST if is_lost(error) else Cause.REWARD_FUNCTION
        raise RolloutFailure(cause, f"{name} raised {type(error).__name__}: {' '.join(str(error).split())[:400]}") from error


def _accepted(function: Callable[..., Any], everything: dict[str, Any]) -> dict[str, Any]:
    """What a function without `**kwargs` names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return everything
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return everything
    return {parameter.name: everything[parameter.name] for parameter in parameters if parameter.name in everything}


def _one(name: str, values: Any) -> float | None:
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
        raise RolloutFailure(Cause.REWARD_FUNCTION, f"{name} returned {values!r:.60}; return a list with a number or None per completion")
    if len(values) != 1:
        raise RolloutFailure(Cause.REWARD_FUNCTION, f"{name} returned {len(values)} rewards for 1 completion; return one per completion")
    return _number(name, values[0])


def _number(name: str, value: Any) -> float | None:
    """A finite float; None for None and NaN."""
    if value is None:
        return None
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.inf
    except (TypeError, ValueError, OverflowError):
        number = math.inf
    if math.isinf(number):
        raise RolloutFailure(Cause.REWARD_FUNCTION, f"{name} gave {value!r:.60}; give a finite number, or None where it does not apply")
    return None if math.isnan(number) else number


def check_reserved(columns: Mapping[str, Any], where: str) -> None:
    """Raises UserError."""
    for name in RESERVED:
        if name in columns:
            raise UserError(f"{where}: a column is called {name!r}, which reward functions get from the trainer; rename it")
