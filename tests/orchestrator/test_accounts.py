"""Every rollout, call and token of a run is in one place of its accounts, and the places add up to all there were."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from types import SimpleNamespace

import pytest
from orchestrator.fakes import FakeFactory, outcome
from rich.console import Console

from harness_rl.config import RunConfig
from harness_rl.errors import Cause, HarnessRLError
from harness_rl.orchestrator import main
from harness_rl.orchestrator.accounts import row_fates, settle, write_accounts
from harness_rl.orchestrator.journal import GroupState, Journal, RolloutState
from harness_rl.orchestrator.rollout import RolloutRunner
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.outcome import OUTCOME_FILE


def record(folder, calls: dict[str, int], sampled: int, **more: object) -> None:
    folder.mkdir(parents=True)
    capture = {"calls_seen": sum(calls.values()), "calls_by_reason": calls, "tokens": {"prompt": 9, "sampled": sampled}}
    (folder / OUTCOME_FILE).write_text(json.dumps({"capture": capture, **more}))


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


def test_demonstrations_are_told_from_evaluations_and_what_a_limit_cut_is_the_models(journal, tmp_path):
    for group, stop in (("demo-001", "finished"), ("warmup-4-000", "limit"), ("eval-000", "agent_timeout"), ("eval-001", "finished")):
        journal.open_rollout(f"{group}-0", group, 0, 0)
        journal.end_rollout(f"{group}-0", RolloutState.SCORED, reward=1.0, turns=1)
        record(tmp_path / f"{group}-0", {"trained": 1}, 5, stop_reason=stop)
    found = settle(journal, tmp_path)
    assert found.rollouts == {"demonstrated": 1, "evaluated": 3}
    assert (found.failures, found.cut) == ({}, 2)
    assert found.tokens == {"demonstrated": 5, "evaluated": 15}


def test_rows_are_counted_by_state_and_cause():
    states = {"a": "trained", "b": "trained", "c": "rejected", "d": "rejected", "e": "rejected"}
    reasons = {
        "c": "row c, turn t1: its prompt hash differs",
        "d": "row d, turn t9: its prompt hash differs",
        "e": "row e: no token of it may be trained",
    }
    assert row_fates(states, reasons) == {
        "trained": 2,
        "rejected (its prompt hash differs)": 2,
        "rejected (no token of it may be trained)": 1,
    }


@pytest.mark.parametrize("command", ["eval", "warmup"])
async def test_an_evaluation_and_a_warm_start_leave_accounts_too(tmp_path, monkeypatch, command):
    """Also one that fails half-way: its rollouts are in the journal, and so in the accounts."""
    config = RunConfig.model_validate({"run": {"dir": tmp_path, "name": "a"}, "rollout": {"max_retries": 0}})

    async def play(task, episode):
        if task["task_name"] == "t1":
            raise RolloutFailure(Cause.VERIFIER, "no verdict")
        return outcome(1.0)

    @contextlib.asynccontextmanager
    async def watched(resync):
        yield

    @contextlib.asynccontextmanager
    async def services(*_, **__):
        yield SimpleNamespace(for_sessions=lambda: None, watched=watched, release=lambda version: None)

    async def warm_start(config, running, inputs, journal, state, scripts):
        runner = RolloutRunner(inputs.factory, journal, None, 0)
        await runner.run(inputs.rows[0], group_id="demo-001", member=0, seed=0)
        raise HarnessRLError("stayed below")

    monkeypatch.setattr(main, "services", services)
    monkeypatch.setattr(main, "_warm_start", warm_start)
    monkeypatch.setenv("HARNESS_RL_CACHE", str(tmp_path / "cache"))
    factory = FakeFactory(play)
    factory.demonstration = lambda row: []
    inputs = main.Inputs(factory, factory.prompt_rows(), factory, factory.prompt_rows(), None, tmp_path)
    console = Console(file=io.StringIO(), width=100)
    if command == "eval":
        await main.evaluate_only(config, inputs, console=console)
    else:
        with pytest.raises(HarnessRLError, match="stayed below"):
            await main.warm_start_only(config, inputs, console=console)
    found = json.loads((tmp_path / "a" / "accounts.json").read_text())
    samples = config.eval.samples
    expected = {"evaluated": 2 * samples, "verifier": samples} if command == "eval" else {"demonstrated": 1}
    assert found["rollouts"] == expected
    shown = console.file.getvalue()
    assert f"a  {'done' if command == 'eval' else 'failed'}" in shown and "rollouts" in shown
