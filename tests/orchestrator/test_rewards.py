import asyncio
import math
import sys
import threading
import time

import pytest
from orchestrator.fakes import FakeFactory

from harness_rl.errors import Cause, UserError
from harness_rl.orchestrator.journal import Journal
from harness_rl.orchestrator.rewards import load_reward_function, score
from harness_rl.orchestrator.rollout import RolloutRunner
from harness_rl.sessions.base import HarnessRolloutOutcome, RolloutFailure


def outcome(reward):
    return HarnessRolloutOutcome(
        env_reward=reward, completion=[], trace=None, tool_call_count=0, tool_failure_count=0, tool_calls_by_name={}, timed_out=False
    )


async def test_without_a_function_the_verifier_decides():
    assert await score(outcome(0.5), None, 5.0) == 0.5
    with pytest.raises(RolloutFailure) as failure:
        await score(outcome(None), None, 5.0)
    assert failure.value.cause is Cause.VERIFIER


async def test_a_function_may_be_async_and_sees_the_outcome():
    async def doubled(found):
        return found.env_reward * 2

    assert await score(outcome(0.25), doubled, 5.0) == 0.5


@pytest.mark.parametrize("value", ["1", True, math.nan, math.inf, [1.0]])
async def test_what_is_no_finite_number_is_never_a_reward(value):
    with pytest.raises(RolloutFailure) as failure:
        await score(outcome(1.0), lambda _: value, 5.0)
    assert failure.value.cause is Cause.REWARD_FUNCTION


async def test_none_and_an_exception_are_told_apart_and_never_zero():
    with pytest.raises(RolloutFailure) as none:
        await score(outcome(1.0), lambda _: None, 5.0)
    with pytest.raises(RolloutFailure) as raised:
        await score(outcome(1.0), lambda found: found.env_reward / 0, 5.0)
    assert none.value.cause is Cause.REWARD_NONE
    assert raised.value.cause is Cause.REWARD_FUNCTION
    assert "ZeroDivisionError" in str(raised.value)


def exits(_):
    sys.exit(0)


def interrupts(_):
    raise KeyboardInterrupt


async def exits_later(_):
    await asyncio.sleep(0)
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("function", "word"),
    [(exits, "SystemExit: 0"), (interrupts, "KeyboardInterrupt"), (exits_later, "SystemExit: 0")],
    ids=["exit", "interrupt", "async exit"],
)
async def test_a_function_cannot_end_the_run(function, word):
    with pytest.raises(RolloutFailure, match=f"{function.__name__} raised .*{word}") as failure:
        await score(outcome(1.0), function, 5.0)
    assert failure.value.cause is Cause.REWARD_FUNCTION


async def test_a_function_that_blocks_holds_up_nobody_else():
    """It returns only once the event loop has gone on under it."""
    released = threading.Event()

    def blocks(found):
        return found.env_reward if released.wait(20) else None

    scoring = asyncio.create_task(score(outcome(1.0), blocks, 30.0))
    await asyncio.sleep(0.05)
    released.set()
    assert await scoring == 1.0


async def never_ends(_):
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if never_ends.over:
                raise


@pytest.mark.parametrize("kind", ["blocks", "async", "ignores cancellation"])
async def test_d22_a_function_that_never_returns_costs_its_rollout_and_the_run_goes_on(tmp_path, kind):
    over = threading.Event()
    never_ends.over = False

    async def waits(_):
        await asyncio.sleep(60)

    function = {"blocks": lambda _: over.wait(60), "async": waits, "ignores cancellation": never_ends}[kind]

    async def play(task, episode):
        return outcome(1.0)

    factory, journal = FakeFactory(play), Journal(tmp_path / "journal.sqlite")
    runner = RolloutRunner(factory, journal, function, max_retries=2, reward_deadline_s=0.1)
    started = time.monotonic()
    rollout = await runner.run({"prompt": "t"}, group_id="g", member=0, seed=1)
    assert time.monotonic() - started < 20
    assert (rollout.reward, rollout.causes, factory.open) == (None, [Cause.REWARD_TIMEOUT], 0)
    assert journal.counts()["causes"] == {"reward_timeout": 1}
    over.set()
    never_ends.over = True


def test_a_function_is_loaded_from_a_file_or_a_module(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def half(outcome):\n    return outcome.env_reward / 2\n")
    assert load_reward_function(f"{file}:half")(outcome(1.0)) == 0.5
    assert load_reward_function("math:sqrt") is math.sqrt


@pytest.mark.parametrize("spec", ["nowhere", "no.such.module:f", "math:nothing", "missing.py:f"])
def test_a_wrong_spec_is_the_users_mistake(spec):
    with pytest.raises(UserError):
        load_reward_function(spec)
