from __future__ import annotations

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_rl.learner.advantages import balanced_group_advantages, group_advantages, has_signal


def test_hand_computed() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [1.0, -1.0, -1.0, 1.0]
    values = group_advantages([1.0, 0.0, 0.0], "std")
    assert values == pytest.approx([math.sqrt(2), -math.sqrt(0.5), -math.sqrt(0.5)])
    assert group_advantages([1.0, 0.0, 0.0], "none") == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_d06_each_rollout_counts_once() -> None:
    # rollout A became three rows, B one: the baseline sees two rollouts, whatever the rows
    assert group_advantages([1.0, 0.0], "none") == [0.5, -0.5]


def test_none_leaves_the_baseline_and_has_no_advantage() -> None:
    assert group_advantages([1.0, None, 0.0, None], "none") == [0.5, None, -0.5, None]
    assert group_advantages([None, None]) == [None, None]


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.3], [None, 0.3], [0.1 + 0.2, 0.3]])
def test_a_group_without_signal_is_flagged_and_zero(rewards: list[float | None]) -> None:
    assert not has_signal(rewards)
    assert all(a in (0.0, None) for a in group_advantages(rewards))


def test_d11_shaping_noise_stays_small_without_std() -> None:
    values = group_advantages([-0.01, -0.02, -0.03, -0.04], "none")
    assert max(abs(v) for v in values if v is not None) <= 0.03


@pytest.mark.parametrize("bad", [math.nan, math.inf, True, "1"])
def test_a_reward_that_is_not_a_finite_number_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        group_advantages([1.0, bad])  # type: ignore[list-item]


def test_balanced_keeps_the_best_and_the_worst_and_every_scored_rollout_stays_accounted_for() -> None:
    assert balanced_group_advantages([0.0, 1.0, 0.0, 0.0]) == [-1.0, 1.0, 0.0, 0.0]
    assert balanced_group_advantages([1.0, 0.0, 1.0, None, 1.0]) == [1.0, -1.0, 0.0, None, 0.0]
    # PODS: of graded rewards the extremes; the mean of [0, 0.1, 0.2, 1] is 0.325, so one rollout is above it
    assert balanced_group_advantages([0.1, 1.0, 0.0, 0.2], "none") == [0.0, 0.5, -0.5, 0.0]
    assert balanced_group_advantages([1.0, 1.0, None]) == [0.0, 0.0, None]


@given(st.lists(st.sampled_from([None, 0.0, 1.0]), max_size=12))
def test_balanced_two_valued_rewards_push_up_and_down_alike(rewards: list[float | None]) -> None:
    values = balanced_group_advantages(rewards)
    size = min(rewards.count(0.0), rewards.count(1.0))
    assert [value is None for value in values] == [reward is None for reward in rewards]
    assert (values.count(1.0), values.count(-1.0)) == (size, size)
    assert all(value in (None, 0.0, 1.0, -1.0) for value in values)
    assert all(value * (reward - 0.5) >= 0 for value, reward in zip(values, rewards, strict=True) if value and reward is not None)


@given(st.lists(st.none() | st.floats(-5, 5), max_size=12), st.sampled_from(["std", "none"]))
def test_balanced_graded_rewards_sum_to_zero_and_leave_no_more_extreme_rollout_out(
    rewards: list[float | None], scale: Literal["std", "none"]
) -> None:
    values = balanced_group_advantages(rewards, scale)
    assert [value is None for value in values] == [reward is None for reward in rewards]
    assert math.fsum(value for value in values if value is not None) == pytest.approx(0.0, abs=1e-9)
    scored = [(reward, value) for reward, value in zip(rewards, values, strict=True) if reward is not None]
    kept = [reward for reward, value in scored if value]
    assert bool(kept) == has_signal(rewards)
    assert all(min(kept) - 1e-9 <= reward <= max(kept) + 1e-9 for reward, _ in scored if kept)


def test_leave_one_out_by_hand() -> None:
    # RLOO: 1 - mean(0, 0, 1) = 2/3, and 0 - mean(1, 0, 1) = -2/3; None is in no one's baseline
    assert group_advantages([1.0, 0.0, None, 0.0, 1.0], "none", "leave_one_out") == pytest.approx([2 / 3, -2 / 3, None, -2 / 3, 2 / 3])
    assert group_advantages([3.0, 1.0], "none", "leave_one_out") == [2.0, -2.0]
    assert group_advantages([3.0, 1.0], "none", "mean") == [1.0, -1.0]
    assert group_advantages([3.0, 1.0], "std", "leave_one_out") == [2.0, -2.0]  # the group's own deviation is 1
    assert group_advantages([2.0, 2.0], "none", "leave_one_out") == [0.0, 0.0]
    with pytest.raises(ValueError, match="mean or leave_one_out"):
        group_advantages([0.0, 1.0], "std", "median")  # type: ignore[arg-type]
