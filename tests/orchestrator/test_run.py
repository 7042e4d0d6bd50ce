"""What a training run checks by itself, with everything around it left out."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest
from orchestrator.fakes import FakeFactory, outcome, trace

from harness_rl.config import RunConfig
from harness_rl.errors import Cause, HarnessRLError, InvariantError
from harness_rl.learner.link import Message
from harness_rl.learner.rows import build_rows
from harness_rl.metrics import MetricsLog, RunState
from harness_rl.orchestrator.batches import Assembler, Batch, Group
from harness_rl.orchestrator.evaluate import evaluate
from harness_rl.orchestrator.generation import Generation
from harness_rl.orchestrator.journal import Journal
from harness_rl.orchestrator.learner_process import SyncReport
from harness_rl.orchestrator.rollout import Rollout, RolloutRunner
from harness_rl.orchestrator.run import TrainingRun, _lineage
from harness_rl.orchestrator.schedule import TaskOrder
from harness_rl.orchestrator.stepmetrics import step_metrics
from harness_rl.sessions.base import RolloutFailure

PROOF = {"ok": True, "mean_abs": 1e-6, "tokens": 512}


def a_run(**sync) -> TrainingRun:
    config = RunConfig.model_validate({"sync": sync})
    nothing = SimpleNamespace()
    return TrainingRun(config, nothing, FakeFactory(lambda *_: None), [], [], None, RunState("t", 1), nothing, nothing)


async def test_tokens_of_an_update_train_only_once_its_proof_has_passed():
    run = a_run()
    run.proven = {"a-0"}
    waiting = asyncio.create_task(run._wait_for_proof({"a-0", "a-1"}))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    async with run._proofs:
        run.proven.add("a-1")
        run._proofs.notify_all()
    await asyncio.wait_for(waiting, 1)


async def test_no_batch_with_tokens_of_an_unproven_update_reaches_the_learner(tmp_path):
    """Calls that ran through an update sampled by it before its proof: the whole batch waits for that, and is never sent without."""

    def batch(step: int, version: str) -> Batch:
        rows = build_rows(trace(version), f"r{step}", f"g{step}")
        return Batch(step, [Group(f"g{step}", "t", [])], rows, [], False)

    def fed(run: TrainingRun, *batches: Batch) -> tuple[asyncio.Task[None], list[int]]:
        run.config = RunConfig.model_validate({"run": {"steps": len(batches)}, "sync": {"timeout_s": 0.3}})
        run.lineage, run.proven, sent = "a", {"a-0"}, []
        run.journal, coming = Journal(tmp_path / f"{len(batches)}.sqlite"), iter(batches)

        async def send_batch(step: int, *_: object) -> None:
            sent.append(step)

        run.generation = SimpleNamespace(
            next_batch=AsyncMock(side_effect=lambda: next(coming)), pacer=SimpleNamespace(step_began=lambda: None)
        )
        return asyncio.create_task(run._feed(SimpleNamespace(send_batch=send_batch))), sent

    run = a_run()
    feeding, sent = fed(run, batch(1, "a-0"), batch(2, "a-1"))
    await asyncio.sleep(0.05)
    assert sent == [1] and not feeding.done()
    async with run._proofs:
        run.proven.add("a-1")
        run._proofs.notify_all()
    await asyncio.wait_for(feeding, 1)
    assert sent == [1, 2]
    feeding, sent = fed(a_run(), batch(1, "a-1"))
    with pytest.raises(InvariantError, match="sampled by a-1, which was not proven"):
        await feeding
    assert sent == []


def test_the_reference_of_a_resumed_run_is_the_model_it_began_with(tmp_path):
    """A warm-started run is resumed without its warm start: its `model_path` is then the model before it."""
    journal = Journal(tmp_path / "journal.sqlite")
    run = a_run()
    run.journal, run.model_path = journal, tmp_path / "warm"
    assert run._started_from() == str(tmp_path / "warm")
    resumed = a_run()
    resumed.journal, resumed.model_path = journal, tmp_path / "raw"
    assert resumed._started_from() == str(tmp_path / "warm")


async def test_tokens_that_are_never_proven_stop_the_run_by_name():
    with pytest.raises(InvariantError, match="sampled by a-7"):
        await a_run(timeout_s=0.05)._wait_for_proof({"a-7"})


def test_weights_that_nobody_proved_end_the_run_by_name():
    assert _lineage("ab12-3") == "ab12"
    with pytest.raises(InvariantError, match="calls 'default': it was started again, or updated, by somebody else"):
        _lineage("default")


async def test_the_first_update_waits_until_the_starting_weights_are_evaluated(tmp_path):
    gate, holds = asyncio.Event(), []

    async def play(task, episode):
        await gate.wait()
        return outcome(1.0)

    async def hold(reason, timeout_s):
        holds.append(reason)

    factory, journal = FakeFactory(play), Journal(tmp_path / "journal.sqlite")
    config = RunConfig.model_validate({"eval": {"at_start": True, "samples": 2}})
    services = SimpleNamespace(hold=hold)
    run = TrainingRun(config, services, factory, [], factory.prompt_rows(), None, RunState("t", 1), journal, tmp_path)
    run.lineage = "a"
    run.generation = SimpleNamespace(slots=asyncio.Semaphore(1))
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        tasks.create_task(run._evaluate_start(RolloutRunner(factory, journal, None, 0)))
        await run._hold("a-0")  # the weights that the run starts from
        run._fed.set()
        update = tasks.create_task(run._hold("a-1"))
        await asyncio.sleep(0.05)
        assert (holds, len(factory.episodes)) == (["weights a-0"], 1)
        gate.set()
        await update
    assert [(evaluation.label, evaluation.reward) for evaluation in run.evaluations] == [("start", 1.0)]
    assert len(factory.episodes) == 2 * len(factory.prompt_rows())


async def test_where_policies_are_adapters_only_the_first_holds_calls(tmp_path):
    holds = []

    async def hold(reason, timeout_s):
        holds.append(reason)

    run = a_run()
    run.config = RunConfig.model_validate({"sync": {"lora": "adapter"}, "learner": {"lora_rank": 8}})
    run.services, run.lineage = SimpleNamespace(hold=hold), "a"
    run._may_update.set()
    run.services.release = AsyncMock(return_value=[])
    run.journal, run.generation = Journal(tmp_path / "journal.sqlite"), SimpleNamespace(weights_are=AsyncMock())
    for version in ("a-0", "a-1"):
        await run._hold(version)
        await run._release(SyncReport(version, PROOF, {"probe": 1.0}, adapter=f"policy@{version}"))
    assert holds == ["weights a-0"]
    with sqlite3.connect(tmp_path / "journal.sqlite") as journal:
        assert journal.execute("SELECT version FROM holds").fetchall() == [("a-0",)]  # no other held anything


async def test_engines_that_sleep_are_held_for_from_before_the_step(tmp_path, monkeypatch):
    """Two updates begin, one hold: the journal's is from the first, and the next update has one of its own."""
    run, clock = a_run(sleep=True, backend="ipc"), iter([100.0, 300.0])
    run.services = SimpleNamespace(hold=AsyncMock(), release=AsyncMock(return_value=[]))
    run.lineage, run.journal, run.generation = "a", MagicMock(), SimpleNamespace(weights_are=AsyncMock())
    run._may_update.set()
    monkeypatch.setattr("harness_rl.orchestrator.run.time.time", lambda: next(clock))
    for version in ("a-1", "a-1"):
        await run._hold(version)
    await run._release(SyncReport("a-1", PROOF, {"stopped": 90.0}))
    await run._hold("a-2")
    await run._release(SyncReport("a-2", PROOF, {"stopped": 80.0}))
    assert [call.args for call in run.journal.held.call_args_list] == [("a-1", 100.0, 90.0), ("a-2", 300.0, 80.0)]


