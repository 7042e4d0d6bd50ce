"""Groups, retries, pacing and batches, with rollouts made by functions."""

import asyncio
import contextlib
import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from orchestrator.fakes import FakeFactory, outcome

from harness_rl.config import RunConfig
from harness_rl.errors import Cause
from harness_rl.metrics import RunState
from harness_rl.orchestrator.batches import Assembler, Group, shuffled
from harness_rl.orchestrator.evaluate import evaluate
from harness_rl.orchestrator.generation import Generation
from harness_rl.orchestrator.journal import Journal
from harness_rl.orchestrator.rollout import Rollout, RolloutRunner
from harness_rl.orchestrator.schedule import TaskOrder
from harness_rl.orchestrator.stepmetrics import step_metrics
from harness_rl.sessions.base import RolloutFailure


def make(tmp_path, play, **rollout) -> tuple[Generation, FakeFactory]:
    config = RunConfig.model_validate(
        {"run": {"steps": rollout.pop("steps", 3)}, "rollout": {"num_generations": 2, "groups_per_step": 2, **rollout}}
    )
    factory = FakeFactory(play)
    journal = Journal(tmp_path / "journal.sqlite")
    section = config.rollout
    runner = RolloutRunner(factory, journal, None, section.max_retries, retry_pause_s=0.0)
    assembler = Assembler(section.groups_per_step, section.max_group_replacements, section.normalise_advantage)
    order = TaskOrder(factory.prompt_rows(), seed=0, shuffle=False)
    return Generation(config, runner, journal, order, assembler, RunState("test", config.run.steps)), factory


@contextlib.asynccontextmanager
async def producing(generation):
    task = asyncio.create_task(generation.produce())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def member_of(episode: str) -> int:
    return int(episode.split("-")[1].split("r")[0])


async def by_member(task, episode):
    return outcome(float(member_of(episode) % 2))


async def test_batches_are_whole_groups_and_no_more_work_starts_than_staleness_allows(tmp_path):
    generation, factory = make(tmp_path, by_member, max_staleness=0)
    async with producing(generation):
        for step in range(3):
            batch = await asyncio.wait_for(generation.next_batch(), 5)
            assert (batch.step, len(batch.groups), batch.short) == (step + 1, 2, False)
            assert {row.advantage for row in batch.rows} == {1.0, -1.0}
            await asyncio.sleep(0.05)
            assert len(factory.episodes) == 4 * (step + 1)  # the next batch waits for the weights
            await generation.weights_are(step + 1)


async def test_work_ahead_is_bounded_by_max_staleness(tmp_path):
    generation, factory = make(tmp_path, by_member, max_staleness=1, steps=10)
    async with producing(generation):
        await asyncio.sleep(0.2)
        assert generation.assembler.batches_closed == 2
        assert len(factory.episodes) == 8


async def test_the_run_ends_by_itself_after_the_last_batch(tmp_path):
    generation, _ = make(tmp_path, by_member, max_staleness=4, steps=2)
    async with producing(generation) as task:
        await asyncio.wait_for(task, 5)
    assert generation.assembler.batches_closed == 2


async def test_concurrency_is_bounded(tmp_path):
    async def slow(task, episode):
        await asyncio.sleep(0.01)
        return await by_member(task, episode)

    generation, factory = make(tmp_path, slow, max_concurrent_rollouts=3, max_staleness=4, num_generations=4)
    async with producing(generation) as task:
        await asyncio.wait_for(task, 5)
    assert factory.most_open == 3
    assert factory.open == 0


async def test_groups_without_signal_are_replaced_up_to_the_bound_then_the_step_is_short(tmp_path):
    async def mostly_flat(task, episode):
        return outcome(1.0 if episode.startswith("g00000") and member_of(episode) else 0.0)

    generation, factory = make(tmp_path, mostly_flat, max_group_replacements=1.0, max_staleness=0)
    async with producing(generation):
        batch = await asyncio.wait_for(generation.next_batch(), 5)
    assert batch.short
    assert len(batch.groups) == 1
    assert len(batch.considered) == 4  # twice the groups of a step, no more
    assert len(factory.episodes) == 8


