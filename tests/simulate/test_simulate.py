"""Predictions whose answers are known by arithmetic, and the parts that they rest on."""

from __future__ import annotations

import asyncio
import json
import sqlite3

import pytest
from hypothesis import given as cases
from hypothesis import settings
from hypothesis import strategies as st

from harness_rl.cli import main
from harness_rl.config import RunConfig
from harness_rl.orchestrator.journal import Journal
from harness_rl.simulate.clock import Stuck, run_virtually
from harness_rl.simulate.engines import Engines
from harness_rl.simulate.model import Prediction, predict
from harness_rl.simulate.recorded import Hold, _probe_s, most_at_once, play_of
from harness_rl.simulate.workload import Call, given

SIMPLE = {
    "run": {"steps": 10},
    "rollout": {"num_generations": 4, "groups_per_step": 2, "max_concurrent_rollouts": 64, "max_staleness": 0},
    "simulate": {
        "calls": 1, "call_s": 20, "tokens_per_call": 100, "gap_s": 0, "start_s": 10, "verify_s": 0, "spread": 0,
        "calls_per_engine": 100, "usable": 1, "step_s": 30, "stopped_s": 5, "probe_s": 5,
    },
}  # fmt: skip
"""Rollouts of 30 s, steps of 30 s and updates of 10 s, on policy: one after the other."""


def of(**sections) -> Prediction:
    config = RunConfig.model_validate({name: SIMPLE.get(name, {}) | sections.get(name, {}) for name in SIMPLE | sections})
    return predict(config, given(config.simulate, config.run.seed))


def test_time_passes_only_where_something_waits():
    async def work():
        loop = asyncio.get_running_loop()
        seen = []

        async def after(seconds, name):
            await asyncio.sleep(seconds)
            seen.append((name, loop.time()))

        await asyncio.gather(after(3600, "late"), after(1, "soon"), after(60, "then"))
        return seen

    assert run_virtually(work()) == [("soon", 1.0), ("then", 60.0), ("late", 3600.0)]
    with pytest.raises(Stuck):
        run_virtually(_for_ever())


async def _for_ever():
    await asyncio.Event().wait()


async def _timed(engines, seconds, begins=0.0):
    await asyncio.sleep(begins)
    shares = await engines.call(seconds)
    return asyncio.get_running_loop().time(), shares


def test_calls_share_what_the_engines_can_do():
    async def work():
        engines = Engines(capacity=2.0)
        # Three calls of 10 s on two places: each gets 2/3 until the end at 15; a fourth, alone, runs at full speed.
        found = await asyncio.gather(*[_timed(engines, 10.0) for _ in range(3)], _timed(engines, 4.0, begins=20.0))
        engines.settle()
        return [at for at, _ in found], engines

    ends, engines = run_virtually(work())
    assert ends == pytest.approx([15.0, 15.0, 15.0, 24.0])
    assert (engines.delivered_s, engines.busy_s, engines.occupied_s) == pytest.approx((34.0, 19.0, 49.0))


def test_calls_stand_while_the_engines_do_and_go_on_under_the_new_weights():
    async def work():
        engines = Engines(capacity=2.0)
        calls = [asyncio.create_task(_timed(engines, seconds)) for seconds in (10.0, 4.0)]
        await asyncio.sleep(4.0)
        await asyncio.sleep(1.0)
        engines.pause()
        await asyncio.sleep(3.0)
        engines.resume(1)
        return [await call for call in calls]

    (late, shares), (soon, first) = run_virtually(work())
    assert (late, soon) == pytest.approx((13.0, 4.0))
    assert first == [(0, 1.0)] and shares == [(0, pytest.approx(0.5)), (1, pytest.approx(0.5))]


def test_a_call_that_is_given_up_leaves_its_share_to_the_others():
    async def work():
        engines = Engines(capacity=1.0)
        one, two = (asyncio.create_task(_timed(engines, 10.0)) for _ in range(2))
        await asyncio.sleep(10.0)  # each has half of its work
        two.cancel()
        return (await one)[0], await engines.drained(1.0)

    assert run_virtually(work()) == (pytest.approx(15.0), True)


