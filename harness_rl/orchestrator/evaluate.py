"""Success on a set of tasks under the policy that the engine serves now: every task the same number of samples, with an interval."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness_rl.metrics import RunState, mean, mean_interval
from harness_rl.orchestrator.rollout import Rollout, RolloutRunner, rollout_seed


@dataclass(frozen=True)
class Evaluation:
    label: str
    tasks: int
    samples: int
    reward: float
    """Mean over the scored rollouts; NaN if none was scored."""
    low: float
    high: float
    """95 % interval of `reward`."""
    unscored: int
    by_task: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "tasks": self.tasks,
            "samples": self.samples,
            "reward": self.reward,
            "low": self.low,
            "high": self.high,
            "unscored": self.unscored,
            "by_task": self.by_task,
        }


async def evaluate(
    runner: RolloutRunner,
    rows: list[dict[str, Any]],
    *,
    label: str,
    samples: int,
    temperature: float,
    slots: asyncio.Semaphore,
    seed: int,
    state: RunState,
) -> Evaluation:
    """Run `samples` rollouts of each row, each in one of `slots`. Failed rollouts are counted, never scored 0.

    Sampling is seeded by `seed`, task and sample, not by `label`: two evaluations of a run draw the same random numbers, so that their
    difference is the policy's (common random numbers).
    """
    done = 0

    async def one(index: int, row: dict[str, Any], sample: int) -> Rollout:
        nonlocal done
        async with slots:
            state.rollouts_running += 1
            try:
                rollout = await runner.run(
                    row,
                    group_id=f"{label}-{index:03d}",
                    member=sample,
                    seed=rollout_seed(seed, "eval", task_name(row), sample),
                    temperature=temperature,
                )
            finally:
                state.rollouts_running -= 1
            done += 1
            state.rollouts_done += 1
            state.phase = f"eval {label} {done}/{len(rows) * samples}"
            return rollout

    async with asyncio.TaskGroup() as group:
        tasks = {(index, sample): group.create_task(one(index, row, sample)) for index, row in enumerate(rows) for sample in range(samples)}
    rewards: dict[str, list[float]] = {}
    for (index, _), task in tasks.items():
        reward = task.result().reward
        if reward is not None:
            rewards.setdefault(task_name(rows[index]), []).append(reward)
    scored = [reward for values in rewards.values() for reward in values]
    low, high = mean_interval(scored)
    state.evals[label] = (mean(scored), low, high)
    state.say(f"eval {label}: reward {mean(scored):.3f} [{low:.3f}, {high:.3f}] over {len(scored)} rollouts of {len(rows)} tasks")
    return Evaluation(
        label, len(rows), samples, mean(scored), low, high, len(tasks) - len(scored), {name: mean(v) for name, v in sorted(rewards.items())}
    )


def task_name(row: dict[str, Any]) -> str:
    """A row's own name, or the beginning of what it asks."""
    name = row.get("task_name") or Path(str(row.get("task_path", ""))).name
    if name:
        return str(name)
    prompt = row.get("prompt") or str(row.get("environment") or "task")
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or prompt[-1].get("role"))
    return " ".join(text.split())[:40] or "task"
