"""The store: what is answered is stored, torn tails are cut, killed proxies resume, and the log alone gives the trace."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_helpers import ADMIN_KEY, BASH, USER, Agent, Serve, assert_chain, process, until

from capture_proxy import store as store_module
from capture_proxy.client import ProxyClient, ProxyError
from capture_proxy.records import trace_from_log
from capture_proxy.store import Store, StoreError, read_log

ASK: dict[str, Any] = {"model": "m", "messages": USER, "tools": [BASH]}


@pytest.mark.parametrize("durability", ["process", "host"])
async def test_records_come_back_whole_and_in_order(tmp_path: Path, durability: Any) -> None:
    store = Store(tmp_path, durability)
    log = store.create("s1")
    waiting = [log.append({"t": "x", "n": n}, {"a": np.arange(n, dtype=np.int32), "b": -np.ones(n, np.float32)}) for n in range(50)]
    await asyncio.gather(*waiting)
    log.close()
    await store.close()
    content = read_log(store.path("s1"))
    assert [record.header["n"] for record in content.records] == list(range(50))
    assert content.records[7].arrays["a"].tolist() == list(range(7))
    assert content.records[7].arrays["b"].dtype == np.float32
    assert content.torn_bytes == 0


@given(cut=st.integers(0, 400), flip=st.integers(0, 400))
@settings(max_examples=80, deadline=None)
def test_a_torn_or_damaged_tail_loses_only_what_follows(tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int) -> None:
    async def write(root: Path) -> tuple[Path, list[int]]:
        store = Store(root)
        log = store.create("s1")
        ends = [log.size]
        for n in range(5):
            log.append({"t": "x", "n": n}, {"a": np.arange(3, dtype=np.int32)})
            ends.append(log.size)
        log.close()
        await store.close()
        return store.path("s1"), ends

    path, ends = asyncio.run(write(tmp_path_factory.mktemp("torn")))
    whole = path.read_bytes()
    cut, flip = min(cut, len(whole)), min(flip, len(whole) - 1)
    path.write_bytes(whole[:cut])
    content = read_log(path)
    assert len(content.records) == sum(end <= cut for end in ends[1:])
    assert content.good_bytes + content.torn_bytes == cut
    damaged = bytearray(whole)
    damaged[flip] ^= 0x41
    path.write_bytes(damaged)
    if flip < ends[0]:
        with pytest.raises(StoreError):
            read_log(path)
    else:
        assert len(read_log(path).records) == sum(end <= flip for end in ends[1:])


async def test_one_store_serves_one_proxy(tmp_path: Path) -> None:
    first = Store(tmp_path)
    with pytest.raises(StoreError, match="in use by another proxy"):
        Store(tmp_path)
    await first.close()
    await Store(tmp_path).close()


async def test_torn_tail_is_cut_reported_and_the_session_goes_on(engine: FakeEngine, serve: Serve, tmp_path: Path) -> None:
    served = await serve(engine.url, store=tmp_path / "a")
    agent, created = await served.agent()
    engine.say("one", style="chars")
    await agent.ask()
    before = await served.admin.trace(created.session_id)
    await served.proxy.close()
    log = served.proxy.store.path(created.session_id)
    with log.open("ab") as file:
        file.write(b"\x99\x00\x00\x00half a record")
    again = await serve(engine.url, store=tmp_path / "a")
    agent.base = again.url + "/v1"
    engine.say("two", style="chars")
    await agent.ask({"role": "user", "content": "go on"})
    trace = await again.admin.trace(created.session_id)
    assert trace.turns[0] == before.turns[0]
    assert_chain(trace)
    status = await again.admin.status(created.session_id)
    assert status["findings"][0]["code"] == "torn_tail"
    assert status["calls_seen"] == 2
    assert trace_from_log(log) == trace


async def test_sealed_and_deleted_sessions_stay_so_after_a_restart(engine: FakeEngine, serve: Serve, tmp_path: Path) -> None:
    served = await serve(engine.url, store=tmp_path / "a")
    agents = [await served.agent() for _ in range(3)]
    for agent, _ in agents:
        await agent.ask()
    await served.admin.seal(agents[0][1].session_id)
    await served.admin.delete(agents[1][1].session_id)
    await served.proxy.close()
    again = await serve(engine.url, store=tmp_path / "a")
    codes = [(await Agent(again.url + "/v1", created.api_key, again.http).post(ASK))[0] for _, created in agents]
    assert codes == [404, 404, 200]
    assert (await again.admin.status(agents[0][1].session_id))["late_calls"] == 1
    assert set(again.proxy.sessions) == {agents[0][1].session_id, agents[2][1].session_id}


async def test_f18_an_admin_request_on_a_full_disk_is_a_503_by_name(
    engine: FakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(engine.url)
    _, created = await served.agent()

    def full(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(store_module, "_write_all", full)
        with pytest.raises(ProxyError, match="No space left") as refused:
            await served.admin.seal(created.session_id)
    assert refused.value.status == 503
    await served.admin.seal(created.session_id)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("kind", [b'"t":"begin"', b'"t":"turn"'])
async def test_c60_f18_a_full_or_read_only_disk_is_a_503_and_leaves_the_log_whole(
    engine: FakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: bytes, number: int
) -> None:
    served = await serve(engine.url)
    agent, created = await served.agent()
    await agent.ask()

    def half(fd: int, data: bytes) -> None:
        if kind in data:
            os.write(fd, data[: len(data) // 2])
            raise OSError(number, os.strerror(number))
        os.write(fd, data)

    with monkeypatch.context() as full:
        full.setattr(store_module, "_write_all", half)
        status, answer = await agent.post({**ASK, "messages": [*agent.messages, {"role": "user", "content": "x"}]})
    assert status == 503
    assert os.strerror(number) in answer["error"]["message"]
    await agent.ask({"role": "user", "content": "x"})
    trace = await served.admin.trace(created.session_id)
    assert len(trace.turns) == 2
    path = served.proxy.store.path(created.session_id)
    assert read_log(path).torn_bytes == 0
    assert trace_from_log(path) == trace
    assert (await served.admin.status(created.session_id))["in_flight"] == 0


async def test_sigterm_ends_the_proxy_in_5_s_even_with_calls_in_flight(engine: FakeEngine, tmp_path: Path) -> None:
    engine.delay_s = 60
    async with process(engine, tmp_path) as (child, url), ProxyClient(url, ADMIN_KEY) as admin, aiohttp.ClientSession() as http:
        created = await admin.create_session()
        agent = Agent(url + "/v1", created.api_key, http)
        calls = [asyncio.create_task(agent.post({**ASK, "stream": stream})) for stream in (True, False)]
        await until(lambda: engine.active == 2)
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), 5) == 0
        await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: engine.active == 0)
        assert child.stdout is not None
        assert await child.stdout.read() == b""
