"""Credit that is not one number per rollout: a user's function of a scored group gives each rollout an advantage, or each turn or token.

It takes the place of the group estimate; the rest stays: a rollout without a reward has no advantage, and what gets 0 is not forwarded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from harness_rl.errors import UserError
from harness_rl.learner.rows import Row
from harness_rl.sessions.base import HarnessRolloutOutcome

Credit = float | Mapping[str, float | Sequence[float]]
"""Of a whole rollout; or by turn (`node_id` in its trace): one number for the turn, or one for each token it sampled. A turn that is left
out gets 0."""
AdvantageFunction = Callable[[list[HarnessRolloutOutcome], list[float]], Sequence[Credit]]
"""(outcomes, rewards) of the scored rollouts of one group -> one credit each."""


def ask(function: AdvantageFunction, outcomes: list[HarnessRolloutOutcome], rewards: list[float]) -> list[Credit]:
    """Raises UserError when it raises, or does not give one credit for each."""
    name = f"rollout.advantage_function {getattr(function, '__name__', type(function).__name__)}"
    try:
        credits = list(function(outcomes, rewards))
    except Exception as error:
        raise UserError(f"{name} raised {type(error).__name__}: {error}") from error
    if len(credits) != len(outcomes):
        raise UserError(f"{name} gave {len(credits)} credits for {len(outcomes)} rollouts")
    return credits


def give(rows: Sequence[Row], credit: Credit) -> None:
    """Stamp one rollout's credit on its rows. Raises UserError for a number that is not finite or a turn of another length."""
    for row in rows:
        if not isinstance(credit, Mapping):
            row.advantage = float(_checked(row.rollout_id, credit)[0])
            continue
        row.token_advantages = np.zeros(len(row), dtype=np.float32)
        for span in row.spans:
            values = _checked(f"{row.rollout_id}, turn {span.node_id}", credit.get(span.node_id, 0.0))
            if len(values) not in (1, span.end - span.start):
                sampled = span.end - span.start
                raise UserError(f"advantages of rollout {row.rollout_id}, turn {span.node_id}: {len(values)} for {sampled} sampled tokens")
            row.token_advantages[span.start : span.end] = values


def _checked(where: str, given: float | Sequence[float]) -> list[float]:
    values = list(given) if isinstance(given, Sequence | np.ndarray) and not isinstance(given, str) else [given]
    for value in values:
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating) or not math.isfinite(value):
            raise UserError(f"advantages of rollout {where}: {value!r} is not a finite number")
    return [float(value) for value in values]
