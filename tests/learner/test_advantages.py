from __future__ import annotations

import math

import pytest

from harness_rl.learner.advantages import group_advantages, has_signal


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
