"""What a dead proxy and a dead engine get: started again, told what held before, a bounded number of times.

The proxies are real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from harness_rl.config import RunConfig
from harness_rl.engines.look import Look
from harness_rl.errors import EngineError, HarnessRLError, UserError
from harness_rl.metrics import RunState
from harness_rl.orchestrator import proxy_process
from harness_rl.orchestrator import services as module
from harness_rl.orchestrator.learner_spec import learner_spec
from harness_rl.orchestrator.proxy_process import start_proxy
from harness_rl.orchestrator.services import Services, tokenizer_file
from harness_rl.sandboxes.reaper import LeakReport, ReapReport
from harness_rl.sessions.capture import mint

NOBODY = "http://127.0.0.1:9"
"""The engine of proxies that are never asked for tokens."""


class FakeEngine:
    url, model, info = NOBODY, "policy", SimpleNamespace(max_model_len=1024)

    def __init__(self) -> None:
        self.killed = asyncio.Event()
        self.restarts = 0

    async def died(self) -> None:
        await self.killed.wait()

    def last_words(self) -> str:
        return "out of memory"

    async def restart(self) -> None:
        self.killed.clear()
        self.restarts += 1


@contextlib.asynccontextmanager
async def running(tmp_path, adapters=False, **proxy):
    config = RunConfig.model_validate({"proxy": proxy})
    process = await start_proxy(config.proxy, engine_urls=[NOBODY], model="policy", run_dir=tmp_path, adapters=adapters)
    services = Services(config, FakeEngine(), process, RunState("test", 1))
    try:
        yield services
    finally:
        await process.stop()


def kill(services: Services) -> None:
    os.kill(services.proxy.child.process.pid, signal.SIGKILL)


async def no_resync() -> None:
    raise AssertionError("the engine lived")


async def gate(services: Services) -> tuple[bool, str | None]:
    health = await services.proxy.client.health()
    return bool(health["held"]), health["version"]


async def until_restarted(services: Services, times: int = 1) -> None:
    async with asyncio.timeout(20):
        while services.proxy.restarts < times:
            await asyncio.sleep(0.02)
        await services.for_sessions().proxy_up.wait()


@pytest.mark.parametrize(("kind", "wanted"), [("local", ["able", "reap", "audit"]), ("none", [])])
async def test_local_sandboxes_are_checked_and_reclaimed_before_a_run_and_audited_after_it(tmp_path, monkeypatch, kind, wanted):
    seen: list[str] = []
    engine = SimpleNamespace(url=NOBODY, model="policy", require=lambda **_: None, stop=AsyncMock())
    proxy = SimpleNamespace(stop=AsyncMock())
    for name, word, answer in (("refuse_unless_able", "able", None), ("reap", "reap", ReapReport()), ("audit", "audit", LeakReport())):
        monkeypatch.setattr(module, name, lambda word=word, answer=answer: seen.append(word) or answer)
    monkeypatch.setattr(module, "connect_all", AsyncMock(return_value=[engine]))
    monkeypatch.setattr(module, "start_proxy", AsyncMock(return_value=proxy))
    config = RunConfig.model_validate({"run": {"dir": tmp_path}, "engine": {"url": NOBODY}, "sandbox": {"kind": kind}})
    async with module.services(config, tmp_path, RunState("test", 1)):
        assert seen == wanted[:2]
    assert seen == wanted


async def test_a_limit_of_zero_tokens_is_none(tmp_path):
    config = RunConfig.model_validate({"rollout": {"max_conversation_tokens": 0, "max_output_tokens_per_call": 0}})
    limits = Services(config, FakeEngine(), SimpleNamespace(client=None, handoff_socket=None), RunState("test", 1)).for_sessions().limits
    assert (limits["max_conversation_tokens"], limits["max_output_tokens_per_call"], limits["max_context_tokens"]) == (None, None, 1024)


async def test_a_dead_proxy_is_started_again_at_its_address_and_knows_the_version(tmp_path):
    async with running(tmp_path) as services, services.watched(no_resync):
        await services.release("a-7")
        before, url = services.proxy.child.process.pid, services.proxy.url
        kill(services)
        await until_restarted(services)
        assert services.proxy.child.process.pid != before
        assert services.proxy.url == url
        assert await gate(services) == (False, "a-7")


async def test_a_proxy_that_is_started_again_holds_calls_until_it_knows_their_adapter(tmp_path):
    async with running(tmp_path, adapters=True) as services, services.watched(no_resync):
        assert await gate(services) == (True, None)
        assert await services.release("a-7", "policy@a-7") == ["policy@a-7"]
        kill(services)
        await until_restarted(services)
        health = await services.proxy.client.health()
        assert (health["held"], health["version"], health["adapter"]) == (False, "a-7", "policy@a-7")


async def test_a_proxy_that_dies_while_calls_are_held_holds_them_again(tmp_path):
    async with running(tmp_path) as services, services.watched(no_resync):
        await services.release("a-0")
        await services.hold("weights a-1", 30.0)
        kill(services)
        await until_restarted(services)
        assert (await gate(services))[0]
        await services.release("a-1")
        assert await gate(services) == (False, "a-1")


async def test_what_the_proxy_is_told_while_it_is_dead_reaches_the_next_one(tmp_path):
    async with running(tmp_path) as services, services.watched(no_resync):
        await services.hold("weights a-3", 30.0)
        kill(services)
        await asyncio.wait_for(services.release("a-3"), 20)
        assert await gate(services) == (False, "a-3")
        assert services.proxy.restarts == 1


async def test_restarts_are_bounded_and_the_last_death_ends_what_runs(tmp_path):
    async with running(tmp_path, max_restarts=1) as services:
        with pytest.raises(HarnessRLError, match=r"died 2 times \(proxy.max_restarts\)"):
            async with asyncio.timeout(30), services.watched(no_resync):
                kill(services)
                await until_restarted(services)
                kill(services)
                await asyncio.Event().wait()


async def test_a_proxy_that_dies_while_it_starts_again_is_started_once_more(tmp_path, monkeypatch):
    right, starts = proxy_process._spawn, []

    async def fails_once(argv, log_path, section):
        starts.append(argv)
        return await right(argv if len(starts) > 1 else [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], log_path, section)

    async with running(tmp_path, max_restarts=3) as services, services.watched(no_resync):
        await services.release("a-7")
        monkeypatch.setattr(proxy_process, "_spawn", fails_once)
        kill(services)
        await until_restarted(services, times=2)
        assert len(starts) == 2
        assert await gate(services) == (False, "a-7")


async def test_a_proxy_that_lives_but_refuses_is_no_reason_to_wait(tmp_path):
    async with running(tmp_path) as services, services.watched(no_resync):
        services.proxy.client._headers = {"Authorization": "Bearer wrong-wrong-wrong"}
        with pytest.raises(HarnessRLError, match="does not answer"):
            await asyncio.wait_for(services.release("a-0"), 5)


async def test_a_dead_engine_is_started_again_under_held_calls_and_then_synced(tmp_path):
    synced = []

    async def resync() -> None:
        synced.append((await gate(services))[0])
        await services.release("a-4")

    async with running(tmp_path) as services, services.watched(resync):
        services.engine.killed.set()
        async with asyncio.timeout(10):
            while not synced:
                await asyncio.sleep(0.02)
        assert services.engine.restarts == 1
        assert synced == [True]
        assert await gate(services) == (False, "a-4")


async def test_the_bodys_own_failure_passes_through_and_ends_the_watch(tmp_path):
    async with running(tmp_path) as services:
        with pytest.raises(HarnessRLError, match="mine"):
            async with services.watched(no_resync):
                raise HarnessRLError("mine")
        kill(services)
        await asyncio.sleep(0.3)
        assert services.proxy.restarts == 0


def test_the_learner_sees_the_gpus_that_the_config_gives_it():
    config = RunConfig.model_validate({"learner": {"gpus": "1,2", "processes": 2}})
    services = Services(config, FakeEngine(), SimpleNamespace(), RunState("test", 1))
    assert services.learner_env["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert "CUDA_VISIBLE_DEVICES" not in Services(RunConfig(), FakeEngine(), SimpleNamespace(), RunState("test", 1)).learner_env


async def test_a_failed_update_is_excused_by_an_engine_that_died_and_by_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("harness_rl.orchestrator.services.ENGINE_DEATH_S", 0.05)
    services = Services(RunConfig(), FakeEngine(), SimpleNamespace(), RunState("test", 1))
    with pytest.raises(EngineError, match="HTTP 500; the engine is alive"):
        await services.excuse_failed_sync("HTTP 500")
    services.engine.killed.set()
    await services.excuse_failed_sync("HTTP 500")
    services.engine.killed.clear()
    services.state.engine = "restarting"
    await services.excuse_failed_sync("HTTP 500")


class Elsewhere:
    """Two engines that somebody else runs, as `look` finds them."""

    def __init__(self, monkeypatch) -> None:
        self.seen = {"http://a": Look(True, "a-1"), "http://b": Look(True, "a-1")}
        monkeypatch.setattr(module, "look", self.look)
        monkeypatch.setattr(module, "LOOK_S", 0.01)

    async def look(self, url):
        return self.seen[url]

    def services(self, **engine) -> Services:
        config = RunConfig.model_validate({"engine": {"url": list(self.seen), **engine}})
        client = SimpleNamespace(hold=AsyncMock(), release=AsyncMock(return_value={"adapters_asked": []}))
        engines = [SimpleNamespace(url=url, died=asyncio.Event().wait) for url in self.seen]
        proxy = SimpleNamespace(client=client, child=SimpleNamespace(ended=asyncio.Event().wait))
        return Services(config, engines[0], proxy, RunState("test", 1), engines[1:])


async def test_an_engine_elsewhere_that_comes_back_without_the_policy_gets_it_under_held_calls(monkeypatch):
    elsewhere, held = Elsewhere(monkeypatch), []
    services = elsewhere.services()

    async def resync():
        held.append(services.state.holding)
        elsewhere.seen["http://b"] = Look(True, "a-1")
        await services.release("a-1")

    async with asyncio.timeout(5), services.watched(resync):
        await services.release("a-1")
        await asyncio.sleep(0.05)
        assert held == [] and services.state.engine == "ready"
        elsewhere.seen["http://b"] = Look(False)
        await asyncio.sleep(0.05)
        assert held == [] and services.state.engine == "restarting" and not services.state.holding  # the other goes on
        elsewhere.seen["http://b"] = Look(True, "default")
        while not held:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
    assert held == [True]


async def test_an_update_that_an_engine_elsewhere_missed_is_asked_for_again_once_it_is_back(monkeypatch):
    elsewhere, pushed = Elsewhere(monkeypatch), asyncio.Event()
    services = elsewhere.services()

    async def resync():
        assert all(seen.up for seen in elsewhere.seen.values())
        pushed.set()

    async with asyncio.timeout(5), services.watched(resync):
        await services.release("a-1")
        await services.hold("weights a-2", 30.0)
        elsewhere.seen["http://b"] = Look(False)
        await services.excuse_failed_sync("sync step 'health': http://b")
        await asyncio.sleep(0.05)
        assert not pushed.is_set()
        elsewhere.seen["http://b"] = Look(True, "a-1")  # it was only away
        await pushed.wait()


async def test_an_engine_elsewhere_that_stays_away_ends_the_run_by_its_name(monkeypatch):
    elsewhere = Elsewhere(monkeypatch)
    with pytest.raises(EngineError, match=r"http://b has not answered for 0 s \(engine.start_timeout_s\); start it again where it runs"):
        async with asyncio.timeout(5), elsewhere.services(start_timeout_s=0.05).watched(no_resync):
            elsewhere.seen["http://b"] = Look(False)
            await asyncio.Event().wait()


async def test_an_update_that_fails_while_all_engines_elsewhere_answer_ends_the_run(monkeypatch):
    monkeypatch.setattr(module, "ENGINE_DEATH_S", 0.05)
    services = Elsewhere(monkeypatch).services()
    with pytest.raises(EngineError, match="HTTP 500; the engine is alive"):
        await services.excuse_failed_sync("HTTP 500")


@pytest.mark.parametrize(
    ("seen", "served", "lost"),
    [
        (Look(True, "default"), ("a-1", None), True),
        (Look(True, "a-1"), ("a-1", None), False),
        (Look(True, "a-2"), ("a-1", None), False),  # an update is on its way
        (Look(True, "default"), (None, None), False),
        (Look(False), ("a-1", None), False),
        (Look(True, "default", frozenset({"policy"})), ("a-1", "policy@a-1"), True),
        (Look(True, "default", frozenset({"policy", "policy@a-1"})), ("a-1", "policy@a-1"), False),
    ],
)
def test_what_tells_that_an_engine_was_started_again(seen, served, lost):
    assert seen.lost(*served) is lost


def test_the_learner_knows_the_engines_dtype():
    """The bound of the weights' proof follows from it: float32 on both sides is compared exactly, and nothing else is."""
    launched = SimpleNamespace(url="http://e", model="policy", dtype="bfloat16")
    for engine, section, expected in [
        (launched, {"dtype": "auto"}, "bfloat16"),
        (SimpleNamespace(url="http://e", model="policy", dtype=None), {"url": "http://e", "dtype": "float16"}, "float16"),
        (SimpleNamespace(url="http://e", model="policy", dtype=None), {"url": "http://e"}, "auto"),
    ]:
        config = RunConfig.model_validate({"engine": section, "learner": {"dtype": "float32", "threads": 1}})
        services = Services(config, engine, SimpleNamespace(), RunState("test", 1))
        spec = learner_spec(config, services, Path("model"), "a", resume=False, reference="model")
        assert (spec.engine_dtype, spec.dtype) == (expected, "float32")


