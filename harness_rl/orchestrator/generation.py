"""Rollouts run while the learner trains: groups are opened as the pacer allows, gathered, and closed into batches of whole groups.

Everything that can wait here waits on one `asyncio.Condition`, notified by whoever changed something; nothing polls.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from harness_rl.config import RunConfig
from harness_rl.metrics import RunState
from harness_rl.orchestrator.batches import Assembler, Batch, Group
from harness_rl.orchestrator.evaluate import task_name
from harness_rl.orchestrator.journal import GroupState, Journal
from harness_rl.orchestrator.rollout import Rollout, RolloutRunner, rollout_seed
from harness_rl.orchestrator.schedule import TaskOrder


@dataclass
class Generation:
    """The producing half of a run. `produce()` runs as a task; `next_batch()` is awaited by the training half."""

    config: RunConfig
    runner: RolloutRunner
    journal: Journal
    order: TaskOrder
    assembler: Assembler
    state: RunState
    version: int = 0
    """Optimizer steps in the weights that the engine serves; set through `weights_are`."""
    first_group: int = 0
    seconds_paced: float = 0.0
    """Time the producer waited because more work could not have been used within `max_staleness`."""
    slots: asyncio.Semaphore = field(init=False)
    """`max_concurrent_rollouts` of them; an evaluation that runs at the same time shares them."""
    _running: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _batches: deque[Batch] = field(default_factory=deque)
    failures: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.config.rollout.max_concurrent_rollouts)
        self._close_batches()  # of groups that an earlier process left

    async def produce(self) -> None:
        """Open groups until cancelled or until no more are needed for the last step."""
        number = self.first_group
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self.slots.acquire()
                self.slots.release()  # a slot is free: the next group's first member could start now
                waited = time.monotonic()
                async with self._changed:
                    await self._changed.wait_for(lambda: self._finished or self._may_start())
                self.seconds_paced += time.monotonic() - waited
                if self._finished:
                    return
                position, row = self.order.next()
                group_id = f"g{number:05d}"
                number += 1
                self._running += 1
                self.journal.open_group(group_id, position, task_name(row))
                tasks.create_task(self._group(group_id, row))
                await asyncio.sleep(0)  # let its members queue for slots before the next group is considered

    @property
    def _finished(self) -> bool:
        return self.assembler.batches_closed >= self.config.run.steps

    def _may_start(self) -> bool:
        """Pacing holds by arithmetic, not by throwing finished work away: batch `b` is trained on the policy of version `b`, so a group
        that could join batch `b` starts only while `b` minus the version that the engine serves is at most `max_staleness`."""
        batch = self.assembler.latest_batch(self._running)
        return batch < self.config.run.steps and batch - self.version <= self.config.rollout.max_staleness

    async def weights_are(self, version: int) -> None:
        """The engine serves the weights of optimizer step `version` from now on, proven."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    async def next_batch(self) -> Batch:
        """The next closed batch, in order."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._batches))
            return self._batches.popleft()

    async def _group(self, group_id: str, row: dict[str, Any]) -> None:

        async def member(index: int) -> Rollout:
            async with self.slots:
                self.state.rollouts_running += 1
                try:
                    seed = rollout_seed(self.config.run.seed, group_id, index)
                    rollout = await self.runner.run(row, group_id=group_id, member=index, seed=seed)
                finally:
                    self.state.rollouts_running -= 1
                self.state.rollouts_done += 1
                for cause in rollout.causes:
                    self.state.rollouts_failed[cause] += 1
                return rollout

        async with asyncio.TaskGroup() as tasks:
            members = [tasks.create_task(member(index)) for index in range(self.config.rollout.num_generations)]
        group = Group(group_id, task_name(row), [task.result() for task in members])
        await self._gathered(group)

    async def _gathered(self, group: Group) -> None:
        reason = group.drop_reason
        if reason is None:
            self.journal.move_groups([group.group_id], GroupState.SCORED)
        else:
            self.journal.move_groups([group.group_id], GroupState.DROPPED, reason=reason)
            self.state.groups_zero_variance += reason == "zero_variance"
        async with self._changed:
            self._running -= 1
            self.assembler.add(group)
            self._close_batches()
            self.state.groups_ready = len(self.assembler.ready)
            self._changed.notify_all()

    def _close_batches(self) -> None:
        while (batch := self.assembler.close()) is not None:
            self._batches.append(batch)
