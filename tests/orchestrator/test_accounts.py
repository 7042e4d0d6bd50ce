"""Every rollout, call and token of a run is in one place of its accounts, and the places add up to all there were."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from harness_rl.errors import Cause
from harness_rl.orchestrator.accounts import settle, write_accounts
from harness_rl.orchestrator.journal import GroupState, Journal, RolloutState
from harness_rl.sessions.outcome import OUTCOME_FILE


def record(folder, calls: dict[str, int], sampled: int) -> None:
    folder.mkdir(parents=True)
    capture = {"calls_seen": sum(calls.values()), "calls_by_reason": calls, "tokens": {"prompt": 9, "sampled": sampled}}
    (folder / OUTCOME_FILE).write_text(json.dumps({"capture": capture}))


@pytest.fixture
def journal(tmp_path):
    opened = Journal(tmp_path / "journal.sqlite")
    yield opened
    opened.close()


def test_g15_each_thing_is_in_one_place_and_the_places_add_up(journal, tmp_path):
    states = {
        "trained": (GroupState.DURABLE, None),
        "flat": (GroupState.DROPPED, "zero_variance"),
        "ready": (GroupState.SCORED, None),
        "given_up": (GroupState.DROPPED, Cause.ABANDONED),
    }
    seen = Counter()
    for position, (name, (state, reason)) in enumerate(states.items()):
        journal.open_group(name, position, "task")
        journal.move_groups([name], state, reason=reason)
    for group in (*states, "end-000"):  # the last one is an evaluation's
        for member in range(2):
            journal.open_rollout(f"{group}-{member}", group, member, 0)
            journal.end_rollout(f"{group}-{member}", RolloutState.SCORED, reward=1.0, turns=2)
            record(tmp_path / f"{group}-{member}", {"trained": 2, "retry": 1}, 10)
            seen.update(calls=3, tokens=10, rollouts=1)
    journal.open_rollout("trained-2", "trained", 2, 0)
    journal.end_rollout("trained-2", RolloutState.FAILED, cause=Cause.VERIFIER)
    record(tmp_path / "trained-2", {"trained": 1, "late": 1}, 4)
    journal.open_rollout("trained-3", "trained", 3, 0)
    journal.end_rollout("trained-3", RolloutState.FAILED, cause=Cause.ABANDONED)  # killed: it left no record
    seen.update(calls=2, tokens=4, rollouts=2)
    journal.end_step(1, "a-1", {"trained": 5, "stale": 1})
    journal.end_step(2, "a-2", {"trained": 4})

    found = settle(journal, tmp_path)
    assert found.rollouts == {"trained": 2, "zero_variance": 2, "waiting": 2, "abandoned": 3, "evaluated": 2, "verifier": 1}
    assert found.failures == {"task": 1, "ours": 1}
    assert found.calls == {
        "trained": 4,
        "zero_variance": 4,
        "waiting": 4,
        "abandoned": 4,
        "evaluated": 4,
        "retry": 10,
        "verifier": 1,
        "late": 1,
    }
    assert found.rows == {"trained": 9, "stale": 1} and found.unrecorded == 1
    totals = Counter(rollouts=found.rollouts.total(), calls=found.calls.total(), tokens=found.tokens.total())
    assert totals == seen
    write_accounts(found, tmp_path)
    assert json.loads((tmp_path / "accounts.json").read_text())["rows"] == {"trained": 9, "stale": 1}