async def test_an_engine_that_dies_under_the_start_evaluation_has_both_start_over(tmp_path):
    """The update waits for the evaluation, the evaluation for an engine that only the waiting learner could give its weights."""
    asked, lives = [], []

    async def resync():
        asked.append("resync")

    async def hold(reason, timeout_s):
        pass

    run = a_run()
    run.services = SimpleNamespace(hold=hold)  # no renew_engine: the engine is new already
    run.lineage, run.state.holding = "a", True
    learner = SimpleNamespace(resync=resync)

    async def attempt():
        lives.append(run.resume)
        if run.resume:
            return "whole"
        await run._hold("a-0")
        await run._renew_weights(learner)
        update = asyncio.create_task(run._hold("a-1"))
        await asyncio.sleep(0)
        try:
            await run._renew_weights(learner)
        finally:
            update.cancel()

    run._attempt = attempt
    assert await asyncio.wait_for(run.run(), 5) == "whole"
    assert (lives, asked, run.lineage == "a") == ([False, True], ["resync"], False)


async def test_two_evaluations_draw_the_same_random_numbers(tmp_path):
    async def play(task, episode):
        return outcome(1.0)

    factory = FakeFactory(play)
    runner = RolloutRunner(factory, Journal(tmp_path / "journal.sqlite"), None, 0)
    for label in ("start", "end"):
        rows, slots = factory.prompt_rows(), asyncio.Semaphore(2)
        await evaluate(runner, rows, label=label, samples=2, temperature=1.0, slots=slots, seed=3, state=RunState("t", 1))
    seeds = {label: [seed for episode, seed in sorted(factory.seeds.items()) if episode.startswith(label)] for label in ("start", "end")}
    assert seeds["start"] == seeds["end"] and len(set(seeds["start"])) == 6


