"""When work starts, when a full batch closes, what is given up: the decisions by arithmetic, and a run's generation in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import math

import pytest
from orchestrator.fakes import FakeFactory, outcome

from harness_rl.config import RolloutSection, RunConfig
from harness_rl.metrics import RunState
from harness_rl.orchestrator.batches import Assembler
from harness_rl.orchestrator.generation import Generation
from harness_rl.orchestrator.journal import Journal
from harness_rl.orchestrator.pacing import ENOUGH, Pacer
from harness_rl.orchestrator.rollout import RolloutRunner
from harness_rl.orchestrator.schedule import TaskOrder
from harness_rl.simulate.clock import run_virtually


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pacer(clock: Clock, **rollout) -> Pacer:
    return Pacer(RolloutSection.model_validate(rollout), steps=9, clock=clock)


def played(p: Pacer, clock: Clock, name: str, began: float, ended: float, *, usable: bool = True) -> None:
    """A whole group of one member."""
    clock.now = began
    p.group_began(name)
    p.member_began(name, 0)
    clock.now = ended
    p.member_ended(name, 0)
    p.group_ended(name, usable)


def test_no_admission_goes_beyond_max_staleness(clock):
    for admission in ("eager", "just_in_time"):
        p = pacer(clock, max_staleness=2, admission=admission)
        assert [p.start_in(batch) for batch in (0, 2, 3)] == [0.0, 0.0, math.inf]
        p.serves(6)
        assert [p.start_in(batch) for batch in (8, 9)] == [0.0, math.inf]  # there is no tenth step


def test_just_in_time_work_is_done_when_the_learner_asks_for_it(clock):
    p = pacer(clock, max_staleness=4, admission="just_in_time")
    for number in range(ENOUGH - 1):
        played(p, clock, f"g{number}", 0.0, 20.0)
    p.step_began()
    clock.now = 120.0
    p.step_ended(1, another_waits=True)  # a step of 100 s; the next one has begun
    clock.now = 130.0
    assert p.start_in(3) == 0.0, "too few groups were seen"
    played(p, clock, "last", 105.0, 130.0)
    assert p.batch_seconds == 25.0
    # Step 2 trains batch 1 until 220, batch 2 until 320: batch 3 is wanted at 320, 190 s from now.
    assert p.wanted_in(3) == 190.0 and p.start_in(3) == 165.0
    assert p.wanted_in(2) == 90.0 and p.start_in(2) == 65.0 and p.start_in(1) == 0.0
    played(p, clock, "flat", 120.0, 130.0, usable=False)
    assert p.batch_seconds == 50.0, "a group without signal has to be replaced"
    clock.now = 330.0  # a step that takes longer than the others
    assert p.wanted_in(2) == 0.0 and p.wanted_in(3) == 100.0


def test_share_of_the_work_under_way_that_would_be_too_old(clock):
    p = pacer(clock, max_staleness=1, min_fresh_share=0.3)
    p.group_began("old")
    p.member_began("old", 0)  # 0 .. 10
    clock.now = 10.0
    p.member_ended("old", 0)
    p.serves(1)
    p.group_began("new")
    p.member_began("new", 0)  # 10 .. now
    p.member_began("old", 1)  # 10 .. now
    clock.now = 14.0
    # Batch 2 trains what version 1 and later sampled: all of new, 4 of the 14 s of old.
    assert p.stale_share(1) == 0.0 and p.stale_share(2) == pytest.approx(10 / 18) and p.stale_share(3) == 1.0
    assert p.given_up(1) == [] and p.given_up(2) == ["old"] and p.given_up(3) == ["old", "new"] and p.given_up(9) == ["old", "new"]
    clock.now = 20.0
    assert p.given_up(2) == []  # it goes on under the new weights: now half of it could be trained


def test_a_full_batch_waits_for_what_would_be_too_old_afterwards_but_not_for_ever(clock):
    p = pacer(clock, max_staleness=0, delay_stale_share=0.5, delay_s=30.0)
    p.group_began("g")
    p.member_began("g", 0)
    clock.now = 10.0
    assert p.keep_open_for(0) == 30.0
    clock.now = 25.0
    assert p.keep_open_for(0) == 15.0
    clock.now = 40.0
    assert p.keep_open_for(0) == 0.0
    p.batch_closed()
    assert p.delayed_s == 30.0
    p.member_ended("g", 0)
    p.group_ended("g", True)
    assert p.keep_open_for(1) == 0.0, "nothing is under way"
    assert pacer(clock).keep_open_for(0) == 0.0


class Scripted:
    """A run's generation whose groups take what `seconds` says, by group number; `learn` is the other half."""

    def __init__(self, folder, seconds, **rollout) -> None:
        self.folder, self.seconds, self.rollout = folder, seconds, {"num_generations": 2, "groups_per_step": 2, **rollout}

    async def play(self, task, episode):
        group, member = episode.split("-")
        await asyncio.sleep(self.seconds.get(int(group[1:]), 10.0))
        return outcome(float(member))

    async def run(self, steps, learn):
        config = RunConfig.model_validate({"run": {"steps": steps}, "rollout": self.rollout})
        self.factory = FakeFactory(self.play)
        self.journal = Journal(self.folder / "journal.sqlite")
        runner = RolloutRunner(self.factory, self.journal, None, 0)
        order = TaskOrder(self.factory.prompt_rows(), seed=0, shuffle=False)
        assembler = Assembler(2, config.rollout.max_group_replacements, "std")
        self.generation = Generation(config, runner, self.journal, order, assembler, RunState("t", steps))
        producing = asyncio.create_task(self.generation.produce())
        await learn(self.generation)
        self.running_at_the_end = self.factory.open
        producing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await producing

    def reasons(self):
        found = self.journal._db.execute("SELECT group_id, reason FROM groups WHERE reason IS NOT NULL ORDER BY 1")
        return dict(found.fetchall())


