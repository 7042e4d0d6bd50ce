"""Stale shares by task and duration, and the alarm for a task that is sampled and never trained."""

import json

import numpy as np
import pytest
from orchestrator.fakes import outcome

from harness_rl.learner.rows import Row
from harness_rl.orchestrator.batches import Batch, Group
from harness_rl.orchestrator.rollout import Rollout
from harness_rl.orchestrator.staleness import StaleWatch, stale_metrics, used_rollouts


def row(rollout_id: str, tokens: int, stale: int, context: int = 5) -> Row:
    mask = np.array([0] * context + [1] * tokens, dtype=np.uint8)
    old = np.array([1] * context + [1] * stale + [0] * (tokens - stale), dtype=np.uint8)  # context has no age of its own
    length = context + tokens
    ids, logprobs = np.ones(length, np.int32), np.full(length, -1.0, np.float32)
    return Row(f"{rollout_id}/n", rollout_id, rollout_id[:2], ids, logprobs, mask, old, 1.0, 1.0)


def batch(*groups: tuple[str, list[tuple[int, int, float]]]) -> Batch:
    """(task, [(tokens, stale tokens, seconds) of each rollout])"""
    made, rows = [], []
    for g, (task, members) in enumerate(groups):
        rollouts = [Rollout(f"g{g}-{m}", f"g{g}", m, 1, 1.0, outcome(1.0), [], seconds) for m, (_, _, seconds) in enumerate(members)]
        made.append(Group(f"g{g}", task, rollouts))
        rows += [row(f"g{g}-{m}", tokens, stale) for m, (tokens, stale, _) in enumerate(members)]
    return Batch(1, made, rows, made, False)


def test_shares_by_hand():
    found = stale_metrics(used_rollouts(batch(("short", [(10, 0, 1.0), (30, 0, 2.0)]), ("long", [(20, 10, 30.0), (20, 20, 60.0)]))))
    assert found == {
        "sample/stale_share": 30 / 80,
        "sample/stale_share/task/short": 0.0,
        "sample/stale_share/task/long": 30 / 40,
        "sample/stale_share/fastest": 0.0,
        "sample/stale_share/fast": 0.0,
        "sample/stale_share/slow": 0.5,
        "sample/stale_share/slowest": 1.0,
    }
    assert stale_metrics([]) == {}


def test_a_rollout_in_several_rows_counts_its_tokens_together():
    whole = batch(("t", [(10, 5, 1.0)]))
    whole.rows.append(row("g0-0", 30, 0))
    (used,) = used_rollouts(whole)
    assert (used.tokens, used.stale) == (40, 5)


def test_d21_a_slow_task_whose_tokens_are_always_too_old_raises_an_alarm_once():
    watch = StaleWatch()
    step = used_rollouts(batch(("quick", [(10, 0, 1.0)] * 4), ("slow", [(10, 9, 60.0)] * 4)))
    told = [watch.observe(step) for _ in range(50)]
    assert [index for index, lines in enumerate(told) if lines] == [3], "16 rollouts, then once"
    assert told[3] == [
        "task slow: 90% of its sampled tokens were too old to train (all tasks: 45%); "
        "raise rollout.max_staleness, or lower rollout.max_concurrent_rollouts"
    ]


@pytest.mark.parametrize("stale", [0, 5])
def test_a_task_that_is_mostly_trained_raises_none(stale):
    watch = StaleWatch()
    step = used_rollouts(batch(("slow", [(10, stale, 60.0)] * 8)))
    assert not any(watch.observe(step) for _ in range(50))


def test_what_was_counted_outlives_a_resume_and_steps_that_are_taken_back_are_not_counted_twice():
    """A slow task's alarm needs 16 rollouts, and a run may be resumed every four of them."""
    step, kept, watch, told = used_rollouts(batch(("slow", [(10, 9, 60.0)] * 4))), None, StaleWatch(), []
    for number in range(1, 7):
        told += watch.observe(step)
        kept = json.loads(json.dumps(watch.keep(number, kept, durable=2 * ((number - 1) // 2))))
        watch = StaleWatch.after(number, kept)
    assert len(told) == 1 and "task slow: 90%" in told[0]
    assert sorted(kept) == ["4", "5", "6"]  # what a resume can go back to
    back = StaleWatch.after(4, kept)
    assert (back._rollouts, back._tokens, back._told) == ({"slow": 16}, {"slow": 160}, {"slow"})
    assert StaleWatch.after(0, kept)._rollouts == {}
