"""Several workers: one address, each session in one process, and a worker's death is that of a lone proxy, for its sessions only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from proxy_helpers import ADMIN_KEY, BASH, USER, Agent, process, until
from test_proxy_loss import Client, check
from wires import WIRES

from capture_proxy.auth import key_hash, new_key
from capture_proxy.cli import main
from capture_proxy.client import ProxyClient, ProxyError, handoff_listener
from capture_proxy.front import BUSY, Front
from capture_proxy.front_admin import WorkerDown
from capture_proxy.routing import owner, target_of
from capture_proxy.settings import Settings

ASK = {"model": "m", "messages": USER, "tools": [BASH]}
N = 3


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def insist(agent: Agent) -> None:
    """Asks until there is an answer: what was on its way to a worker when it died is cut."""
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            await agent.ask()
            return
        await asyncio.sleep(0.05)


async def held(admin: ProxyClient, calls: int) -> None:
    """Returns once so many calls are held, by workers that may have to come up first."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(ProxyError):  # as long as no worker is up
                if (await admin.health())["calls_held"] == calls:
                    return
            await asyncio.sleep(0.05)


def worker_pids(pid: int) -> dict[int, int]:
    """Worker's index -> its process."""
    pids = {}
    for child in children(pid):
        argv = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        pids[int(argv[argv.index(b"--worker") + 1].split(b":")[0])] = child
    return pids


@given(workers=st.integers(1, 9), place=st.sampled_from(["bearer", "x-api-key", "x-goog-api-key", "path", "query"]), extra=st.booleans())
def test_a_request_leads_to_the_worker_of_its_key(workers: int, place: str, extra: bool) -> None:
    key = new_key()
    header = {"bearer": f"Authorization: bearer {key}", "x-api-key": f"X-Api-Key:{key}", "x-goog-api-key": f"x-goog-api-key: {key}"}
    path = {"path": f"/s/{key}/v1/models/a%2Fb:generateContent", "query": f"/v1beta/models/m:generateContent?alt=sse&key={key}"}
    lines = [f"POST {path.get(place, '/v1/chat/completions')} HTTP/1.1", "Host: x"]
    lines += ["X-Goog-Api-Key: other"] * (extra and place in ("bearer", "x-api-key", "path"))
    target = target_of("\r\n".join([*lines, header.get(place, "Accept: */*")]).encode())
    assert (target.kind, target.name) == ("key", key)
    assert 0 <= owner(key, workers) < workers


def test_admin_routes_are_told_apart() -> None:
    assert target_of(b"POST /sessions HTTP/1.1").kind == "new"
    assert target_of(b"GET /metrics?x=1 HTTP/1.1").kind == "everyone"
    lines = {
        b"GET /sessions/s1": False,
        b"GET /sessions/s1/trace": False,
        b"POST /sessions/s1/seal": True,
        b"DELETE /sessions/s1?purge=1": True,
    }
    for line, ends in lines.items():
        target = target_of(line + b" HTTP/1.1")
        assert (target.kind, target.name, target.ends) == ("session", "s1", ends)