@cases(st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 20)), min_size=1, max_size=20), st.floats(0.5, 8))
@settings(max_examples=50, deadline=None)
def test_engines_do_all_the_work_and_no_more_than_they_can(calls, capacity):
    async def work():
        engines = Engines(capacity)
        ends = await asyncio.gather(*[_timed(engines, seconds, begins) for begins, seconds in calls])
        engines.settle()
        return max(at for at, _ in ends), engines

    end, engines = run_virtually(work())
    assert engines.delivered_s == pytest.approx(sum(seconds for _, seconds in calls), rel=1e-4, abs=1e-3)
    assert engines.delivered_s <= capacity * end + 1e-3
    assert all(end >= begins + seconds - 1e-3 for begins, seconds in calls)


def test_on_policy_everything_waits_for_everything_else():
    found = of()
    assert found.seconds == pytest.approx(10 * (30 + 30 + 10))
    assert found.learner == pytest.approx(30 / 70) and found.engines == pytest.approx(8 * 20 / (100 * 70))
    assert found.sandboxes == pytest.approx(8 * 30 / (64 * 70)) and found.engines_busy == pytest.approx(20 / 70)
    assert found.calls_under_way == pytest.approx(8 * 20 / 70)
    assert (found.staleness, found.stale_share, found.tokens) == (0.0, 0.0, 10 * 8 * 100)


def test_one_step_of_staleness_hides_the_rollouts_behind_the_steps():
    found = of(rollout=SIMPLE["rollout"] | {"max_staleness": 1})
    assert found.seconds == pytest.approx(30 + 10 * 40)  # the first rollouts, then one step and update after the other
    assert found.staleness == pytest.approx(9 / 10) and found.stale_share == 0.0  # all but the first step's tokens are one step old
    assert found.learner == pytest.approx(300 / 430)


@pytest.mark.parametrize(
    ("sections", "seconds"),
    [
        ({"simulate": {"learners": 3}}, 10 * (30 + 10 + 10)),
        ({"simulate": {"calls_per_engine": 4}}, 10 * (10 + 40 + 30 + 10)),
        ({"simulate": {"calls_per_engine": 4, "engines": 2}}, 10 * 70),
        ({"rollout": {"max_concurrent_rollouts": 4}}, 10 * (2 * 30 + 30 + 10)),
        ({"simulate": {"calls": 3, "gap_s": 7}}, 10 * (10 + 3 * 20 + 2 * 7 + 30 + 10)),
        ({"rollout": {"max_staleness": 1}, "sync": {"every": 2}}, 30 + 5 * (30 + 30 + 10) + 4 * 30),
    ],
)
def test_more_of_what_is_short_and_less_of_what_is_not(sections, seconds):
    assert of(**sections).seconds == pytest.approx(seconds)


def test_calls_that_an_update_meets():
    """One step of staleness, rollouts of one call of 100 s, steps of 30 s: updates meet running calls. `wait` lets them end first."""
    section = {"simulate": {"call_s": 100, "start_s": 0}, "rollout": {"max_staleness": 1}}
    keep, wait = of(**section), of(**section, sync={"mode": "wait", "wait_s": 1000})
    # keep: batches 0 and 1 at 100 s; steps end at 140 and 180; the next two start at 140 and 180 ...
    assert keep.seconds < wait.seconds
    assert 0 < keep.staleness < 1 and wait.staleness <= 1


def test_an_update_by_adapter_holds_and_stops_nothing():
    """Rollouts of one long call, one step of staleness: where the engines stand for an update, calls take that much longer."""
    section = {"simulate": {"call_s": 100, "start_s": 0, "probe_s": 5}, "rollout": {"max_staleness": 1}}
    merged = of(**section)
    adapter = of(**section, sync={"lora": "adapter"}, learner={"lora_rank": 8})
    assert adapter.seconds < merged.seconds
    # Two batches at 100 s; steps end at 130 and 165 with their updates; each batch starts with an update and takes 100 s, unheld.
    assert adapter.staleness == pytest.approx(9 / 10)  # a call ends under the adapter that it began with