async def test_infrastructure_failures_are_retried_and_a_user_none_is_not(tmp_path):
    async def flaky(task, episode):
        if "r" not in episode and member_of(episode) == 0:
            raise RolloutFailure(Cause.SANDBOX_START, "no mount")
        return await by_member(task, episode)

    generation, _ = make(tmp_path, flaky, max_staleness=0)
    async with producing(generation):
        batch = await asyncio.wait_for(generation.next_batch(), 5)
    assert [rollout.attempts for rollout in batch.groups[0].rollouts] == [2, 1]
    assert batch.groups[0].rollouts[0].causes == [Cause.SANDBOX_START]
    assert generation.state.rollouts_failed == {Cause.SANDBOX_START: 2}


async def test_f05_starts_that_fail_every_third_time_cost_attempts_and_nothing_else(tmp_path):
    """A machine short of loop devices or control groups: named, played again, never scored, and every batch still comes whole."""
    starts = 0

    async def short_of_room(task, episode):
        nonlocal starts
        starts += 1
        if starts % 3 == 0:
            raise RolloutFailure(Cause.SANDBOX_START, "the host has no free loop device")
        return outcome(1.0 + member_of(episode) % 2)

    generation, factory = make(tmp_path, short_of_room, steps=10, max_staleness=9, max_retries=5, max_concurrent_rollouts=7)
    async with producing(generation) as task:
        await asyncio.wait_for(task, 10)
    batches = [await generation.next_batch() for _ in range(10)]
    rollouts = [rollout for batch in batches for group in batch.groups for rollout in group.rollouts]
    assert [(len(batch.groups), batch.short) for batch in batches] == [(2, False)] * 10
    assert sorted(rollout.reward for rollout in rollouts) == [1.0] * 20 + [2.0] * 20, "no failed start became a 0"
    failed = sum(rollout.attempts - 1 for rollout in rollouts)
    assert failed >= 13 and generation.state.rollouts_failed[Cause.SANDBOX_START] == starts // 3
    assert starts == len(factory.episodes) >= 40 + failed and factory.open == 0


async def test_c68_an_unscorable_rollout_leaves_the_baseline_and_is_never_zero(tmp_path):
    async def one_fails(task, episode):
        if member_of(episode) == 2:
            raise RolloutFailure(Cause.VERIFIER, "no reward file")
        return await by_member(task, episode)

    generation, _ = make(tmp_path, one_fails, num_generations=3, max_retries=1, max_staleness=0)
    async with producing(generation):
        batch = await asyncio.wait_for(generation.next_batch(), 5)
    assert [rollout.reward for rollout in batch.groups[0].rollouts] == [0.0, 1.0, None]
    assert sorted(row.advantage for row in batch.rows[:2]) == [-1.0, 1.0]
    assert len(batch.rows) == 4


async def test_d22_a_rollout_that_never_ends_by_itself_does_not_hold_its_group(tmp_path):
    """Sessions end at their deadline. Three of four are left of the first group and train; of the second only one is, and it is dropped."""

    async def stuck(task, episode):
        if member_of(episode) == 3 or (episode.startswith("g00001") and member_of(episode)):
            try:
                async with asyncio.timeout(0.03):
                    await asyncio.Event().wait()
            except TimeoutError:
                raise RolloutFailure(Cause.WALL_CLOCK, "not over") from None
        return await by_member(task, episode)

    generation, factory = make(tmp_path, stuck, num_generations=4, max_retries=1, max_staleness=0)
    async with producing(generation):
        batch = await asyncio.wait_for(generation.next_batch(), 5)
        assert factory.open == 0
    assert [group.group_id for group in batch.groups] == ["g00000", "g00002"]
    for group in batch.groups:
        assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0, 0.0, None]
        assert group.rollouts[3].causes == [Cause.WALL_CLOCK] * 2
    assert len(batch.rows) == 6
    dropped = next(group for group in batch.considered if group.group_id == "g00001")
    assert dropped.drop_reason is not None


async def test_an_exception_without_a_name_is_internal_and_the_group_goes_on(tmp_path):
    async def broken(task, episode):
        if member_of(episode) == 0:
            raise KeyError("oops")
        return outcome(1.0)

    generation, factory = make(tmp_path, broken, max_staleness=0)
    async with producing(generation):
        await asyncio.sleep(0.1)
    assert generation.state.rollouts_failed[Cause.INTERNAL] > 0
    assert factory.open == 0


async def test_g11_cancellation_at_any_point_leaves_no_session_and_no_running_row(tmp_path):
    async def slow(task, episode):
        await asyncio.sleep(random.random() * 0.01)
        return await by_member(task, episode)

    for attempt in range(20):
        (tmp_path / str(attempt)).mkdir()
        generation, factory = make(tmp_path / str(attempt), slow, max_staleness=4, max_concurrent_rollouts=3)
        async with producing(generation):
            await asyncio.sleep(random.random() * 0.03)
        assert factory.open == generation.state.rollouts_running == 0
        assert "running" not in generation.journal.counts()["rollouts"]
        await take_all(generation.slots, 3)


