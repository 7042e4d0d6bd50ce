import math

import pytest

from harness_rl.errors import Cause, UserError
from harness_rl.orchestrator.rewards import load_reward_function, score
from harness_rl.sessions.base import HarnessRolloutOutcome, RolloutFailure


def outcome(reward):
    return HarnessRolloutOutcome(
        env_reward=reward, completion=[], trace=None, tool_call_count=0, tool_failure_count=0, tool_calls_by_name={}, timed_out=False
    )


async def test_without_a_function_the_verifier_decides():
    assert await score(outcome(0.5), None) == 0.5
    with pytest.raises(RolloutFailure) as failure:
        await score(outcome(None), None)
    assert failure.value.cause is Cause.VERIFIER


async def test_a_function_may_be_async_and_sees_the_outcome():
    async def doubled(found):
        return found.env_reward * 2

    assert await score(outcome(0.25), doubled) == 0.5


@pytest.mark.parametrize("value", ["1", True, math.nan, math.inf, [1.0]])
async def test_what_is_no_finite_number_is_never_a_reward(value):
    with pytest.raises(RolloutFailure) as failure:
        await score(outcome(1.0), lambda _: value)
    assert failure.value.cause is Cause.REWARD_FUNCTION


async def test_none_and_an_exception_are_told_apart_and_never_zero():
    with pytest.raises(RolloutFailure) as none:
        await score(outcome(1.0), lambda _: None)
    with pytest.raises(RolloutFailure) as raised:
        await score(outcome(1.0), lambda found: found.env_reward / 0)
    assert none.value.cause is Cause.REWARD_NONE
    assert raised.value.cause is Cause.REWARD_FUNCTION
    assert "ZeroDivisionError" in str(raised.value)


def test_a_function_is_loaded_from_a_file_or_a_module(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def half(outcome):\n    return outcome.env_reward / 2\n")
    assert load_reward_function(f"{file}:half")(outcome(1.0)) == 0.5
    assert load_reward_function("math:sqrt") is math.sqrt


@pytest.mark.parametrize("spec", ["nowhere", "no.such.module:f", "math:nothing", "missing.py:f"])
def test_a_wrong_spec_is_the_users_mistake(spec):
    with pytest.raises(UserError):
        load_reward_function(spec)
