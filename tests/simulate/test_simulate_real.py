"""A small run with the real proxy, a fake engine over sockets and real time, and what the simulator says of it from its folder."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from capture_proxy.admin import main_app
from capture_proxy.app import Proxy, server
from capture_proxy.auth import key_hash
from capture_proxy.client import ProxyClient
from capture_proxy.settings import Settings
from harness_rl.config import RunConfig
from harness_rl.metrics import MetricsLog, RunState
from harness_rl.orchestrator.batches import Assembler
from harness_rl.orchestrator.generation import Generation
from harness_rl.orchestrator.journal import Journal, RolloutState
from harness_rl.orchestrator.rollout import Rollout
from harness_rl.orchestrator.schedule import TaskOrder
from harness_rl.sessions.outcome import write_record
from harness_rl.simulate.model import predict
from harness_rl.simulate.recorded import recorded
from tests.orchestrator.fakes import outcome
from tests.proxy.fake_engine import FakeEngine, Said

KEY = "simulate-admin-key-0123456789"
STEP_S, STOPPED_S, PROBE_S = 0.7, 0.15, 0.1
CALL_S, SLICES = 0.25, 10
CONFIG = {
    "run": {"steps": 8},
    "rollout": {"num_generations": 4, "groups_per_step": 2, "max_concurrent_rollouts": 8, "max_staleness": 1},
}


class Engine(FakeEngine):
    """Samples evenly over CALL_S of its own time, and stands while it is frozen."""

    frozen = False
    occupied_s = 0.0
    """Calls under way times seconds."""

    async def _sample(self, prompt: list[int], params: dict[str, Any]) -> tuple[list[int], Said]:
        began, versions = time.monotonic(), []
        for _ in range(SLICES):
            await asyncio.sleep(CALL_S / SLICES)
            while self.frozen:
                await asyncio.sleep(0.002)
            versions.append(self.version)
        self.occupied_s += time.monotonic() - began
        ids, said = await super()._sample(prompt, params)
        said.stop_reason = versions  # taken out again below
        return ids, said

    def _choice(self, ids: list[int], said: Said, entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
        versions, said.stop_reason = said.stop_reason, None
        at = [versions[index * SLICES // len(ids)] for index in range(len(ids))]
        borders = [0, *(n for n in range(1, len(ids)) if at[n] != at[n - 1]), len(ids)]
        spans = [{"version": at[a], "start": a, "end": b} for a, b in pairwise(borders)]
        return super()._choice(ids, said, entries, name) | {"weight_versions": spans}


@dataclass
class Agents:
    """Rollouts of three calls through the proxy, with pauses between them as of a sandbox that works."""

    admin: ProxyClient
    http: aiohttp.ClientSession
    folder: Path
    journal: Journal

    async def run(self, row: dict[str, Any], *, group_id: str, member: int, seed: int) -> Rollout:
        draw, name = random.Random(seed), f"{group_id}-{member}"
        self.journal.open_rollout(name, group_id, member, 0)
        created = await self.admin.create_session()
        for number in range(3):
            await asyncio.sleep(draw.uniform(0.05, 0.35))
            body = {"model": "m", "messages": [{"role": "user", "content": f"{name} {number}"}]}
            headers = {"Authorization": f"Bearer {created.api_key}"}
            async with self.http.post(created.base_urls["openai"] + "/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
        await self.admin.seal(created.session_id)
        trace = await self.admin.trace(created.session_id)
        write_record(self.folder / "rollouts" / name, {}, trace)
        self.journal.end_rollout(name, RolloutState.SCORED, reward=float(member % 2), turns=3)
        return Rollout(name, group_id, member, 1, float(member % 2), outcome(float(member % 2), trace=trace), [], 0.0)


@dataclass
class Measured:
    seconds: float
    learner: float
    calls_under_way: float
    staleness: float


async def a_run(folder: Path) -> Measured:
    config = RunConfig.model_validate(CONFIG)
    journal, lines = Journal(folder / "journal.sqlite"), MetricsLog(folder / "metrics.jsonl")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(default_text=" ".join("word" for _ in range(20)), version="a-0"))
        proxy = Proxy(Settings(engines=(engine.url,), model="policy", store=folder / "capture", admin_key_hash=key_hash(KEY)))
        stack.push_async_callback(proxy.close)
        runner = server(main_app(proxy), 0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stack.push_async_callback(runner.cleanup)
        admin = await stack.enter_async_context(ProxyClient(f"http://127.0.0.1:{runner.addresses[0][1]}", KEY))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await (await admin_agent(admin, http)).read()  # the template's certificate is made before the clock runs
        generation = Generation(
            config,
            Agents(admin, http, folder, journal),
            journal,
            TaskOrder([{"task_name": "t0"}, {"task_name": "t1"}], seed=0, shuffle=False),
            Assembler(2, 1.0, "std"),
            RunState("t", 8),
        )
        producing = asyncio.create_task(generation.produce())
        began, trained, ages, engine.occupied_s = time.monotonic(), 0.0, [], 0.0
        for step in range(1, 9):
            batch = await generation.next_batch()
            generation.pacer.step_began()
            at = time.monotonic()
            await asyncio.sleep(STEP_S)
            busy = time.monotonic() - at
            trained += busy
            for turn in (turn for group in batch.groups for member in group.rollouts for turn in member.outcome.trace.turns):
                ages += [step - 1 - int(v.partition("-")[2]) for v, a, b in turn.metadata["weight_versions"] for _ in range(a, b)]
            await update(admin, engine, journal, f"a-{step}")
            lines.write({"step": step, "perf/forward_s": busy})
            await generation.weights_are(step)
            await generation.trained(step, another_waits=False)
        seconds = time.monotonic() - began
        producing.cancel()
        await asyncio.wait({producing})
    return Measured(seconds, trained / seconds, engine.occupied_s / seconds, sum(ages) / len(ages))


async def admin_agent(admin: ProxyClient, http: aiohttp.ClientSession) -> aiohttp.ClientResponse:
    created = await admin.create_session()
    body = {"model": "m", "messages": [{"role": "user", "content": "."}]}
    headers = {"Authorization": f"Bearer {created.api_key}"}
    return await http.post(created.base_urls["openai"] + "/chat/completions", json=body, headers=headers)


async def update(admin: ProxyClient, engine: Engine, journal: Journal, version: str) -> None:
    since = time.time()
    await admin.hold(version, 30.0)
    at = time.monotonic()
    engine.frozen = True
    await asyncio.sleep(STOPPED_S)
    engine.version, engine.frozen = version, False
    stopped = time.monotonic() - at
    await asyncio.sleep(PROBE_S)
    await admin.release(version)
    journal.held(version, since, stopped)


async def test_a_real_run_is_predicted_within_15_percent(tmp_path: Path) -> None:
    measured = await a_run(tmp_path)
    workload = recorded(tmp_path)
    assert {len(play.calls) for plays in workload.plays.values() for play in plays} == {3} and workload.usable == 1.0

    def simulated() -> list[Any]:
        return [predict(RunConfig.model_validate(CONFIG | {"run": {"steps": 8, "seed": seed}}), workload) for seed in range(5)]

    found = await asyncio.to_thread(simulated)

    def mean(name: str) -> float:
        return sum(getattr(prediction, name) for prediction in found) / len(found)

    assert mean("seconds") == pytest.approx(measured.seconds, rel=0.15)
    assert mean("learner") == pytest.approx(measured.learner, rel=0.15)
    assert mean("calls_under_way") == pytest.approx(measured.calls_under_way, rel=0.15)
    assert mean("staleness") == pytest.approx(measured.staleness, rel=0.15)
