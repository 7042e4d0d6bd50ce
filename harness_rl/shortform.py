"""`run.short = true`: the same run, in the form that fits a continuous-integration machine. It changes sizes only, never what is done,
and nothing of the warm start: both forms share it.
"""

from __future__ import annotations

from harness_rl.config import RunConfig

STEPS = 2
TASKS = 4
SAMPLES = 1
GENERATIONS = 4
GROUPS = 2
REPLACEMENTS = 1.0
"""Two small groups are often without signal, and there are few steps to wait for one that has some."""


def shorten(config: RunConfig) -> RunConfig:
    """The config itself, or its short form: few steps, small groups, small evaluations."""
    if not config.run.short:
        return config
    config.run.steps = min(config.run.steps, STEPS)
    config.rollout.num_generations = min(config.rollout.num_generations, GENERATIONS)
    config.rollout.groups_per_step = min(config.rollout.groups_per_step, GROUPS)
    config.rollout.max_group_replacements = max(config.rollout.max_group_replacements, REPLACEMENTS)
    config.eval.samples = min(config.eval.samples, SAMPLES)
    config.eval.max_tasks = min(config.eval.max_tasks or TASKS, TASKS)
    return config
