"""One published agent's run through the proxy, in a network namespace of its own, in which only its session's listener leads anywhere."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from capture_proxy.app import Proxy, agent_app, server
from capture_proxy.client import CreatedSession
from harness_rl.selftest.clients import Client

PORT = 8300
RUN_TIMEOUT_S = 180.0
GIT = "git init -q . && git -c user.name=a -c user.email=a@b.c commit -q --allow-empty -m start"
LAUNCH = Path(__file__).with_name("launch.py")


@dataclass(frozen=True)
class Ran:
    code: int
    said: str
    """stdout and stderr."""
    work: Path


async def play(client: Client, proxy: Proxy, session: CreatedSession, folder: Path) -> Ran:
    """The client's run to its own end, in the empty `folder`. Raises TimeoutError."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    await asyncio.to_thread(subprocess.run, GIT, shell=True, cwd=work, check=True)
    start = await asyncio.to_thread(client.prepare, f"http://127.0.0.1:{PORT}", session.api_key, home, work)
    ours, theirs = socket.socketpair()
    inside = [sys.executable, str(LAUNCH), str(theirs.fileno()), str(PORT)]
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--net", *inside, *start.argv),
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **start.env},
        pass_fds=[theirs.fileno()],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    theirs.close()
    try:
        async with _listening(proxy, session.session_id, ours):
            said = (await asyncio.wait_for(process.communicate(), RUN_TIMEOUT_S))[0].decode(errors="replace")
    finally:
        ours.close()
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, said, work)


@asynccontextmanager
async def _listening(proxy: Proxy, session_id: str, ours: socket.socket) -> AsyncIterator[None]:
    """Serves the session on the socket that the client's namespace hands over."""
    _, (fd,), _, _ = await asyncio.to_thread(socket.recv_fds, ours, 64, 1)
    runner = server(agent_app(proxy, session_id), 0.5)
    await runner.setup()
    await web.SockSite(runner, socket.socket(fileno=fd)).start()
    try:
        yield
    finally:
        await runner.cleanup()
