"""What a run needs around it, started in order and ended in reverse: no leftovers, the engine, the capture proxy; at the end the leak
audit.

Used by training, warm-up and evaluation alike, so that all three sample through the same proxy from the same engine under the same limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from capture_proxy.client import ProxyError
from harness_rl.config import RunConfig
from harness_rl.engines.command import Adapters
from harness_rl.engines.environment import torch_python
from harness_rl.engines.look import look
from harness_rl.engines.vllm import Engine, connect_all, launch
from harness_rl.errors import EngineError, HarnessRLError, UserError, first_error
from harness_rl.metrics import RunState
from harness_rl.orchestrator.proxy_process import ProxyProcess, start_proxy
from harness_rl.processes import Child
from harness_rl.sandboxes.preflight import refuse_unless_able
from harness_rl.sandboxes.reaper import audit, reap
from harness_rl.sandboxes.scratch import reap_scratch
from harness_rl.sessions.base import SessionServices, set_event
from harness_rl.threads import learner_env, thread_plan

log = logging.getLogger(__name__)

SERVED_MODEL = "policy"
ENGINE_DEATH_S = 20.0
"""A server that lost its worker answers with errors for some seconds before it ends."""
LOOK_S = 2.0
"""Between two looks at engines that somebody else runs."""


@dataclass
class Services:
    config: RunConfig
    engine: Engine
    """The one that this run launched, or the first of those that run."""
    proxy: ProxyProcess
    state: RunState
    others: Sequence[Engine] = ()
    """Further running engines of the same model."""
    _proxy_up: asyncio.Event = field(default_factory=set_event)
    _held: tuple[str, float] | None = None
    """What a restarted proxy is told: to hold calls (reason, seconds), or the version that the engine serves."""
    _served: tuple[str | None, str | None] = (None, None)
    """That version, and the adapter that it is."""
    _push_owed: bool = False
    """An update failed for an engine that somebody else runs: it is asked for again once all answer."""

    @property
    def engine_dtype(self) -> Literal["auto", "float32", "bfloat16", "float16"]:
        """As the engine was started; `auto` for a running one of which the config does not tell."""
        return self.engine.dtype or self.config.engine.dtype

    @property
    def engine_urls(self) -> list[str]:
        return [self.engine.url, *(engine.url for engine in self.others)]

    @property
    def model(self) -> str:
        return self.engine.model

    @property
    def learner_threads(self) -> int:
        return self.config.learner.threads or thread_plan().learner

    @property
    def learner_env(self) -> dict[str, str]:
        gpus = self.config.learner.gpus
        return learner_env(self.torch_python(self.config.learner.python)) | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})

    def torch_python(self, configured: Path | None) -> Path:
        return torch_python(configured or self.config.engine.python)

    def for_sessions(self) -> SessionServices:
        rollout = self.config.rollout
        limits: dict[str, Any] = {
            "max_calls": rollout.max_calls or None,
            "max_output_tokens_per_call": rollout.max_output_tokens_per_call or None,
            "max_conversation_tokens": rollout.max_conversation_tokens or None,
            "max_context_tokens": min(engine.info.max_model_len for engine in (self.engine, *self.others)),
            "deadline_s": rollout.deadline_s,
        }
        return SessionServices(
            proxy=self.proxy.client,
            handoff_socket=self.proxy.handoff_socket,
            model=self.model,
            sampling={"temperature": rollout.temperature},
            limits=limits,
            rollouts_dir=self.config.run_dir / "rollouts",
            config=self.config,
            template={"chat_template_kwargs": rollout.chat_template_kwargs, "control_tokens": rollout.control_tokens},
            history=rollout.history,
            proxy_up=self._proxy_up,
            proxy_restarts=lambda: self.proxy.restarts,
            proxy_died=lambda: self.proxy.child.ended(),
        )

    async def hold(self, reason: str, timeout_s: float) -> None:
        """New agent calls wait at the proxy from here on."""
        self._held, self.state.holding = (reason, timeout_s), True
        await self._tell_proxy(partial(self.proxy.client.hold, reason, timeout_s))

    async def release(self, version: str | None, adapter: str | None = None) -> list[str]:
        """The held calls go on, under the weights of `version` (None: those that the engine was started with), which the engine serves as
        its own model or as `adapter`. Returns the names of the adapters that can still be asked for."""
        self._held, self._served = None, (version, adapter)
        answer = await self._tell_proxy(partial(self.proxy.client.release, version, adapter))
        self.state.holding = False
        return list(answer["adapters_asked"])

    async def renew_engine(self) -> None:
        """Start a launched engine anew whose weights a learner was replacing when it died: they are the model folder's again."""
        if self.engine.pid is None:
            return  # not ours to end; the next update has to cope
        self.state.engine = "restarting"
        await self.engine.stop()
        await self.engine.restart()
        self.state.engine = "ready"

    async def excuse_failed_sync(self, reason: str) -> None:
        """Returns when an engine died of or before it: once it is up again it is given its weights. Raises EngineError otherwise."""
        if self.state.engine != "restarting":
            try:
                await asyncio.wait_for(self._connected_died() if self.config.engine.urls else self.engine.died(), ENGINE_DEATH_S)
            except TimeoutError:
                raise EngineError(f"{reason}; the engine is alive, so trying again would not help") from None
        self._push_owed = bool(self.config.engine.urls)

    async def _connected_died(self) -> None:
        """Returns once a running engine does not answer, or was started again meanwhile."""
        while True:
            looks = await asyncio.gather(*(look(url) for url in self.engine_urls))
            if any(not seen.up or seen.lost(*self._served) for seen in looks):
                return
            await asyncio.sleep(LOOK_S)

    async def _tell_proxy(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """A proxy that dies meanwhile is told once it is back."""
        while True:
            await self._proxy_up.wait()
            child = self.proxy.child
            try:
                return await call()
            except ProxyError as error:
                if error.status is not None or not await _ends_soon(child):
                    raise HarnessRLError(
                        f"the capture proxy does not answer: {error}: {child.last_words()} (log: {child.log_path})"
                    ) from error
                if self.proxy.child is child:
                    self._proxy_up.clear()

    @asynccontextmanager
    async def watched(self, resync: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
        """For as long as the body runs, a dead proxy or engine is started again (`proxy.max_restarts`, `engine.max_restarts`), and one that
        somebody else runs is waited for (`engine.start_timeout_s`).

        `resync` is called for an engine that was started again, with agents' calls held: it has the learner push its weights, and the
        proof of that push releases the calls. Raises the first error of watcher or body.
        """
        watch_engines = self._watch_connected if self.config.engine.urls else self._watch_engine
        try:
            async with asyncio.TaskGroup() as tasks:
                watchers = [tasks.create_task(self._watch_proxy()), tasks.create_task(watch_engines(resync))]
                yield
                for watcher in watchers:
                    watcher.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def _watch_proxy(self) -> None:
        while True:
            await self.proxy.child.ended()
            self._proxy_up.clear()
            self.state.say(f"the capture proxy died ({self.proxy.child.last_words()}); starting it again")
            await self.proxy.restart()
            client = self.proxy.client
            try:
                await (client.release(*self._served) if self._held is None else client.hold(*self._held))
            except ProxyError as error:
                self.state.say(f"the capture proxy that was started again does not answer: {error}")
                await self.proxy.child.stop()
                continue
            self._proxy_up.set()

    async def _watch_engine(self, resync: Callable[[], Awaitable[object]]) -> None:
        while True:
            await self.engine.died()
            self.state.say(f"the engine died ({self.engine.last_words()}); starting it again")
            self.state.engine = "restarting"
            await self.hold("engine restart", self.config.engine.start_timeout_s)
            await self.engine.restart()
            self.state.engine = "ready"
            await resync()

    async def _watch_connected(self, resync: Callable[[], Awaitable[object]]) -> None:
        """Nobody tells of an engine that somebody else runs: each is looked at, again and again.

        One that is gone is missed by the next update only; one that came back without the policy is not asked by the proxy, and gets it.
        """
        gone: dict[str, float] = {}
        while True:
            await asyncio.sleep(LOOK_S)
            served, looks = self._served, await asyncio.gather(*(look(url) for url in self.engine_urls))
            for url, seen in zip(self.engine_urls, looks, strict=True):
                if seen.up and gone.pop(url, None) is not None:
                    self.state.say(f"engine {url} answers again")
                elif not seen.up and url not in gone:
                    gone[url] = time.monotonic()
                    self.state.say(f"engine {url} does not answer; start it again where it runs")
                elif not seen.up and time.monotonic() - gone[url] > (limit := self.config.engine.start_timeout_s):
                    raise EngineError(
                        f"engine: {url} has not answered for {limit:.0f} s (engine.start_timeout_s); start it again where it runs, "
                        "then go on with --resume"
                    )
            self.state.engine = "restarting" if gone else "ready"
            # While an update holds the calls it is its own to say whether an engine has the weights.
            lost = self._held is None and served == self._served and any(seen.lost(*served) for seen in looks)
            if not gone and (lost or self._push_owed):
                self._push_owed = False
                await self.hold("engine restart", self.config.engine.start_timeout_s)
                await resync()


def tokenizer_file(model_path: Path) -> Path:
    """The model's tokenizer, by which quoted control tokens are told from real ones. Raises UserError where it has none in this form."""
    path = model_path / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"rollout.control_tokens = split needs {path}, which is not there; save the model's fast tokenizer, or use as_engine"
        )
    return path


async def _ends_soon(child: Child) -> bool:
    """A connection may break a moment before the kernel reports the death of its owner."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(child.ended(), 1.0)
    return not child.alive


@asynccontextmanager
async def services(
    config: RunConfig, model_path: Path, state: RunState, *, trains: bool = True, adapters: Adapters | None = None
) -> AsyncIterator[Services]:
    """Start everything; whatever happens inside, end everything. `trains`: the engine's weights are to change, or to get `adapters`.

    Raises UserError, EngineError, HarnessRLError.
    """
    if config.sandbox.kind == "local":
        await asyncio.to_thread(refuse_unless_able)
        found = await asyncio.to_thread(reap)
        if found.sessions:
            state.say(f"reclaimed {found.sessions} sandboxes that an earlier run left")
    else:
        await asyncio.to_thread(reap_scratch)  # every run has folders for its sockets
    state.engine = "starting"
    urls = config.engine.urls
    state.say(f"connecting to {', '.join(urls)}" if urls else "starting the engine")
    if urls:
        engine, *others = await connect_all(urls)
    else:
        engine = await launch(
            config.engine, model_path, run_dir=config.run_dir, served_model=SERVED_MODEL, sync=config.sync, adapters=adapters
        )
        others = []
    try:
        for one in (engine, *others):
            one.require(trains=trains, tokens=config.proxy.capture == "tokens", adapters=adapters is not None)
        state.engine = "ready"
        state.say(f"engine ready: {', '.join(urls) or engine.url}")
        split = config.rollout.control_tokens == "split"
        tokenizer = tokenizer_file(model_path) if split else None
        proxy = await start_proxy(
            config.proxy,
            engine_urls=urls or [engine.url],
            model=engine.model,
            run_dir=config.run_dir,
            tokenizer=tokenizer,
            salt_prefix_cache=trains and config.sync.kv == "keep",
            adapters=adapters is not None,
        )
        try:
            yield Services(config, engine, proxy, state, others)
        finally:
            await proxy.stop()
    finally:
        await engine.stop()
        state.engine = "stopped"
        if config.sandbox.kind == "local":
            leaks = await asyncio.to_thread(audit)
            if leaks.total:
                state.say(f"LEAK: {leaks}")
                log.error("leak audit: %s", leaks)