async def take_all(slots, count):
    """Every slot is free; waits for none."""
    for _ in range(count):
        assert not slots.locked()
        await slots.acquire()
    assert slots.locked()


async def test_g11_a_thousand_cancels_at_any_await_give_every_slot_back(tmp_path):
    """Whoever holds a slot is cancelled at a random one of its awaits: in the queue for it, in the session, in its end."""

    async def steps(task, episode):
        for _ in range(5):
            await asyncio.sleep(0)
        return outcome(1.0)

    factory, journal, state, slots = FakeFactory(steps), Journal(tmp_path / "journal.sqlite"), RunState("t", 1), asyncio.Semaphore(2)
    runner, chance, ended = RolloutRunner(factory, journal, None, 0), random.Random(11), Counter()
    while ended[True] < 1000:
        number = ended.total()
        assert number < 4000
        settings = {"label": f"e{number}", "samples": 3, "temperature": 1.0, "slots": slots, "seed": 0, "state": state}
        running = asyncio.create_task(evaluate(runner, factory.prompt_rows()[:1], **settings))
        for _ in range(chance.randrange(24)):
            await asyncio.sleep(0)
        running.cancel()
        ended[(await asyncio.wait({running}))[0].pop().cancelled()] += 1
        assert (factory.open, state.rollouts_running) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
    assert "running" not in journal.counts()["rollouts"]
    await take_all(slots, 2)


def test_shuffled_advantages_are_the_same_numbers_and_who_has_none_stays_without():
    advantages = [1.0, None, -1.0, 0.0, 0.5]
    for seed in range(20):
        mixed = shuffled(advantages, str(seed))
        assert (mixed[1], mixed[3]) == (None, 0.0)
        assert sorted(value for value in mixed if value) == [-1.0, 0.5, 1.0]
    assert any(shuffled(advantages, str(seed)) != advantages for seed in range(20))


@pytest.mark.parametrize(
    ("outcomes", "rewards", "tied", "largest"),
    [
        ([0.0] * 4, [-0.01, -0.02, -0.03, -0.04], True, 0.015),
        ([0.0] * 4, [0.0, 0.0, 0.0, 0.5], True, 3**0.5),  # a reward function's own signal
        ([1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], False, 3**0.5),
        ([None] * 4, [0.01, 0.02, 0.01, 0.02], False, 1.0),  # there is no verifier: nothing is known of outcomes
    ],
)
def test_d11_small_shaping_of_one_outcome_stays_small_at_the_default_scale(outcomes, rewards, tied, largest):
    """Divided by their standard deviation, penalties of -0.01 to -0.04 would be advantages of 1.34."""
    rollouts = [
        Rollout(f"g-{n}", "g", n, 1, reward, outcome(seen), [], 0.0) for n, (seen, reward) in enumerate(zip(outcomes, rewards, strict=True))
    ]
    assembler = Assembler(1, 0.0, RunConfig().rollout.normalise_advantage)
    assembler.add(Group("g", "t", rollouts))
    batch = assembler.close()
    assert batch is not None and batch.groups[0].outcome_tied is tied
    assert max(abs(row.advantage) for row in batch.rows) == pytest.approx(largest)
    assert step_metrics(batch, {}, None)["rollout/groups_outcome_tied"] == tied


@pytest.mark.parametrize(("shuffle", "expected"), [(False, {1: 1.0, 3: -1.0}), (True, None)])
def test_a_balanced_group_gives_the_learner_every_row_and_trains_as_many_up_as_down(shuffle, expected):
    assembler = Assembler(1, 0.0, "std", balance=True, shuffle=shuffle)
    group = Group("g", "t", [Rollout(f"g-{n}", "g", n, 1, r, outcome(r), [], 0.0) for n, r in enumerate([None, 1.0, 1.0, 0.0, 1.0])])
    assembler.add(group)
    batch = assembler.close()
    assert batch is not None
    assert len(batch.rows) == assembler.row_counts["rows"] == 4  # the unscored rollout has none
    advantages = {int(row.rollout_id[-1]): row.advantage for row in batch.rows}
    assert sorted(advantages.values()) == [-1.0, 0.0, 0.0, 1.0]
    assert all(row.left_out is (row.advantage == 0.0) for row in batch.rows)  # they count in no normalisation
    if expected is not None:
        assert {member: value for member, value in advantages.items() if value} == expected


