"""A prediction in words and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from harness_rl.config import RunConfig
from harness_rl.simulate.model import Prediction


def as_dict(prediction: Prediction) -> dict[str, Any]:
    return {**asdict(prediction), "steps_per_hour": prediction.steps_per_hour, "sampled_per_second": prediction.sampled_per_second}


def as_text(prediction: Prediction, config: RunConfig) -> str:
    section, rollout = config.simulate, config.rollout
    lines = [
        f"{section.engines} engines, {section.learners} learners, {rollout.max_concurrent_rollouts} sandboxes; "
        f"{rollout.groups_per_step} groups of {rollout.num_generations} a step, max_staleness {rollout.max_staleness}, "
        f"admission {rollout.admission}, sync {config.sync.mode} every {config.sync.every}",
        f"{prediction.steps} steps in {_span(prediction.seconds)}: {prediction.steps_per_hour:.1f} an hour, "
        f"{prediction.sampled_per_second:.0f} sampled tokens a second",
        f"used:      engines {prediction.engines:.0%} (a call under way {prediction.engines_busy:.0%} of the time, "
        f"{prediction.calls_under_way:.1f} in the mean), learner {prediction.learner:.0%}, sandboxes {prediction.sandboxes:.0%}",
        f"staleness: {prediction.staleness:.2f} steps in the mean, {prediction.stale_share:.1%} of the tokens too old; "
        f"{prediction.groups_given_up} groups given up",
        f"work waited for new weights or its turn {prediction.paced:.0%} of the time",
        _advice(prediction),
    ]
    return "\n".join(lines)


def _advice(prediction: Prediction) -> str:
    """What to change first."""
    if prediction.learner > 0.9:
        return "the learner is what the run waits for: more learners, or a longer step on more groups"
    if prediction.engines > 0.9:
        return "the engines are what the run waits for: more engines"
    if prediction.sandboxes > 0.9:
        return "the sandboxes are what the run waits for: raise rollout.max_concurrent_rollouts"
    if prediction.paced > 0.5:
        return "work waits for new weights: raise rollout.max_staleness, or take longer steps"
    return "the slowest rollouts of each step are what the run waits for: more groups a step, or a higher rollout.max_staleness"


def _span(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60:02d} min" if hours else f"{rest // 60} min {rest % 60:02d} s"
