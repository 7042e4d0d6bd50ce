"""Task order and pacing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_rl.orchestrator.schedule import Pacer, TaskOrder


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


def test_on_policy_never_starts_work_for_the_next_batch():
    pacer = Pacer(groups_per_step=2, max_staleness=0)
    assert pacer.may_start(batches_closed=3, groups_waiting=1, version=3)
    assert not pacer.may_start(batches_closed=3, groups_waiting=2, version=3)
    assert not pacer.may_start(batches_closed=4, groups_waiting=0, version=3)  # batch 3 is being trained


@given(st.integers(1, 5), st.integers(0, 4), st.lists(st.sampled_from(["start", "finish", "train"]), max_size=200))
def test_no_group_is_ever_older_than_max_staleness_when_it_is_trained(per_step, max_staleness, events):
    pacer = Pacer(per_step, max_staleness)
    running: list[int] = []  # version at the start of each group
    ready: list[int] = []
    batches: list[list[int]] = []
    closed = version = 0
    for event in events:
        if event == "start" and pacer.may_start(batches_closed=closed, groups_waiting=len(running) + len(ready), version=version):
            running.append(version)
        elif event == "finish" and running:
            ready.append(running.pop(0))
            if len(ready) >= per_step:
                batches.append(ready[:per_step])
                del ready[:per_step]
                closed += 1
        elif event == "train" and batches:
            assert all(version - started <= max_staleness for started in batches.pop(0))
            version += 1
