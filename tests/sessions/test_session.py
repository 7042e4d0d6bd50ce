"""Life of a session around Harbor's real trial, with a fake proxy, agent and sandbox: nothing leaks, every end has its name."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harbor.environments.base import HealthcheckError
from harbor.models.trial.config import TrialConfig

from capture_proxy.client import ProxyError
from capture_proxy.trace import TrainingTrace
from harness_rl.errors import Cause
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.capture import mint
from harness_rl.sessions.harbor_session import HarborSession

from .fakes import Bench, World, exit_code, named, write_task

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def bench(world: World, tmp_path: Path) -> Iterator[Bench]:
    with named(world) as name:
        yield Bench(world, name, tmp_path)


async def failure_of(session: HarborSession) -> RolloutFailure:
    with pytest.raises(RolloutFailure) as caught:
        await session.run()
    await session.close()
    return caught.value


def record(session: HarborSession) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((session.spec.trials_dir / "outcome.json").read_text())
    return data


async def test_a_rollout_from_start_to_record(bench: Bench) -> None:
    session = await bench.session()
    await session.run()
    assert len(session.fetch_training_trace().turns) == 2
    assert session.verify().env_reward == 1.0
    outcome = session.outcome()
    assert (outcome.env_reward, outcome.turns, outcome.stop_reason) == (1.0, 2, "finished")
    assert bench.world.events == ["clean", "verify"], "the agent's leftovers go before anything is graded"
    assert bench.world.proxy.sessions["s0"]["state"] == "sealed"
    await session.close()
    await session.close()
    assert bench.world.proxy.deleted == ["s0"]
    assert not bench.world.alive
    folder = session.spec.trials_dir
    assert sorted(path.name for path in folder.iterdir()) == ["outcome.json", "trace.bin", "trial"]
    assert (folder / "trial" / "result.json").is_file()
    assert TrainingTrace.from_bytes((folder / "trace.bin").read_bytes()) == session.fetch_training_trace()
    saved = record(session)
    assert (saved["cause"], saved["env_reward"], saved["turns"], saved["trained_tokens"]) == (None, 1.0, 2, 4)
    assert {"environment_setup", "agent_setup", "agent_execution", "verifier"} <= saved["seconds"].keys()


async def test_the_key_is_in_no_file(bench: Bench) -> None:
    session = await bench.session()
    await session.run()
    for path in session.spec.trials_dir.rglob("*"):
        if path.is_file():
            assert session.capture.api_key.encode() not in path.read_bytes(), path


async def test_the_trace_is_sealed_before_grading_and_late_calls_are_not_in_it(bench: Bench) -> None:
    bench.world.verify_s = 0.3
    session = await bench.session()
    running = asyncio.create_task(session.run())
    while "verify" not in bench.world.events:
        await asyncio.sleep(0.01)
    assert bench.world.proxy.sessions["s0"]["state"] == "sealed"
    bench.world.proxy.call(session.capture.api_key)
    await running
    assert len(session.fetch_training_trace().turns) == 2
    assert bench.world.proxy.sessions["s0"]["late"] == 1
    await session.close()


FAILURES: list[tuple[dict[str, Any], Cause]] = [
    ({"start_error": OSError("no bwrap")}, Cause.SANDBOX_START),
    ({"start_error": HealthcheckError("unhealthy")}, Cause.SANDBOX_START),
    ({"setup_error": RuntimeError("no layer at /opt")}, Cause.AGENT_SETUP),
    ({"agent_calls": 0, "agent_error": exit_code()}, Cause.AGENT_CRASH),
    ({"agent_calls": 0}, Cause.NO_MODEL_CALL),
    ({"agent_error": KeyError("a bug in the adapter")}, Cause.INTERNAL),
    ({"clean_error": RuntimeError("the sandbox is gone")}, Cause.SANDBOX_LOST),
]


@pytest.mark.parametrize(("behaviour", "cause"), FAILURES, ids=[f"{cause}-{number}" for number, (_, cause) in enumerate(FAILURES)])
async def test_failure(bench: Bench, behaviour: dict[str, Any], cause: Cause) -> None:
    for name, value in behaviour.items():
        setattr(bench.world, name, value)
    session = await bench.session()
    failure = await failure_of(session)
    assert failure.cause is cause
    assert not bench.world.alive
    assert bench.world.proxy.deleted == ["s0"]
    saved = record(session)
    assert saved["cause"] == cause.value
    assert saved.get("env_reward") is None
    with pytest.raises(RolloutFailure) as caught:
        session.verify()
    assert caught.value.cause is cause


async def test_engine_failure_is_told_by_the_proxy(bench: Bench) -> None:
    bench.world.agent_error = exit_code()
    bench.world.proxy.reasons = {"engine_failed": 3}
    assert (await failure_of(await bench.session())).cause is Cause.ENGINE


async def test_a_proxy_that_was_restarted_under_a_rollout_may_lack_calls_so_it_is_not_graded(bench: Bench) -> None:
    restarts = iter([0, 1])  # when the session is made, when it is sealed
    bench.services = replace(bench.services, proxy_restarts=lambda: next(restarts))
    failure = await failure_of(await bench.session())
    assert failure.cause is Cause.CAPTURE
    assert "started again" in failure.message
    assert "verify" not in bench.world.events


@pytest.mark.parametrize(("dies_after_s", "graded"), [(0.0, False), (0.3, False), (None, True)])
async def test_a_rollout_ends_with_the_proxy_that_dies_under_its_agent_and_not_after(
    bench: Bench, dies_after_s: float | None, graded: bool
) -> None:
    """The agent would wait for its own time limit; once the trace is fetched, the rollout needs no proxy."""
    died = asyncio.Event()
    bench.services = replace(bench.services, proxy_died=died.wait)  # type: ignore[arg-type]
    bench.world.agent_s, bench.world.verify_s = (0.05, 0.3) if graded else (30.0, 0.0)
    session = await bench.session()
    running = asyncio.create_task(session.run())
    started = time.monotonic()
    if dies_after_s is None:
        while "verify" not in bench.world.events:
            await asyncio.sleep(0.01)
    else:
        await asyncio.sleep(dies_after_s)
    died.set()
    if graded:
        await running
        assert session.verify().env_reward == 1.0
    else:
        with pytest.raises(RolloutFailure, match="died during this rollout") as caught:
            await running
        assert caught.value.cause is Cause.CAPTURE
        assert time.monotonic() - started < 10 and "verify" not in bench.world.events
    await session.close()
    assert not bench.world.alive


async def test_capture_failures(bench: Bench) -> None:
    bench.world.proxy.seal_error = ProxyError("no answer")
    failure = await failure_of(await bench.session())
    assert failure.cause is Cause.CAPTURE
    bench.world.proxy.seal_error = None
    bench.world.proxy.broken_trace = True
    failure = await failure_of(await bench.session())
    assert failure.cause is Cause.CAPTURE
    assert "loss_mask" in failure.message
    assert "verify" not in bench.world.events, "what cannot be trained is not graded"


@pytest.mark.parametrize("text", [None, "", "nan", "1,0"])
async def test_f09_f10_no_valid_reward_is_none_and_keeps_the_trace(bench: Bench, text: str | None) -> None:
    bench.world.reward = text
    session = await bench.session()
    await session.run()
    with pytest.raises(RolloutFailure) as caught:
        session.verify()
    assert caught.value.cause is Cause.VERIFIER
    assert session.outcome().env_reward is None
    assert len(session.fetch_training_trace().turns) == 2
    assert record(session)["cause"] == "verifier"
    await session.close()


async def test_c11_agent_timeout_with_a_verdict(bench: Bench) -> None:
    session = await bench.session()
    object.__setattr__(session.spec, "agent_timeout_s", 0.2)
    bench.world.agent_s = 30
    await session.run()
    assert session.verify().env_reward == 1.0
    assert session.outcome().timed_out
    assert session.outcome().stop_reason == "agent_timeout"
    await session.close()


async def test_an_exit_after_calls_is_graded_whatever_its_words(bench: Bench) -> None:
    bench.world.agent_error = exit_code("rate limit exceeded")
    session = await bench.session()
    await session.run()
    assert session.verify().env_reward == 1.0
    assert session.outcome().stop_reason == "agent_exit"
    await session.close()


async def test_a_timeout_while_the_engine_is_down_is_not_the_policys(bench: Bench) -> None:
    session = await bench.session()
    object.__setattr__(session.spec, "agent_timeout_s", 0.2)
    bench.world.agent_s = 30
    bench.world.proxy.engine_up = False
    bench.world.proxy.reasons = {"abandoned": 1}
    assert (await failure_of(session)).cause is Cause.ENGINE


async def test_a_multi_step_task_is_sealed_after_its_last_agent(bench: Bench) -> None:
    bench.task = write_task(bench.folder / "steps-task", steps=("one", "two"))
    session = await bench.session()
    await session.run()
    assert session.verify().env_reward == 1.0
    assert session.outcome().turns == 4
    assert bench.world.events == ["clean", "verify", "clean", "verify"]
    assert sorted(session.verify().artifacts) == ["steps/one/verifier/reward.txt", "steps/two/verifier/reward.txt"]
    await session.close()


async def test_a_capture_session_minted_under_cancellation_is_deleted(world: World) -> None:
    minting = asyncio.create_task(mint(world.proxy, metadata={}))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    minting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await minting
    assert (world.proxy.sessions, world.proxy.deleted) == ({}, ["s0"])


@pytest.mark.parametrize("phase", ["start_s", "agent_s", "verify_s"])
async def test_wall_clock(bench: Bench, phase: str) -> None:
    setattr(bench.world, phase, 30)
    bench.deadline_s = 0.5
    session = await bench.session()
    started = time.monotonic()
    failure = await failure_of(session)
    assert time.monotonic() - started < 10
    assert failure.cause is Cause.WALL_CLOCK
    assert {"start_s": "start", "agent_s": "agent", "verify_s": "verifier"}[phase] in failure.message
    assert not bench.world.alive


async def test_a_sandbox_that_does_not_stop_does_not_hold_the_session(bench: Bench) -> None:
    bench.world.stop_s = 30
    bench.deadline_s, bench.stop_timeout_s = 0.5, 0.3
    session = await bench.session()
    started = time.monotonic()
    failure = await failure_of(session)
    assert 0.7 < time.monotonic() - started < 10, "it was waited for, and not for ever"
    assert failure.cause is Cause.WALL_CLOCK


@pytest.mark.skipif(
    "override_error_policy" not in TrialConfig.model_fields, reason="older Harbor calls such a reward invalid, and it has a veto"
)
async def test_a_broken_stop_keeps_the_verdict(bench: Bench) -> None:
    bench.world.stop_error = RuntimeError("umount failed")
    session = await bench.session()
    await session.run()
    assert session.verify().env_reward == 1.0
    await session.close()


async def test_close_ends_a_running_session(bench: Bench) -> None:
    bench.world.agent_s = 30
    session = await bench.session()
    running = asyncio.create_task(session.run())
    await asyncio.sleep(0.3)
    await session.close()
    with pytest.raises(RolloutFailure) as caught:
        await running
    assert caught.value.cause is Cause.CANCELLED
    assert not bench.world.alive
    assert bench.world.proxy.deleted == ["s0"]


async def test_leftovers_of_a_killed_attempt_are_not_taken_for_its_own(bench: Bench) -> None:
    session = await bench.session()
    for stale in (session.spec.trial_dir / "verifier", session.spec.trials_dir / "trial" / "verifier"):
        stale.mkdir(parents=True)
        (stale / "reward.json").write_text('{"reward": 5}')
    await session.run()
    assert session.verify().env_reward == 1.0
    await session.close()


async def test_close_without_run(bench: Bench) -> None:
    session = await bench.session()
    await session.close()
    assert bench.world.proxy.deleted == ["s0"]
    with pytest.raises(RolloutFailure):
        session.verify()


async def test_close_when_the_proxy_is_gone(bench: Bench) -> None:
    session = await bench.session()
    await session.run()
    bench.world.proxy.sessions.clear()
    await session.close()


async def test_random_cancels_leave_nothing(bench: Bench) -> None:
    """48 sessions, each cancelled (once or twice) at a random moment of its life, 12 at a time."""
    world, chance = bench.world, random.Random(7)
    world.start_s, world.agent_s, world.verify_s, world.stop_s = 0.02, 0.05, 0.05, 0.02
    gate = asyncio.Semaphore(12)
    ends: list[str] = []

    async def rollout() -> None:
        async with gate:
            session = await bench.session()
            running = asyncio.create_task(session.run())
            for _ in range(chance.choice((1, 1, 2))):
                await asyncio.sleep(chance.uniform(0, 0.5))
                running.cancel()
            try:
                await running
                ends.append("done")
            except asyncio.CancelledError:
                ends.append("cancelled")
                assert world.proxy.sessions[session.capture.session_id]["state"] == "sealed"
            assert session.spec.trial_dir.name + "__env" not in world.alive
            await session.close()
            assert record(session)["cause"] in (None, "cancelled")

    before = asyncio.all_tasks()
    await asyncio.gather(*(rollout() for _ in range(48)))
    assert len(ends) == 48
    assert "cancelled" in ends
    assert not world.alive
    assert not world.proxy.sessions
    assert asyncio.all_tasks() == before
