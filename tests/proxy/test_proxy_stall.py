"""Small calls beside a huge session and beside a client that never reads: measured in one run, with and without, as a ratio."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from fake_engine import FakeEngine
from proxy_helpers import ADMIN_KEY, USER, Agent, Serve, process

from capture_proxy.client import ProxyClient
from capture_proxy.records import trace_from_log

HUGE = Path(__file__).with_name("huge_call.py")


class HugeSession:
    """The other process, one huge call at a time."""

    def __init__(self, child: asyncio.subprocess.Process, engine_url: str) -> None:
        self.child, self.engine_url = child, engine_url

    async def line(self) -> str:
        assert self.child.stdout is not None
        return (await asyncio.wait_for(self.child.stdout.readline(), 120)).decode().strip()

    async def start(self, url: str, key: str, messages: int) -> int:
        """Size of the body, which is about to go out."""
        assert self.child.stdin is not None
        self.child.stdin.write(f"{url} {key} {messages}\n".encode())
        return int(await self.line())


@pytest.fixture
async def huge() -> AsyncIterator[HugeSession]:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, str(HUGE), stdin=pipe, stdout=pipe)
    session = HugeSession(child, "")
    session.engine_url = await session.line()
    yield session
    child.kill()
    await child.wait()


async def small_calls(agents: list[Agent], until: asyncio.Event) -> list[float]:
    """Latencies, in seconds, of what the agents ask one after the other until the event."""
    times: list[float] = []

    async def ask(agent: Agent) -> None:
        while not until.is_set():
            start = time.perf_counter()
            status, _ = await agent.post({"model": "m", "messages": USER})
            assert status == 200
            times.append(time.perf_counter() - start)

    await asyncio.gather(*(ask(agent) for agent in agents))
    return times


async def for_seconds(agents: list[Agent], seconds: float) -> list[float]:
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    return await small_calls(agents, over)


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(int(share * len(times)), len(times) - 1)]


def assert_not_stalled(beside: list[float], without: list[float]) -> None:
    """Bars as ratios, wide enough for a machine that has other work to do."""
    shown = {q: (round(percentile(beside, q) * 1e3), round(percentile(without, q) * 1e3)) for q in (0.5, 0.9, 0.99, 1)}
    for share, most in ((0.5, 4), (0.9, 12)):
        assert percentile(beside, share) <= most * percentile(without, share), f"ms beside and without, by share: {shown}"


async def test_c12_no_step_of_a_huge_call_holds_the_loop(
    engine: FakeEngine, serve: Serve, huge: HugeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processor time of the loop's thread, which other work on the machine does not change: 48 MB at once are 300 ms of `json` alone."""
    longest = 0.0
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        nonlocal longest
        start = time.thread_time()
        run(handle)
        longest = max(longest, time.thread_time() - start)

    served = await serve(huge.engine_url)
    created = await served.session()
    chat = served.url + "/v1/chat/completions"
    await huge.start(chat, created.api_key, 1)
    assert await huge.line() == "200"  # certified by now
    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    await huge.start(chat, created.api_key, 48)
    assert await huge.line() == "200"
    monkeypatch.undo()
    assert longest < 0.15, f"{longest:.3f} s of the loop in one go"


async def test_c12_a_100_mb_body_does_not_stall_small_calls(engine: FakeEngine, huge: HugeSession, tmp_path: Path) -> None:
    flags = ("--engine", huge.engine_url)
    async with process(engine, tmp_path, *flags) as (_, url), ProxyClient(url, ADMIN_KEY) as admin, aiohttp.ClientSession() as http:
        agents = [Agent(url + "/v1", (await admin.create_session()).api_key, http) for _ in range(4)]
        other = await admin.create_session()
        await agents[0].ask()
        chat = url + "/v1/chat/completions"
        await huge.start(chat, other.api_key, 1)
        assert await huge.line() == "200"
        await for_seconds(agents, 0.5)
        without = await for_seconds(agents, 2.0)
        await huge.start(chat, other.api_key, 100)
        over = asyncio.Event()
        calls = asyncio.create_task(small_calls(agents, over))
        assert await huge.line() == "200"
        over.set()
        assert_not_stalled(await calls, without)
        assert len((await admin.trace(other.session_id)).turns) == 2


@pytest.mark.full
async def test_a_body_of_256_mb_is_served_and_stored_and_one_beyond_is_refused(
    engine: FakeEngine, huge: HugeSession, tmp_path: Path
) -> None:
    engine.url = huge.engine_url  # the only one
    async with process(engine, tmp_path) as (_, url), ProxyClient(url, ADMIN_KEY) as admin:
        created = await admin.create_session()
        chat = url + "/v1/chat/completions"
        assert 250 << 20 < await huge.start(chat, created.api_key, 230) < 256 << 20
        assert await huge.line() == "200"
        assert await huge.start(chat, created.api_key, 235) > 256 << 20
        assert await huge.line() == "413"
        assert (await admin.status(created.session_id))["calls_by_reason"] == {"trained": 1, "refused": 1}
        trace = await admin.trace(created.session_id)
    assert len(trace.turns[0].request["messages"]) == 230
    assert trace_from_log(next((tmp_path / "store").glob(f"*{created.session_id}*"))) == trace


async def test_clients_that_never_read_do_not_stall_small_calls(engine: FakeEngine, tmp_path: Path) -> None:
    """Twelve answers of 4 MB, streamed and not, to sockets that take almost nothing."""
    async with process(engine, tmp_path) as (_, url), ProxyClient(url, ADMIN_KEY) as admin, aiohttp.ClientSession() as http:
        agents = [Agent(url + "/v1", (await admin.create_session()).api_key, http) for _ in range(4)]
        await for_seconds(agents, 0.5)
        without = await for_seconds(agents, 2.0)
        deaf = await admin.create_session()
        sockets = []
        for number in range(12):
            engine.say("x" * 4_000_000)
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            raw = json.dumps({"model": "m", "messages": USER, "stream": number % 2 == 0}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {deaf.api_key}\r\nContent-Length: {len(raw)}\r\n\r\n"
            sock.sendall(head.encode() + raw)
            sockets.append(sock)
        async with asyncio.timeout(60):
            while (await admin.status(deaf.session_id))["turns"] < 12:
                await asyncio.sleep(0.05)
        beside = await for_seconds(agents, 2.0)
        assert_not_stalled(beside, without)
        status = await admin.seal(deaf.session_id, grace_s=0.1)
        assert status["calls_by_reason"] == {"late": 12}
        for sock in sockets:
            sock.close()