async def test_an_evaluation_that_a_death_cut_short_is_made_again_under_ids_of_its_own(tmp_path):
    async def play(task, episode):
        return outcome(1.0)

    factory, journal = FakeFactory(play), Journal(tmp_path / "journal.sqlite")
    journal.open_rollout("start-000-0", "start-000", 0, 0)
    journal.take_back(0)
    runner, slots = RolloutRunner(factory, journal, None, 0), asyncio.Semaphore(2)
    found = await evaluate(
        runner, factory.prompt_rows()[:1], label="start", samples=2, temperature=1.0, slots=slots, seed=3, state=RunState("t", 1)
    )
    assert (found.reward, sorted(factory.episodes)) == (1.0, ["start-000-0r1", "start-000-1"])


async def test_an_observer_hears_of_each_written_step_and_can_end_the_run(tmp_path):
    """The learner's results that are still on their way are taken, and the run says how it ended."""
    heard, group = [], Group("g", "t", [Rollout("g-0", "g", 0, 1, 1.0, outcome(1.0), [], 1.0)])

    class Observer:
        def begun(self, step):
            heard.append(("begun", step))

        def step_ended(self, step, line):
            heard.append((step, line["reward"], len(run.metrics.take_back(step))))
            return step >= 2

        def saved(self, step, path):
            heard.append(("saved", step))

        def ended(self): ...

    messages = iter(
        [Message("result", {"step": n, "version": f"a-{n}", "served": n, "rows": {}, "reasons": {}, "metrics": {}}) for n in (1, 2, 3)]
    )

    async def following(timeout):
        return next(messages)

    run = a_run()
    run.observer, run.journal = Observer(), Journal(tmp_path / "journal.sqlite")
    run.metrics = MetricsLog(tmp_path / "metrics.jsonl")
    run._leased = {n: Batch(n, [group], [], [group], False) for n in (1, 2, 3)}
    run.generation = SimpleNamespace(totals={}, weights_are=AsyncMock(), trained=AsyncMock())
    learner = SimpleNamespace(next=following, last_sync=None)
    await run._record(learner, 9)
    assert (run.state.step, run._stopped) == (2, True)
    await run._record(learner, 3)
    assert (run.state.step, heard) == (3, [(1, 1.0, 1), (2, 1.0, 2), (3, 1.0, 3)])
    assert sorted(run.journal.meta("stale_watch")) == ["1", "2", "3"]  # a resume goes on counting from its step
    run._durable(Message("checkpoint", {"step": 3, "path": "x"}))
    assert heard[-1] == ("saved", 3)


async def test_the_last_evaluation_waits_for_the_last_weights_where_a_run_ends_between_two_pushes():
    asked, pushed = [], iter([Message("sync_done", {})])
    run = a_run()
    run.state.step, run.generation = 5, SimpleNamespace(pacer=SimpleNamespace(version=4))

    async def resync():
        asked.append("resync")

    async def following(timeout):
        run.generation.pacer.version = 5  # as the release does
        return next(pushed)

    learner = SimpleNamespace(resync=resync, next=following)
    await asyncio.wait_for(run._catch_up(learner), 1)
    await asyncio.wait_for(run._catch_up(learner), 1)
    assert asked == ["resync"]
    # An engine that outlives the run gets them too, without an evaluation; one that was launched here does not.
    for url, wanted in ((None, 1), ("http://gpu1:8000", 2)):
        run.config = RunConfig.model_validate({"engine": {"url": url}})
        run.generation.pacer.version, pushed = 4, iter([Message("sync_done", {})])
        await asyncio.wait_for(run._finish(learner, None), 1)
        assert len(asked) == wanted


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"sync": {"every": 4}}, r"sync.every = 4: the last steps .* 3 steps old, and rollout.max_staleness is 2"),
        ({"sync": {"sleep": True}}, "set sync.backend = ipc"),
        ({"sync": {"lora": "adapter"}}, "no adapter without learner.lora_rank; set it, or leave sync.lora out"),
        ({"sync": {"lora": "adapter"}, "learner": {"lora_rank": 513}}, "vLLM takes ranks up to 512, and learner.lora_rank is 513"),
        *(
            (
                {"sync": {"lora": "adapter", **more}, "learner": {"lora_rank": 8}},
                rf"sync\.{name} = .* with sync.lora = adapter leave it out",
            )
            for name, more in {
                "backend": {"backend": "gloo"},
                "mode": {"mode": "wait"},
                "kv": {"kv": "keep"},
                "wait_s": {"wait_s": 5.0},
            }.items()
        ),
        ({"sync": {"lora": "adapter"}, "learner": {"lora_rank": 8}, "warmup": {"enabled": True}}, "run harness-rl warmup first"),
    ],
)
def test_updates_that_cannot_work_are_refused_before_anything_starts(sections, words):
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate(sections)
    assert RunConfig.model_validate({"sync": {"every": 3, "backend": "ipc", "sleep": True}}).sync.every == 3


