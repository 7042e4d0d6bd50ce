"""Handed-off listeners: one session, agent routes only, until the seal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_engine import FakeEngine
from proxy_helpers import ADMIN_KEY, BASH, USER, Agent, Served

from capture_proxy.client import ProxyError, handoff_listener
from capture_proxy.handoff import HandoffServer

ASK = {"model": "m", "messages": USER, "tools": [BASH]}


@pytest.fixture
async def socket_path(served: Served, tmp_path: Path) -> AsyncIterator[Path]:
    server = HandoffServer(served.proxy, tmp_path / "handoff.sock")
    server.start()
    yield server.path
    await server.close()


def listener() -> tuple[socket.socket, str]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(16)
    return sock, f"http://127.0.0.1:{sock.getsockname()[1]}"


async def test_session_is_served_on_the_handed_off_socket_until_the_seal(served: Served, engine: FakeEngine, socket_path: Path) -> None:
    created = await served.session()
    sock, url = listener()
    await handoff_listener(socket_path, ADMIN_KEY, created.session_id, sock)
    sock.close()
    agent = Agent(url + "/v1", created.api_key, served.http)
    await agent.ask()
    await agent.ask({"role": "user", "content": "go on"})
    trace = await served.admin.trace(created.session_id)
    assert len(trace.turns) == 2
    await served.admin.seal(created.session_id)
    with pytest.raises(aiohttp.ClientError):
        await agent.post(ASK)


async def test_other_sessions_and_admin_routes_are_404_there(served: Served, engine: FakeEngine, socket_path: Path) -> None:
    mine, other = await served.session(), await served.session()
    sock, url = listener()
    await handoff_listener(socket_path, ADMIN_KEY, mine.session_id, sock)
    sock.close()
    status, answer = await Agent(url + "/v1", other.api_key, served.http).post(ASK)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert (await served.admin.status(other.session_id))["calls_seen"] == 0
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    for method, path in (
        ("GET", f"/sessions/{mine.session_id}"),
        ("GET", f"/sessions/{mine.session_id}/trace"),
        ("POST", "/sessions"),
        ("POST", "/hold"),
        ("GET", "/metrics"),
        ("GET", "/health"),
    ):
        async with served.http.request(method, url + path, json={}, headers=admin) as response:
            assert response.status == 404, path
    assert (await Agent(url + "/v1", mine.api_key, served.http).post(ASK))[0] == 200


@pytest.mark.parametrize("case", ["wrong key", "unknown session", "sealed session", "not listening"])
async def test_hand_off_is_refused_with_a_reason(served: Served, socket_path: Path, case: str) -> None:
    created = await served.session()
    if case == "sealed session":
        await served.admin.seal(created.session_id)
    sock, _ = listener()
    if case == "not listening":
        sock.close()
        sock = socket.socket()
    key = "wrong" if case == "wrong key" else ADMIN_KEY
    session_id = "nobody" if case == "unknown session" else created.session_id
    with pytest.raises(ProxyError, match="refused"):
        await handoff_listener(socket_path, key, session_id, sock)
    sock.close()


async def test_a_line_without_a_socket_or_json_is_refused(served: Served, socket_path: Path) -> None:
    created = await served.session()
    good = json.dumps({"admin_key": ADMIN_KEY, "session_id": created.session_id}).encode()
    for line in (good, b"nonsense", b"[]"):
        reader, writer = await asyncio.open_unix_connection(str(socket_path))
        writer.write(line + b"\n")
        answer = json.loads(await reader.readline())
        assert answer["ok"] is False and answer["error"]
        writer.close()


async def test_socket_is_private_and_replaces_a_stale_one(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "stale.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    server = HandoffServer(served.proxy, path)
    server.start()
    assert path.stat().st_mode & 0o777 == 0o600
    await server.close()
    assert not path.exists()


async def test_running_out_of_descriptors_once_does_not_end_hand_offs(
    served: Served, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    accept, refusals = loop.sock_accept, [OSError(24, "Too many open files")]

    async def once_refused(sock: socket.socket) -> Any:
        taken = await accept(sock)
        if refusals:
            taken[0].close()
            raise refusals.pop()
        return taken

    monkeypatch.setattr(loop, "sock_accept", once_refused, raising=False)
    created = await served.session()
    for _ in range(3):  # the first finds the server in its unpatched wait
        sock, _ = listener()
        with contextlib.suppress(ProxyError):
            await handoff_listener(socket_path, ADMIN_KEY, created.session_id, sock)
        sock.close()
    assert refusals == []
    sock, url = listener()
    await handoff_listener(socket_path, ADMIN_KEY, created.session_id, sock)
    sock.close()
    await Agent(url + "/v1", created.api_key, served.http).ask()