async def train(generation, steps, step_s=5.0):
    """[(groups, when the batch closed)] of so many steps."""
    found = []
    for step in range(1, steps + 1):
        batch = await generation.next_batch()
        found.append(([group.group_id for group in batch.groups], asyncio.get_running_loop().time()))
        await asyncio.sleep(step_s)
        await generation.weights_are(step)
    return found


SLOW = {0: 38.0}
"""g0 takes 38 s, all others 10 s. With max_staleness 1 and two groups a step: g1 and g2 are batch 0, at 10 s; its step ends at 15 s, and
g4 and g5 start. At 25 s g3 and g4 would fill batch 1; in batch 2, 15 of the 25 s that g0 has taken so far would be too old: 30 of the 70 s
of both members of g0 and g5."""


@pytest.mark.parametrize(
    ("rollout", "second", "third"),
    [
        ({}, (["g00003", "g00004"], 25.0), (["g00000", "g00005"], 38.0)),
        ({"delay_stale_share": 0.2}, (["g00000", "g00003"], 38.0), (["g00004", "g00005"], 38.0)),
        ({"delay_stale_share": 0.2, "delay_s": 5.0}, (["g00003", "g00004"], 30.0), (["g00000", "g00005"], 38.0)),
        ({"delay_stale_share": 0.5}, (["g00003", "g00004"], 25.0), (["g00000", "g00005"], 38.0)),
    ],
)
def test_d21_a_batch_waits_for_a_slow_group_that_the_next_one_could_not_train(tmp_path, rollout, second, third):
    """Without it too, the group that was overtaken once is not overtaken again."""
    run, seen = Scripted(tmp_path, SLOW, max_staleness=1, **rollout), []

    async def learn(generation):
        seen.extend(await train(generation, 3))
        seen.append(generation.pacer.delayed_s)

    run_virtually(run.run(6, learn))
    assert seen[:3] == [(["g00001", "g00002"], 10.0), second, (third[0], max(third[1], second[1] + 5.0))]
    assert seen[3] == pytest.approx(second[1] - 25.0)


@pytest.mark.parametrize(("min_fresh_share", "given_up"), [(0.0, {}), (0.39, {}), (0.41, {"g00000": "given_up"})])
def test_d21_a_group_of_which_too_little_could_be_trained_makes_room(tmp_path, min_fresh_share, given_up):
    """At 25 s, 10 of the 25 s of g0 could be trained in the next batch."""
    run, seen = Scripted(tmp_path, SLOW, max_staleness=1, min_fresh_share=min_fresh_share), []

    async def learn(generation):
        seen.extend(await train(generation, 2))
        await asyncio.sleep(0.1)
        seen.append(run.reasons())

    run_virtually(run.run(6, learn))
    assert seen[1] == (["g00003", "g00004"], 25.0) and seen[2] == given_up
    assert run.generation.groups_given_up == len(given_up) and run.factory.open == 0
    assert "running" not in run.journal.counts()["rollouts"]


def test_what_runs_when_the_last_batch_closes_is_ended_at_once(tmp_path):
    run = Scripted(tmp_path, {2: 1000.0, 3: 1000.0}, max_staleness=4, min_fresh_share=0.0)

    async def learn(generation):
        generation.config.run.steps = generation.pacer.steps = 2
        await generation.next_batch()
        assert run.factory.open == 4
        generation.config.run.steps = generation.pacer.steps = 1
        async with generation._changed:
            generation._give_up()
        await asyncio.sleep(0.1)

    run_virtually(run.run(2, learn))
    assert run.running_at_the_end == 0 and run.reasons() == {"g00002": "run_ended", "g00003": "run_ended"}
    assert "running" not in run.journal.counts()["rollouts"] and run.generation.groups_given_up == 0
