"""Rollouts run while the learner trains: groups are opened as the pacer allows, gathered, and closed into batches of whole groups.

Everything that can wait here waits on one `asyncio.Condition`, notified by whoever changed something; nothing polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness_rl.config import RunConfig
from harness_rl.metrics import RunState
from harness_rl.orchestrator.batches import Assembler, Batch, Group
from harness_rl.orchestrator.evaluate import task_name
from harness_rl.orchestrator.journal import RUN_ENDED, GroupState, Journal
from harness_rl.orchestrator.pacing import Pacer
from harness_rl.orchestrator.rollout import Rollout, rollout_seed
from harness_rl.orchestrator.schedule import TaskOrder

GIVEN_UP = "given_up"
"""A group of whose work nothing could be trained any more."""


class Runner(Protocol):
    """Makes one rollout; never raises for a failed one."""

    async def run(self, row: dict[str, Any], *, group_id: str, member: int, seed: int) -> Rollout: ...


@dataclass
class Generation:
    """The producing half of a run. `produce()` runs as a task; `next_batch()` is awaited by the training half."""

    config: RunConfig
    runner: Runner
    journal: Journal
    order: TaskOrder[dict[str, Any]]
    assembler: Assembler
    state: RunState
    version: int = 0
    """Optimizer steps in the weights that the engine serves when it begins."""
    first_group: int = 0
    seconds_paced: float = 0.0
    """Time the producer waited because more work could not have been used within `max_staleness`."""
    pacer: Pacer = field(init=False)
    slots: asyncio.Semaphore = field(init=False)
    """`max_concurrent_rollouts` of them; an evaluation that runs at the same time shares them."""
    groups_given_up: int = 0
    _under_way: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _given_up: set[str] = field(default_factory=set)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _batches: deque[Batch] = field(default_factory=deque)
    _reopened: asyncio.TimerHandle | None = None
    """When a full batch that was kept open is looked at again."""
    _notices: set[asyncio.Task[None]] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self.pacer = Pacer(self.config.rollout, self.config.run.steps, self._clock, version=self.version, trained=self.version)
        self.slots = asyncio.Semaphore(self.config.rollout.max_concurrent_rollouts)
        self._close_batches()  # of groups that an earlier process left

    async def produce(self) -> None:
        """Open groups until cancelled or until no more are needed for the last step."""
        number = self.first_group
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self.slots.acquire()
                self.slots.release()  # a slot is free: the next group's first member could start now
                await self._until_one_may_start()
                if self._finished:
                    return
                position, row = self.order.next()
                group_id = f"g{number:05d}"
                number += 1
                self.pacer.group_began(group_id)
                self.journal.open_group(group_id, position, task_name(row))
                self._under_way[group_id] = tasks.create_task(self._group(group_id, row))
                await asyncio.sleep(0)  # let its members queue for slots before the next group is considered

    @property
    def _finished(self) -> bool:
        return self.assembler.batches_closed >= self.config.run.steps

    async def _until_one_may_start(self) -> None:
        """Pacing holds by arithmetic, not by throwing finished work away: batch `b` is trained on the policy of version `b`, so a group
        that could join batch `b` starts only while `b` minus the version that the engine serves is at most `max_staleness`."""
        waited = self._clock()
        async with self._changed:
            while not self._finished and (seconds := self.pacer.start_in(self.assembler.latest_batch(len(self._under_way)))) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), None if seconds == math.inf else seconds)
        self.seconds_paced += self._clock() - waited

    async def weights_are(self, version: int) -> None:
        """The engine serves the weights of optimizer step `version` from now on, proven."""
        async with self._changed:
            self.pacer.serves(version)
            self._changed.notify_all()

    async def trained(self, step: int, another_waits: bool) -> None:
        """The learner is done with step `step`; `another_waits`: it has the next batch already."""
        async with self._changed:
            self.pacer.step_ended(step, another_waits)
            self._changed.notify_all()

    @property
    def totals(self) -> dict[str, float]:
        """Of the run so far, by the name of the metric that a step's part of it has."""
        return {
            "perf/paced_s": self.seconds_paced,
            "perf/delayed_s": self.pacer.delayed_s,
            "rollout/groups_given_up": float(self.groups_given_up),
        }

    async def next_batch(self) -> Batch:
        """The next closed batch, in order."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._batches))
            return self._batches.popleft()

    async def _group(self, group_id: str, row: dict[str, Any]) -> None:

        async def member(index: int) -> Rollout:
            async with self.slots:
                self.state.rollouts_running += 1
                self.pacer.member_began(group_id, index)
                try:
                    seed = rollout_seed(self.config.run.seed, group_id, index)
                    rollout = await self.runner.run(row, group_id=group_id, member=index, seed=seed)
                finally:
                    self.state.rollouts_running -= 1
                    self.pacer.member_ended(group_id, index)
                self.state.rollouts_done += 1
                for cause in rollout.causes:
                    self.state.rollouts_failed[cause] += 1
                return rollout

        try:
            async with asyncio.TaskGroup() as tasks:
                members = [tasks.create_task(member(index)) for index in range(self.config.rollout.num_generations)]
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if group_id not in self._given_up or current is None or current.uncancel() > 0:
                raise
            await self._gave_up(group_id)
            return
        group = Group(group_id, task_name(row), [task.result() for task in members])
        self.pacer.group_ended(group_id, group.usable)  # before anything is awaited: it is not given up any more
        await self._gathered(group)

    async def _gathered(self, group: Group) -> None:
        reason = group.drop_reason
        if reason is None:
            self.journal.move_groups([group.group_id], GroupState.SCORED)
        else:
            self.journal.move_groups([group.group_id], GroupState.DROPPED, reason=reason)
            self.state.groups_zero_variance += reason == "zero_variance"
        async with self._changed:
            del self._under_way[group.group_id]
            self.assembler.add(group)
            self._close_batches()
            self.state.groups_ready = len(self.assembler.ready)
            self._changed.notify_all()

    async def _gave_up(self, group_id: str) -> None:
        """Its sandboxes are gone; another group takes its place."""
        self._given_up.discard(group_id)
        self.journal.move_groups([group_id], GroupState.DROPPED, reason=RUN_ENDED if self._finished else GIVEN_UP)
        self.groups_given_up += not self._finished
        async with self._changed:
            del self._under_way[group_id]
            self.pacer.group_dropped(group_id)
            self._close_batches()
            self._changed.notify_all()

    def _close_batches(self) -> None:
        if self._reopened is not None:
            self._reopened.cancel()
            self._reopened = None
        while (closed := self.assembler.batches_closed) < self.config.run.steps and self.assembler.can_close:
            if self.assembler.ready and self._under_way and (seconds := self.pacer.keep_open_for(closed)) > 0:
                self._reopened = asyncio.get_running_loop().call_later(seconds, self._look_again)
                break
            batch = self.assembler.close()
            self.pacer.batch_closed()
            if batch is None:
                continue
            self._batches.append(batch)
            self._give_up()

    def _give_up(self) -> None:
        """A batch has closed: what is under way has aged."""
        for group_id in self.pacer.given_up(self.assembler.batches_closed):
            if group_id not in self._given_up:
                self._given_up.add(group_id)
                self._under_way[group_id].cancel()

    def _look_again(self) -> None:
        """A batch that was kept open has waited long enough."""

        async def look() -> None:
            async with self._changed:
                self._close_batches()
                self._changed.notify_all()

        notice = asyncio.get_running_loop().create_task(look())
        self._notices.add(notice)
        notice.add_done_callback(self._notices.discard)
