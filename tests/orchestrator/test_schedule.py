"""Task order."""

import pytest

from harness_rl.orchestrator.schedule import TaskOrder


def test_every_epoch_is_a_permutation_and_the_position_resumes_it():
    rows = [{"n": n} for n in range(5)]
    order = TaskOrder(rows, seed=1, shuffle=True)
    drawn = [order.next()[1]["n"] for _ in range(15)]
    assert all(sorted(drawn[start : start + 5]) == [0, 1, 2, 3, 4] for start in (0, 5, 10))
    assert drawn[:5] != drawn[5:10]
    resumed = TaskOrder(rows, seed=1, shuffle=True, position=7)
    assert [resumed.next()[1]["n"] for _ in range(8)] == drawn[7:]


def test_order_without_tasks_is_refused():
    with pytest.raises(ValueError, match="no tasks"):
        TaskOrder([], seed=0, shuffle=False)