def test_step_metrics_count_every_scored_rollout_and_every_call_once():
    def group(name, rewards):
        return Group(name, "t", [Rollout(f"{name}-{n}", name, n, 1, r, outcome(r), [], 1.0) for n, r in enumerate(rewards)])

    good, flat = group("good", [0.0, 1.0]), group("flat", [1.0, 1.0])
    unscored = Group("bad", "t", [Rollout("bad-0", "bad", 0, 3, None, None, ["verifier"] * 3, 1.0)])
    report = SyncReport("a-1", {"tokens": 512, "mean_abs": 1e-6, "ok": True}, {"pause": 0.1}, {"recomputed_tokens": 64.0})
    line = step_metrics(Batch(1, [good], [], [good, flat, unscored], False), {"seconds/forward": 2.0, "rows/trained": 2.0}, report)
    assert (line["reward"], line["reward_trained"]) == (0.75, 0.5)
    assert (line["rollout/scored"], line["rollout/unscored"], line["rollout/retries"]) == (4, 1, 2)
    assert (line["perf/sync_pause_s"], line["sync/recomputed_tokens"]) == (0.1, 64.0)
    assert (line["calls/trained"], line["calls/zero_variance"]) == (2, 2)
    assert Counter(rollout for rollout in line if rollout.startswith("calls/")).total() == 2
    assert (line["rollout/failed/verifier"], line["perf/forward_s"], line["rows/trained"]) == (3, 2.0, 2.0)


def test_step_metrics_tell_each_reward_function_and_what_it_logged_by_name():
    """What a session measured for some rollouts only is the mean over those; a logged name never hides one of ours."""
    metrics = [
        {"rewards/win": 1.0, "rewards/Wordle": 0.5, "log/moves": 3.0, "log/reward": 9.0, "env/reset_s": 0.2, "aux": 7.0},
        {"rewards/win": 0.0, "log/moves": 5.0, "env/reset_s": 0.4},
    ]
    rollouts = [Rollout(f"g-{n}", "g", n, 1, 0.0, outcome(float(n), metrics=m), [], 1.0) for n, m in enumerate(metrics)]
    group = Group("g", "t", rollouts)
    line = step_metrics(Batch(1, [group], [], [group], False), {}, None)
    assert (line["rewards/win/mean"], line["rewards/win/std"], line["rewards/Wordle/mean"]) == (0.5, 0.5, 0.5)
    assert (line["moves"], line["env/reset_s"], line["reward"]) == (4.0, pytest.approx(0.3), 0.0)
    assert "aux" not in line


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (None, r"no rollout could be scored in 2 steps' worth of work: \d+ times verifier; see"),
        ("raises", r"no rollout could be scored in 2 steps' worth of work: \d+ times reward_function; see"),
        (0.0, r"one reward for all its rollouts \(mean 0.00\): nothing can be learned; make the tasks easier, or warm the model up"),
        (0.5, r"one reward for all its rollouts \(mean 0.50\)"),
    ],
)
async def test_d26_work_that_teaches_nothing_ends_the_run_with_the_reason(tmp_path, reward, words):
    async def play(task, episode):
        if reward is None:
            raise RolloutFailure(Cause.VERIFIER, "no verdict")
        return outcome(0.0 if reward == "raises" else reward)

    def broken(outcome):
        raise ZeroDivisionError

    sections = {"run": {"max_unscorable_steps": 2, "steps": 9}, "rollout": {"num_generations": 2, "groups_per_step": 2, "max_retries": 0}}
    config = RunConfig.model_validate(sections)
    factory, journal, state = FakeFactory(play), Journal(tmp_path / "journal.sqlite"), RunState("t", 9)
    run = TrainingRun(config, SimpleNamespace(), factory, [], [], None, state, journal, tmp_path)
    runner = RolloutRunner(factory, journal, broken if reward == "raises" else None, 0, retry_pause_s=0.0)
    assembler = Assembler(2, config.rollout.max_group_replacements, "std")
    run.generation = Generation(config, runner, journal, TaskOrder(factory.prompt_rows(), seed=0, shuffle=False), assembler, state)
    with pytest.raises(HarnessRLError, match=words):
        await asyncio.wait_for(asyncio.gather(run._watch_idle(), run.generation.produce()), 20)
