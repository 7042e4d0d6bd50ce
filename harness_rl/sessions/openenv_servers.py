"""OpenEnv servers: three ways to have one for the length of a block, and whether it has room for a run.

Invariant: what was started here is gone when the block ends, also when this process is killed (a local process dies with it). A server that
holds fewer sessions than episodes will run at once is refused before anything is trained, with the settings that cure it: OpenEnv tells
nobody how many sessions a server holds, so that many are opened, all at once, and closed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import aiohttp
import httpx

from harness_rl.errors import UserError
from harness_rl.processes import die_with_parent

SESSIONS_VARIABLE = "MAX_CONCURRENT_ENVS"
"""How the sessions that a server may hold are told to a process or an image; Spaces read it too."""
READY_S = 180.0
"""How long a server may take to answer /health: a Space that slept, an image that is pulled."""
_OPEN_S = 60.0
_STOP_S = 10.0
_SERVE = """import socket, sys, uvicorn
config = uvicorn.Config(sys.argv[1], log_level="warning", access_log=False, timeout_graceful_shutdown=1)
uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[2]))])
"""


@contextlib.contextmanager
def openenv_server(
    *,
    url: str | None = None,
    image: str | None = None,
    app: str | None = None,
    sessions: int = 64,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    ready_s: float = READY_S,
) -> Iterator[str]:
    """The base URL of a server that answers. One of:

    - `url`: a Space, or whatever else runs already;
    - `image`: a Docker image, run on a free port for the length of the block (the `docker` program is needed);
    - `app`: `module:app` of an ASGI application, run by this interpreter in a process of its own.

    `sessions` is what the latter two may hold (`MAX_CONCURRENT_ENVS`), `env` are further environment variables of theirs. A local process
    writes to `log` (None: a temporary file). Raises UserError.
    """
    if sum(way is not None for way in (url, image, app)) != 1:
        raise UserError("openenv_server: give one of url= (a Space), image= (Docker) and app= (a local process)")
    variables = {SESSIONS_VARIABLE: str(sessions), **(env or {})}
    if url is not None:
        _wait(url, ready_s)
        yield url.rstrip("/")
    elif image is not None:
        with _container(image, variables, ready_s) as found:
            yield found
    else:
        assert app is not None
        with _process(app, variables, log, ready_s) as found:
            yield found


@contextlib.contextmanager
def _container(image: str, variables: dict[str, str], ready_s: float) -> Iterator[str]:
    try:
        from openenv.core.containers.runtime import LocalDockerProvider
    except ImportError:
        raise UserError("openenv_server: images are run by openenv; install it: pip install 'harness-rl[openenv]'") from None
    try:
        provider = LocalDockerProvider()
        url = provider.start_container(image, env_vars=variables)
    except RuntimeError as error:
        raise UserError(f"openenv_server: image {image}: {' '.join(str(error).split())[:300]}") from None
    try:
        _wait(url, ready_s)
        yield url
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            provider.stop_container()


@contextlib.contextmanager
def _process(app: str, variables: dict[str, str], log: Path | None, ready_s: float) -> Iterator[str]:
    with contextlib.ExitStack() as cleanup:
        # It inherits a socket that listens already: no other process can take the port, and no call is refused before it is ready.
        listener = cleanup.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        folder = cleanup.enter_context(tempfile.TemporaryDirectory())
        words = cleanup.enter_context((log or Path(folder) / "server.log").open("w+b"))
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, app, str(listener.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            pass_fds=(listener.fileno(),),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        cleanup.callback(_stop, process)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            _wait(url, ready_s, process)
        except UserError as error:
            words.seek(0)
            lines = [line.strip() for line in words.read().decode(errors="replace").splitlines() if line.strip()]
            raise UserError(f"openenv_server: app {app}: {error}: {' | '.join(lines[-2:])[-400:]}") from None
        listener.close()
        yield url


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(url: str, seconds: float, process: subprocess.Popen[bytes] | None = None) -> None:
    """Until the server says that it is healthy. Raises UserError."""
    deadline, found = time.monotonic() + seconds, "no answer"
    while True:
        if process is not None and process.poll() is not None:
            raise UserError(f"it ended with exit code {process.returncode}")
        try:
            status = httpx.get(f"{url.rstrip('/')}/health", timeout=5.0, trust_env=not _is_local(url)).status_code
            if status == 200:
                return
            found = f"/health answers {status}"
        except httpx.TransportError as error:
            found = str(error) or type(error).__name__
        except httpx.InvalidURL as error:
            raise UserError(f"openenv_server: {url!r} is not the URL of a server: {error}") from None
        if time.monotonic() > deadline:
            raise UserError(f"the OpenEnv server at {url} is not up after {seconds:g} s ({found}); start it, or give its URL")
        time.sleep(0.1)


def _is_local(url: str) -> bool:
    return "://127.0.0.1" in url or "://localhost" in url or "://0.0.0.0" in url


async def check_room(url: str, sessions: int, kinds: int = 1) -> None:
    """Whether the server takes `sessions` sessions at once, of so many kinds of environment together.

    Raises UserError that says how many it takes, and what to change.
    """
    room = asyncio.Event()
    refusals: list[str] = []
    held: list[str] = []
    async with aiohttp.ClientSession(trust_env=not _is_local(url)) as http:

        async def hold() -> None:
            try:
                async with asyncio.timeout(_OPEN_S), http.ws_connect(f"{url.rstrip('/')}/ws", max_msg_size=0) as channel:
                    await channel.send_json({"type": "state"})
                    answer = json.loads((await channel.receive()).data or "null")
                    refusal = _refusal(answer)
                    (refusals if refusal else held).append(refusal)
                    if len(refusals) + len(held) == sessions:
                        room.set()
                    await room.wait()
                    await channel.send_json({"type": "close"})
                    await channel.receive()  # its close: the place is free again
            except (aiohttp.ClientError, OSError, TypeError, ValueError) as error:
                refusals.append(str(error) or type(error).__name__)
                if len(refusals) + len(held) == sessions:
                    room.set()

        await asyncio.gather(*(hold() for _ in range(sessions)))
    if refusals:
        needed = f"{sessions} episodes are to run at once"
        if kinds > 1:
            needed = f"{kinds} environments hold up to {sessions} between them (an idle instance keeps its session)"
        raise UserError(
            f"the OpenEnv server at {url} takes {len(held)} sessions at once, and {needed} "
            f"({refusals[0][:200]}); start it with max_concurrent_envs={sessions} or more in create_app() and "
            f"SUPPORTS_CONCURRENT_SESSIONS = True in its environment ({SESSIONS_VARIABLE}={sessions} for a duplicated Space or an image), "
            f"or set rollout={{'max_concurrent_rollouts': {max(1, len(held) // kinds)}}}"
        )


def _refusal(answer: object) -> str:
    """Why the server gave no session; empty where it did (an environment may well have no state before its first reset)."""
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, dict):
        return f"an answer that is none of OpenEnv's: {str(answer)[:100]}"
    code = data.get("code") if isinstance(answer, dict) and answer.get("type") == "error" else None
    return str(data.get("message")) if code in ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR") else ""