def test_engines_that_sleep_stand_for_the_whole_step():
    section = {"simulate": {"call_s": 100, "start_s": 0, "stopped_s": 40}, "rollout": {"max_staleness": 1}}
    awake, asleep = of(**section), of(**section, sync={"sleep": True, "backend": "ipc"})
    assert asleep.engines_busy == pytest.approx(1.0, abs=0.5) and asleep.seconds != awake.seconds
    # The stop has the step of 30 s in it: an update adds what is left of it, and its proof.
    on_policy = of(simulate={"stopped_s": 40}, sync={"sleep": True, "backend": "ipc"})
    assert on_policy.seconds == pytest.approx(10 * (30 + 30 + 10 + 5))


def test_what_an_update_by_adapter_took_is_read_from_the_steps():
    steps = [{"perf/sync_load_s": 0.5, "perf/sync_s": seconds} for seconds in (2.0, 3.0)]
    assert _probe_s([Hold(0.0, 5.0, 0.0)], [steps[0], {}, steps[1]]) == [2.0, 3.0]
    assert _probe_s([Hold(0.0, 5.0, 1.0), Hold(9.0, 12.0, 2.0)], [{"perf/sync_s": 7.0}]) == [4.0, 1.0]


def test_groups_without_signal_are_played_again():
    assert of(simulate={"usable": 0.5}).seconds > 1.2 * of().seconds


def test_a_config_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr("harness_rl.orchestrator.pacing.Pacer.start_in", lambda self, batch: float("inf"))
    with pytest.raises(Exception, match="nothing happens any more"):
        of()


def test_calls_are_recorded_without_the_updates_that_held_them():
    hold = Hold(held=100.0, released=110.0, stopped_s=3.0)
    # One that ran into the update stood for 3 s; one that came in it waited for its end; the sandbox's time is its own.
    play = play_of(80.0, 140.0, [(90.0, 105.0, 7), (106.0, 120.0, 9), (125.0, 130.0, 1)], [hold])
    assert play.calls == (Call(10.0, 12.0, 7), Call(1.0, 10.0, 9), Call(5.0, 5.0, 1)) and play.after_s == 10.0
    assert most_at_once([(0, 2), (1, 3), (2, 4)]) == 2 and most_at_once([]) == 1


def test_the_command(tmp_path, capsys):
    config = tmp_path / "config.toml"
    config.write_text("[run]\nsteps = 3\n[rollout]\nmax_staleness = 1\n[simulate]\nspread = 0\n")
    assert main(["simulate", str(config), "--set", "simulate.engines=2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 3 and told["seconds"] > 0 and told["steps_per_hour"] == pytest.approx(3 * 3600 / told["seconds"])
    assert main(["simulate", str(config)]) == 0
    assert "staleness:" in capsys.readouterr().out
    assert main(["simulate", str(config), "--from", str(tmp_path)]) == 2
    assert "is not the folder of a run that trained" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with sqlite3.connect(tmp_path / "journal.sqlite") as journal:
        journal.execute("CREATE TABLE groups (state TEXT)")  # as of a version that did not write updates down
    assert main(["simulate", str(config), "--from", str(tmp_path)]) == 2
    assert "take a newer run" in capsys.readouterr().err
    Journal(tmp_path / "new" / "journal.sqlite").close()
    (tmp_path / "new" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main(["simulate", str(config), "--from", str(tmp_path / "new")]) == 2
    assert "no scored rollout with a trace" in capsys.readouterr().err


@pytest.mark.full
def test_ten_thousand_sandboxes():
    found = of(
        run={"steps": 3},
        rollout={"num_generations": 8, "groups_per_step": 600, "max_concurrent_rollouts": 10_000, "max_staleness": 2},
        simulate={"engines": 150, "learners": 40, "spread": 0.5, "calls": 6, "calls_per_engine": 32},
    )
    assert found.sandboxes > 0.1 and found.tokens > 0
