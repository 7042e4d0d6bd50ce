"""What the seed advises about rewards, as far as a run can show it: groups that differ (rule 13), each function by itself (rule 16)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import pytest
from environments.bench import PLAY, Bench, call, generation_of

from harness_rl import GRPOConfig, GRPOTrainer
from harness_rl.orchestrator.batches import Batch
from harness_rl.orchestrator.stepmetrics import step_metrics


class Climb:
    """A game whose every episode ends on another step, and is won on none."""

    heights = itertools.count(1)

    def reset(self, **columns: Any) -> str:
        self.height = 0
        return " Climb."

    def climb(self) -> str:
        """Climb."""
        self.height = next(self.heights)
        return "tired"


def climbing(bench: Bench, reward_funcs: Any, **options: Any) -> GRPOTrainer:
    bench.engine.asides = {"tired": "done", "Climb.": call("climb")}
    args = GRPOConfig(output_dir=bench.folder / "run", max_steps=1, num_generations=4, per_device_train_batch_size=8)
    return GRPOTrainer("m", reward_funcs=reward_funcs, args=args, **options)


async def first_batch(bench: Bench, trainer: GRPOTrainer) -> Batch:
    generation = generation_of(trainer, bench)
    producing = asyncio.create_task(generation.produce())
    try:
        return await asyncio.wait_for(generation.next_batch(), 60)
    finally:
        producing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await producing


async def test_rule_13_a_group_that_does_not_differ_teaches_nothing_and_partial_credit_makes_it_differ(bench: Bench):
    def reward(environments: list[Climb], level: list[str], **columns: Any) -> list[float]:
        return [
            env.height / 1000 if name == "by height" else float(env.height > 1000) for env, name in zip(environments, level, strict=True)
        ]

    rows = [{"prompt": PLAY, "level": level} for level in ("by height", "by the top")]
    batch = await first_batch(bench, climbing(bench, reward, train_dataset=rows, environment_factory=Climb))
    assert step_metrics(batch, {}, None)["rollout/groups_zero_variance"] >= 1
    assert all(0 < rollout.reward < 1 for group in batch.groups for rollout in group.rollouts)  # those by the top alone are not in it
    assert {row.advantage > 0 for row in batch.rows} == {True, False}


async def test_rule_16_each_function_is_logged_over_the_samples_that_it_applies_to(bench: Bench):
    def tall(environments: list[Climb], environment: list[str], **columns: Any) -> list[float | None]:
        return [10.0 + env.height if name == "tall" else None for env, name in zip(environments, environment, strict=True)]

    def small(environments: list[Climb], environment: list[str], **columns: Any) -> list[float | None]:
        return [env.height / 1000 if name == "small" else None for env, name in zip(environments, environment, strict=True)]

    rows = [{"prompt": PLAY, "environment": name} for name in ("tall", "small")]
    trainer = climbing(bench, [tall, small], train_dataset=rows, environment_factory={"tall": Climb, "small": Climb})
    batch = await first_batch(bench, trainer)
    line = step_metrics(batch, {}, None)
    rewards = [rollout.reward for group in batch.groups for rollout in group.rollouts]
    high, low = [reward for reward in rewards if reward > 5], [reward for reward in rewards if reward < 5]
    assert len(high) == len(low) == 4
    assert line["rewards/tall/mean"] == pytest.approx(sum(high) / 4) and line["rewards/small/mean"] == pytest.approx(sum(low) / 4)
