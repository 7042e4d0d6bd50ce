"""White-box sessions under the orchestrator: groups, retries, pacing, resume and accounts treat them as any other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from typing import Any, ClassVar

import pytest
from environments.bench import PLAY, Bench, call, generation_of

from harness_rl import GRPOConfig, GRPOTrainer
from harness_rl.config import RunConfig
from harness_rl.learner.rows import verify_row
from harness_rl.orchestrator.accounts import settle
from harness_rl.orchestrator.journal import GroupState
from harness_rl.orchestrator.resume import restore
from harness_rl.orchestrator.stepmetrics import step_metrics
from harness_rl.sessions.environments import LocalSandboxes


class Boxed(LocalSandboxes):
    """Its instances keep sandboxes of this machine."""

    limits: ClassVar[list[int]] = []

    def reset(self, **columns: Any) -> None:
        assert self.run_sandbox is not None
        self.limits.append(self.run_sandbox.memory_mb)

    def get_reward(self) -> float:
        return 1.0


async def test_the_runs_limits_of_sandboxes_reach_the_environment(bench: Bench):
    bench.config = RunConfig.model_validate({"sandbox": {"memory_mb": 333}, "rollout": {"seal_grace_s": 0.1}})
    bench.engine.say("Done.")
    await bench.play(bench.factory(Boxed))
    assert Boxed.limits == [333]


class SessionLostError(ConnectionError): ...


class Guess:
    """Its reward differs from episode to episode; now and then the connection breaks, or nobody can say what it is worth."""

    guesses = itertools.count(1)
    rewards = itertools.count(1)
    lost = 0

    def __init__(self) -> None:
        self.calls = 0

    def reset(self, **columns: Any) -> str:
        self.calls = 0
        return f" Level {columns['level']}."

    def guess(self, number: int) -> str:
        """Guess a number.

        Args:
            number: Any.
        """
        self.calls += 1
        if next(self.guesses) % 7 == 0:
            type(self).lost += 1
            raise SessionLostError("closed by the server")
        return "no"

    def get_reward(self) -> float | None:
        number = next(self.rewards)
        return None if number % 9 == 0 else number * 0.618 % 1.0


async def test_an_on_policy_run_in_environments_up_to_the_learner(bench: Bench):
    bench.engine.asides = {"no<|im_end|>": "I give up.", "Level": call("guess", number=7)}
    rows = [{"prompt": PLAY, "level": level} for level in range(5)]
    args = GRPOConfig(output_dir=bench.folder / "run", max_steps=3, num_generations=4, per_device_train_batch_size=8)
    trainer = GRPOTrainer("m", args=args, train_dataset=rows, environment_factory=Guess)
    generation = generation_of(trainer, bench)
    producing = asyncio.create_task(generation.produce())
    trained: dict[int, set[str]] = {}
    generation.journal.set_meta("lineages", [["t", 0]])
    for step in (1, 2, 3):
        batch = await asyncio.wait_for(generation.next_batch(), 60)
        assert len(batch.groups) == 2
        for row in batch.rows:
            verify_row(row)
            assert {version for span in row.spans for version, _, _ in span.versions} == {f"t-{step - 1}"}  # on-policy
            assert math.isfinite(row.advantage)
        members = [rollout for group in batch.groups for rollout in group.rollouts if rollout.reward is not None]
        assert {row.rollout_id for row in batch.rows} == {rollout.rollout_id for rollout in members}
        assert len(batch.rows) == len(members)  # a conversation is one row
        line = step_metrics(batch, {}, None)
        assert line["rewards/Guess/mean"] == pytest.approx(line["reward"])
        assert line["tools/call_frequency"] == 1.0
        for group in batch.groups:
            advantages = {row.rollout_id: row.advantage for row in batch.rows if row.group_id == group.group_id}
            assert sum(advantages.values()) == pytest.approx(0.0, abs=1e-6)  # who has no reward is not in the baseline
        trained[step] = {group.group_id for group in batch.groups}
        bench.engine.version = f"t-{step}"
        generation.journal.move_groups([group.group_id for group in batch.groups], GroupState.TRAINED, step=step)
        generation.journal.end_step(step, f"t-{step}", {"trained": len(batch.rows)})
        await generation.weights_are(step)
    producing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await producing
    accounts = settle(generation.journal, bench.folder / "rollouts")
    assert accounts.rollouts["environment_lost"] == Guess.lost > 0
    assert accounts.rollouts["reward_none"] > 0
    assert accounts.rollouts["trained"] == accounts.rows["trained"]
    assert accounts.unrecorded == 0
    # A run that goes on reads its groups back from the same records.
    generation.journal.set_meta("proven", {"t": 3})
    restored = restore(generation.journal, bench.folder / "rollouts", 1, max_staleness=5)
    assert {group.group_id for group in restored.groups} == trained[2]  # step 3 was sampled by weights that are taken back
    assert all(group.usable for group in restored.groups)