@pytest.mark.parametrize("own", [None, lambda outcomes, rewards: [reward - 0.5 for reward in rewards]])
@pytest.mark.parametrize(("mask", "rows"), [(False, {0, 1, 2}), (True, {0, 2})])
def test_c07_truncated_rollouts_count_in_the_baseline_and_train_only_where_they_may(mask, rows, own):
    assembler = Assembler(1, 0.0, "none", function=own, mask_truncated=mask)
    cut = outcome(0.0, metrics={"rollout/truncated": 1.0})
    members = [outcome(1.0), cut, outcome(0.0, metrics={"rollout/truncated": 0.0})]
    assembler.add(Group("g", "t", [Rollout(f"g-{n}", "g", n, 1, o.env_reward, o, [], 0.0) for n, o in enumerate(members)]))
    batch = assembler.close()
    assert batch is not None
    found = {int(row.rollout_id[-1]): row.advantage for row in batch.rows}
    assert set(found) == rows
    assert own is not None or found[0] == pytest.approx(2 / 3)  # 1 less the mean of all three


@pytest.mark.parametrize(
    ("rewards", "usable", "reason"), [([1, 0], True, None), ([1, 1], False, "zero_variance"), ([1, None], False, "unscorable")]
)
def test_a_group_needs_two_scored_rollouts_that_differ(rewards, usable, reason):
    group = Group("g", "t", [Rollout(f"g-{n}", "g", n, 1, reward, None, [], 0.0) for n, reward in enumerate(rewards)])
    assert (group.usable, group.drop_reason) == (usable, reason)


def _group(name: str, rewards: list[float | None]) -> Group:
    return Group(name, "t", [Rollout(f"{name}-{n}", name, n, 1, reward, None, [], 0.0) for n, reward in enumerate(rewards)])


def test_rewards_of_rounds_without_signal_count_in_the_next_step():
    assembler = Assembler(groups_per_step=1, max_replacements=1.0, scale="std")
    for number in range(4):
        assembler.add(_group(f"flat{number}", [1.0, 1.0]))
        assert assembler.close() is None
    assert assembler.idle_rounds == 2
    assembler.add(_group("good", [0.0, 1.0]))
    batch = assembler.close()
    assert batch is not None
    assert [group.group_id for group in batch.considered] == ["flat0", "flat1", "flat2", "flat3", "good"]
    assert (assembler.idle_rounds, assembler.considered) == (0, [])


@given(st.integers(1, 5), st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2**32))
@example(2, 1, 0.5, 41203736)  # two without signal, then five usable: one batch short, one full, and the fifth group is of a third
@settings(max_examples=300, deadline=None)
def test_no_group_is_older_than_max_staleness_when_it_is_trained(per_step, max_staleness, replacements, seed):
    """Groups that finish in order, with and without signal, against the arithmetic that lets them start."""
    assembler = Assembler(per_step, replacements, "std")
    running: list[int] = []  # version at the start of each group
    started: dict[str, int] = {}
    batches, version = [], 0
    for event in random.Random(seed).choices(["start", "usable", "no signal", "train"], k=400):
        if event == "start" and assembler.latest_batch(len(running)) - version <= max_staleness:
            running.append(version)
        elif event in ("usable", "no signal") and running:
            name = f"g{len(started)}"
            started[name] = running.pop(0)
            rewards = [0.0, 1.0 if event == "usable" else 0.0]
            assembler.add(Group(name, "task", [Rollout(f"{name}-{i}", name, i, 1, r, None, [], 0.0) for i, r in enumerate(rewards)]))
            batch = assembler.close()
            batches += [batch] if batch is not None else []
        elif event == "train" and batches:
            assert all(version - started[group.group_id] <= max_staleness for group in batches.pop(0).groups)
            version += 1


@given(st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.0]), st.lists(st.booleans(), max_size=60))
def test_on_policy_work_can_always_start_when_nothing_runs_and_every_batch_is_trained(per_step, replacements, signals):
    assembler = Assembler(per_step, replacements, "std")
    for number, usable in enumerate(signals):
        assert assembler.latest_batch(0) == assembler.batches_closed
        rewards = [0.0, 1.0 if usable else 0.0]
        assembler.add(Group(f"g{number}", "task", [Rollout(f"{i}", f"g{number}", i, 1, r, None, [], 0.0) for i, r in enumerate(rewards)]))
        assembler.close()