async def test_a_busy_proxy_port_is_the_users_mistake(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        section = RunConfig.model_validate({"proxy": {"port": port}}).proxy
        with pytest.raises(UserError, match=f"proxy.port {port} is in use; choose another or 0"):
            await start_proxy(section, engine_urls=[NOBODY], model="policy", run_dir=tmp_path)


@pytest.mark.parametrize("kind", ["local", "none"])
async def test_a_run_without_sandboxes_looks_for_none(tmp_path, monkeypatch, kind):
    """White-box environments train as any user, on machines that have no bubblewrap."""
    asked: list[str] = []
    nothing = SimpleNamespace(sessions=0, total=0)
    for name in ("refuse_unless_able", "reap", "audit"):
        monkeypatch.setattr(module, name, lambda name=name: asked.append(name) or nothing)
    engine = SimpleNamespace(url="http://e", model="policy", require=lambda **_: None, stop=AsyncMock())
    monkeypatch.setattr(module, "launch", AsyncMock(return_value=engine))
    monkeypatch.setattr(module, "start_proxy", AsyncMock(return_value=SimpleNamespace(stop=AsyncMock())))
    config = RunConfig.model_validate({"sandbox": {"kind": kind}, "run": {"dir": tmp_path}})
    async with module.services(config, tmp_path, RunState("t", 1)) as running:
        assert running.engine is engine
    assert asked == (["refuse_unless_able", "reap", "audit"] if kind == "local" else [])


async def test_sessions_get_the_runs_policy_of_history_and_control_tokens(tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps({"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}))
    rollout = {"history": "keep_reasoning", "control_tokens": "split", "chat_template_kwargs": {"enable_thinking": False}}
    config = RunConfig.model_validate({"run": {"dir": str(tmp_path)}, "rollout": rollout})
    found = tokenizer_file(tmp_path)
    process = await start_proxy(config.proxy, engine_urls=[NOBODY], model="policy", run_dir=tmp_path, tokenizer=found)
    try:
        lent = Services(config, FakeEngine(), process, RunState("test", 1)).for_sessions()
        created = await mint(lent.proxy, template=lent.template, history=lent.history)
        (log,) = (tmp_path / "capture").glob(f"{created.session_id}.log")
        assert b'"history":"keep_reasoning"' in log.read_bytes() and b'"control_tokens":"split"' in log.read_bytes()
    finally:
        await process.stop()
    with pytest.raises(UserError, match=r"control_tokens = split needs .*nowhere/tokenizer\.json"):
        tokenizer_file(tmp_path / "nowhere")