async def test_from_outside_several_workers_are_one_proxy(engine: FakeEngine, tmp_path: Path) -> None:
    async with process(engine, tmp_path, "--workers", str(N)) as (child, url), ProxyClient(url, ADMIN_KEY) as admin:
        async with aiohttp.ClientSession() as http:  # one pool of connections for every session
            agents = []
            for number in range(12):
                created = await admin.create_session(metadata={"number": number})
                assert created.base_urls["openai"] == url + "/v1"
                agents.append((Agent(url + "/v1", created.api_key, http), created))
            assert {owner(created.session_id, N) for _, created in agents} == set(range(N))
            assert all(owner(created.session_id, N) == owner(created.api_key, N) for _, created in agents)
            for _ in range(2):
                await asyncio.gather(*(agent.ask({"role": "user", "content": "go on"}) for agent, _ in agents))
            for wire in WIRES:
                talk = wire("You are an agent.", True)
                talk.say("hello")
                for _, created in agents[:4]:
                    async with http.post(url + talk.path, json=talk.body(), headers={"x-api-key": created.api_key}) as response:
                        assert talk.read(await response.json())[0] == "ok"
            assert (await Agent(url + "/v1", new_key(), http).post(ASK))[0] == 404
            for number, (_, created) in enumerate(agents):
                trace = await admin.trace(created.session_id)
                assert len(trace.turns) == (6 if number < 4 else 2) and trace.turns[1].metadata["continues"] == trace.turns[0].node_id
                assert (await admin.status(created.session_id))["metadata"] == {"number": number}
            health = await admin.health()
            assert health["sessions_open"] == 12 and health["workers"] == N and health["engines"] == {engine.url: True}
            async with http.get(url + "/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as response:
                values = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if not line.startswith("#"))
            assert values['capture_proxy_calls_total{outcome="answered"}'] == str(12 * 2 + 4 * 4)
            assert values["capture_proxy_sessions_open"] == "12" and values[f'capture_proxy_engine_up{{engine="{engine.url}"}}'] == "1"
            for method, path in (("GET", "/metrics"), ("POST", "/hold"), ("POST", "/release"), ("POST", "/sessions")):
                async with http.request(method, url + path, json={}, headers={"Authorization": "Bearer wrong"}) as response:
                    assert response.status == 401
            with pytest.raises(ProxyError, match="timeout_s"):
                await admin.hold("weights", timeout_s=-1)
            engine.requests.clear()
            await admin.hold("weights", timeout_s=30)
            calls = [asyncio.create_task(agent.ask({"role": "user", "content": "held"})) for agent, _ in agents]
            async with asyncio.timeout(10):
                while (await admin.health())["calls_held"] < 12:
                    await asyncio.sleep(0.02)
            assert engine.requests == []
            engine.version = "a-1"
            await admin.release("a-1")
            await asyncio.gather(*calls)
            assert (await admin.health())["version"] == "a-1"
            sealed = await admin.seal(agents[0][1].session_id)
            assert sealed["state"] == "sealed" and (await agents[0][0].post(ASK))[0] == 404
            await admin.delete(agents[1][1].session_id)
            with pytest.raises(ProxyError, match="no such session"):
                await admin.status(agents[1][1].session_id)
        pids = [child.pid, *children(child.pid)]
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), 6) == 0
        assert not any(alive(pid) for pid in pids)
    assert {path.parent.name for path in (tmp_path / "store").glob("**/*.log")} == {f"worker-{n}" for n in range(N)}
    assert main(["replay", str(tmp_path / "store")]) == 0


