"""Rule 20: a Space's URL, a Docker image and a local process are three ways to run a server. Docker is played by a program of that name."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import httpx
import pytest
from envservers.apps import LedgerAction, LedgerClient

from harness_rl.errors import UserError
from harness_rl.sessions.openenv_servers import check_room, openenv_server

DOCKER = """#!{python}
# Plays `docker`: an image is a process that passes what comes to its port on to a server that runs already.
import json, os, signal, subprocess, sys
folder, arguments = {folder!r}, sys.argv[1:]
with open(folder + "/calls", "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
if arguments[0] == "run":
    if "broken" in arguments[-1]:
        sys.exit("docker: no such image: " + arguments[-1])
    port = arguments[arguments.index("-p") + 1].split(":")[0]
    relay = subprocess.Popen([sys.executable, {relay!r}, port, {target!r}], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(relay.pid)
elif arguments[0] == "stop":
    os.kill(int(arguments[1]), signal.SIGKILL)
"""
RELAY = """import asyncio, sys
async def pipe(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
async def serve(reader, writer):
    host, port = sys.argv[2].split(":")
    there, back = await asyncio.open_connection(host, int(port))
    await asyncio.gather(pipe(reader, back), pipe(there, writer), return_exceptions=True)
async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()
asyncio.run(main())
"""


@pytest.fixture
def docker(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that holds what the program called docker was asked for."""
    relay, program = tmp_path / "relay.py", tmp_path / "docker"
    relay.write_text(RELAY)
    program.write_text(DOCKER.format(python=sys.executable, folder=str(tmp_path), relay=str(relay), target=server.removeprefix("http://")))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "calls"


def earned(url: str) -> int:
    client = LedgerClient(base_url=url).sync()
    with client:
        client.reset()
        return client.step(LedgerAction(amount=4)).observation.total


def test_rule_20_a_url_is_a_server_that_runs_already(server: str):
    with openenv_server(url=server + "/") as url:
        assert (url, earned(url)) == (server, 4)
    assert earned(server) == 4  # it is not ours to stop


def test_rule_20_an_image_runs_for_the_length_of_the_block(docker: Path):
    with openenv_server(image="registry.hf.space/openenv-ledger:latest", sessions=12, env={"LEVEL": "3"}) as url:
        assert earned(url) == 4
    version, run, *rest = [json.loads(line) for line in docker.read_text().splitlines()]
    assert version == ["version"]
    assert run[:2] == ["run", "-d"] and run[-1] == "registry.hf.space/openenv-ledger:latest"
    assert {"MAX_CONCURRENT_ENVS=12", "LEVEL=3"} == {run[i + 1] for i, word in enumerate(run) if word == "-e"}
    assert [call[0] for call in rest] == ["stop", "rm"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_rule_20_a_client_may_start_its_image_itself(docker: Path):
    client = LedgerClient.from_docker_image("ledger:latest").sync()
    client.close()
    assert [json.loads(line)[0] for line in docker.read_text().splitlines()] == ["version", "run", "stop", "rm"]


def test_rule_20_an_image_that_cannot_run_is_named(docker: Path):
    with pytest.raises(UserError, match=r"openenv_server: image broken: .*docker: no such image: broken"), openenv_server(image="broken"):
        raise AssertionError


def test_rule_20_without_docker_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="image some: Docker is not available"), openenv_server(image="some"):
        raise AssertionError


def test_rule_20_a_local_process_that_ends_says_why(tmp_path: Path):
    log = tmp_path / "server.log"
    wanted = r"openenv_server: app envs\.nothing:app: it ended with exit code 3: .*envs\.nothing"
    with pytest.raises(UserError, match=wanted), openenv_server(app="envs.nothing:app", log=log):
        raise AssertionError
    assert "envs.nothing" in log.read_text()


@pytest.mark.parametrize("ways", [{}, {"url": "http://a", "app": "b:c"}])
def test_rule_20_it_is_one_of_the_three(ways: dict[str, str]):
    with pytest.raises(UserError, match=r"give one of url= .*, image= .* and app="), openenv_server(**ways):
        raise AssertionError


def test_rule_20_a_space_that_does_not_wake_is_named():
    wanted = r"the OpenEnv server at http://127\.0\.0\.1:9 is not up after 0\.3 s \(.*refused.*\); start it, or give its URL"
    with pytest.raises(UserError, match=wanted), openenv_server(url="http://127.0.0.1:9", ready_s=0.3):
        raise AssertionError


async def test_rule_18_room_is_counted_by_sessions_that_are_open_at_once_and_given_back(server: str):
    for _ in range(3):
        await check_room(server, 64)
    with pytest.raises(UserError, match=r"takes 64 sessions at once, and 65 episodes .*'max_concurrent_rollouts': 64}"):
        await check_room(server, 65)
    with pytest.raises(UserError, match=r"takes 64 .*, and 2 environments hold up to 66 between them .*'max_concurrent_rollouts': 32}"):
        await check_room(server, 66, 2)
    await check_room(server, 64)


async def test_rule_18_what_is_no_openenv_server_is_told(server: str):
    with pytest.raises(UserError, match=r"takes 0 sessions at once, and 2 episodes .*\(.*403|404"):
        await check_room(f"{server}/nothing", 2)