async def test_a_killed_worker_comes_back_with_its_sessions_and_the_others_notice_nothing(engine: FakeEngine, tmp_path: Path) -> None:
    """What clients hold is in the store, as with a lone proxy; calls of other workers' sessions are never cut."""
    rng = random.Random(7)
    for number in range(3000):
        engine.say(f"Answer {number}.", style=rng.choice(("words", "chars")), delay_s=rng.choice((0.001, 0.01)))
    up = asyncio.Event()
    up.set()
    async with process(engine, tmp_path, "--workers", "2") as (child, url), ProxyClient(url, ADMIN_KEY) as admin:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            clients = [Client(await admin.create_session(), WIRES[n % 4], n // 4 % 2 == 0, random.Random(n)) for n in range(16)]
            drivers = [asyncio.create_task(client.run(url, http, up)) for client in clients]
            for _ in range(2):
                before = sum(len(client.got) for client in clients)
                await until(lambda: sum(len(client.got) for client in clients) > before + 20, 60)  # noqa: B023
                os.kill(worker_pids(child.pid)[0], signal.SIGKILL)
                hit = [client for client in clients if owner(client.session.session_id, 2) == 0]
                held = {id(client): len(client.got) for client in hit}
                await until(lambda: all(len(client.got) > held[id(client)] for client in hit), 60)  # noqa: B023
            up.clear()
            await until(lambda: not any(client.busy for client in clients), 60)
            for driver in drivers:
                driver.cancel()
            await asyncio.gather(*drivers, return_exceptions=True)
        assert (await admin.health())["worker_restarts"] == 2
        sampled, unknown = set(engine.sampled), 0
        for client in clients:
            unknown += check(engine, await admin.trace(client.session.session_id), client, sampled)
            if client not in hit:
                assert client.failed == 0
        assert unknown <= 2


async def test_a_worker_comes_back_under_the_hold_and_the_adapter_that_are_in_force(engine: FakeEngine, tmp_path: Path) -> None:
    engine.adapters = {"policy@a-4"}
    async with process(engine, tmp_path, "--workers", "2", "--adapters") as (child, url), ProxyClient(url, ADMIN_KEY) as admin:
        sessions = [await admin.create_session() for _ in range(4)]
        assert (await admin.release("a-3", "policy@a-3"))["adapters_asked"] == ["policy@a-3"]
        await admin.hold("weights", timeout_s=60)
        for pid in worker_pids(child.pid).values():
            os.kill(pid, signal.SIGKILL)
        async with aiohttp.ClientSession() as http:
            calls = [asyncio.create_task(insist(Agent(url + "/v1", created.api_key, http))) for created in sessions]
            await held(admin, 4)
            assert engine.bodies("/render") == []
            health = await admin.health()
            assert (health["version"], health["adapter"]) == ("a-3", "policy@a-3")
            await admin.release("a-4", "policy@a-4")
            await asyncio.gather(*calls)
        assert {body["model"] for body in engine.bodies("/generate")} == {"policy@a-4"}


async def test_handed_off_listeners_reach_their_worker_and_outlive_it(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "handoff.sock"
    flags = ("--workers", "2", "--handoff-socket", str(path))
    async with process(engine, tmp_path, *flags) as (child, url), ProxyClient(url, ADMIN_KEY) as admin:
        async with aiohttp.ClientSession() as http:
            sessions = [await admin.create_session() for _ in range(2)]
            places = []
            for created in sessions:
                with socket.create_server(("127.0.0.1", 0)) as listener:
                    await handoff_listener(path, ADMIN_KEY, created.session_id, listener)
                    places.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
            with socket.create_server(("127.0.0.1", 0)) as listener:
                with pytest.raises(ProxyError, match="admin key is wrong"):
                    await handoff_listener(path, "x" * 20, sessions[0].session_id, listener)
                with pytest.raises(ProxyError, match="no such open session"):
                    await handoff_listener(path, ADMIN_KEY, "s" + "0" * 24, listener)
            agents = [Agent(place + "/v1", created.api_key, http) for place, created in zip(places, sessions, strict=True)]
            for agent in agents:
                await agent.ask()
            assert (await Agent(places[0] + "/v1", sessions[1].api_key, http).post(ASK))[0] == 404
            for pid in worker_pids(child.pid).values():
                os.kill(pid, signal.SIGKILL)
            await http.close()
        async with aiohttp.ClientSession() as http:
            for agent, created in zip(agents, sessions, strict=True):
                agent.http = http
                await insist(agent)  # in the listener's queue until the worker is back
                assert len((await admin.trace(created.session_id)).turns) == 2
                await admin.seal(created.session_id)
                with pytest.raises(aiohttp.ClientError):
                    await agent.post(ASK)


async def test_a_worker_comes_back_under_the_hold_on_a_handed_off_listener_too(engine: FakeEngine, tmp_path: Path) -> None:
    """Calls wait in the listener's queue; the first one that the new worker takes is held."""
    path = tmp_path / "handoff.sock"
    flags = ("--workers", "2", "--handoff-socket", str(path))
    async with process(engine, tmp_path, *flags) as (child, url), ProxyClient(url, ADMIN_KEY) as admin:
        sessions = [await admin.create_session() for _ in range(8)]
        places = []
        for created in sessions:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                await handoff_listener(path, ADMIN_KEY, created.session_id, listener)
                places.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
        await admin.hold("weights", timeout_s=60)
        for pid in worker_pids(child.pid).values():
            os.kill(pid, signal.SIGKILL)
        async with aiohttp.ClientSession() as http:
            agents = [Agent(place + "/v1", created.api_key, http) for place, created in zip(places, sessions, strict=True)]
            calls = [asyncio.create_task(insist(agent)) for agent in agents]
            await held(admin, 8)
            assert engine.bodies("/render") == []
            engine.version = "a-1"
            await admin.release("a-1")
            await asyncio.gather(*calls)


async def test_a_release_that_is_refused_is_not_what_a_new_worker_is_told(engine: FakeEngine, tmp_path: Path) -> None:
    engine.adapters = {"policy@a-3"}
    async with process(engine, tmp_path, "--workers", "2", "--adapters") as (child, url), ProxyClient(url, ADMIN_KEY) as admin:
        created = await admin.create_session()
        await admin.release("a-3", "policy@a-3")
        with pytest.raises(ProxyError, match="was started with --adapters") as refused:
            await admin.release("a-4")
        assert refused.value.status == 400
        for pid in worker_pids(child.pid).values():
            os.kill(pid, signal.SIGKILL)
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            await insist(Agent(url + "/v1", created.api_key, http))
        assert {body["model"] for body in engine.bodies("/generate")} == {"policy@a-3"}


async def test_a_stranger_who_asks_for_a_seal_takes_no_listener_away(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "handoff.sock"
    flags = ("--workers", "2", "--handoff-socket", str(path))
    async with process(engine, tmp_path, *flags) as (child, url), ProxyClient(url, ADMIN_KEY) as admin:
        created = await admin.create_session()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await handoff_listener(path, ADMIN_KEY, created.session_id, listener)
            place = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ProxyError, match="admin key is missing or wrong"):
            async with ProxyClient(url, "wrong" * 4) as stranger:
                await stranger.seal(created.session_id)
        for pid in worker_pids(child.pid).values():
            os.kill(pid, signal.SIGKILL)
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            await insist(Agent(place + "/v1", created.api_key, http))


async def test_a_worker_that_cannot_be_told_the_hold_is_started_once_more(engine: FakeEngine, tmp_path: Path) -> None:
    """It runs, and nobody could reach it: its sessions must not stay without a worker."""
    settings = Settings(engines=(engine.url,), model="policy", store=tmp_path / "store", admin_key_hash=key_hash(ADMIN_KEY), workers=2)
    folder, key = tmp_path / "run", tmp_path / "key"
    folder.mkdir()
    key.write_text(ADMIN_KEY)
    argv = ["--engine", engine.url, "--model", "policy", "--store", str(settings.store), "--admin-key-file", str(key), "--workers", "2"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        front = Front(settings, argv, folder)
        try:
            await front.start(listener)
            worker, restore, failures = front.workers[0], front.admin.restore, [WorkerDown("it does not answer")]

            async def once_down(it: Any) -> None:
                if failures:
                    raise failures.pop()
                await restore(it)

            front.admin.restore = once_down  # type: ignore[method-assign]
            assert worker._child is not None
            worker._child.kill()
            await until(lambda: worker.restarts == 2 and worker.up.is_set(), 60)
        finally:
            await front.close()


def test_what_is_said_for_a_worker_that_does_not_come_up_is_one_answer() -> None:
    head, _, body = BUSY.partition(b"\r\n\r\n")
    assert json.loads(body)["error"]["type"] == "server_error" and f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")


async def test_a_client_whose_worker_does_not_come_up_gets_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture_proxy.front.START_S", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        down: Any = SimpleNamespace(up=asyncio.Event())
        await Front._give(SimpleNamespace(), down, ours)  # type: ignore[arg-type]
        assert theirs.recv(65536) == BUSY


async def test_workers_end_with_a_killed_front(engine: FakeEngine, tmp_path: Path) -> None:
    async with process(engine, tmp_path, "--workers", "2") as (child, _):
        pids = list(worker_pids(child.pid).values())
        child.kill()
        await child.wait()
        await until(lambda: not any(alive(pid) for pid in pids), 10)


@pytest.mark.parametrize(("flags", "word"), [(("--workers", "3"), "--workers 2"), ((), "--workers 2"), (("--workers", "0"), "1 or more")])
async def test_a_store_belongs_to_one_number_of_workers(
    engine: FakeEngine, tmp_path: Path, flags: tuple[str, ...], word: str, capfd: pytest.CaptureFixture[str]
) -> None:
    store, key = tmp_path / "store", tmp_path / "key"
    store.mkdir()
    (store / "workers").write_text("2\n")
    key.write_text(ADMIN_KEY)
    argv = ["--engine", engine.url, "--model", "policy", "--store", str(store), "--admin-key-file", str(key), "--port", "0", *flags]
    assert await asyncio.to_thread(main, argv) in (1, 2)
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1 and word in said[0]
