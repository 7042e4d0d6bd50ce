"""A capture proxy in this process in front of a scripted engine, and white-box sessions through both."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from proxy.fake_engine import FakeEngine

from capture_proxy.admin import main_app
from capture_proxy.app import Proxy
from capture_proxy.auth import key_hash
from capture_proxy.client import ProxyClient
from capture_proxy.settings import Settings
from capture_proxy.upstream import Retry
from harness_rl.config import RunConfig
from harness_rl.metrics import RunState
from harness_rl.orchestrator.batches import Assembler
from harness_rl.orchestrator.generation import Generation
from harness_rl.orchestrator.journal import Journal
from harness_rl.orchestrator.rollout import RolloutRunner
from harness_rl.orchestrator.schedule import TaskOrder
from harness_rl.sessions.base import SessionServices
from harness_rl.sessions.environment_factory import EnvironmentSessionFactory
from harness_rl.sessions.environment_session import EnvironmentSession
from harness_rl.trainer import GRPOTrainer

ADMIN_KEY = "test-admin-key-0123456789"
PLAY = [{"role": "user", "content": "Play."}]


def call(name: str, **arguments: Any) -> str:
    """What a policy samples to call a tool."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


@dataclass
class Bench:
    engine: FakeEngine
    proxy: ProxyClient
    folder: Path
    config: RunConfig = field(default_factory=lambda: RunConfig.model_validate({"rollout": {"seal_grace_s": 0.1}}))
    limits: dict[str, Any] = field(default_factory=dict)
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    def configure(self, **rollout: Any) -> None:
        self.config = RunConfig.model_validate({"rollout": {"seal_grace_s": 0.1, **rollout}})

    def services(self) -> SessionServices:
        template = {"chat_template_kwargs": self.config.rollout.chat_template_kwargs}
        return SessionServices(
            self.proxy,
            self.folder / "no-socket",
            "policy",
            {"temperature": 1.0},
            self.limits,
            self.folder / "rollouts",
            self.config,
            template,
        )

    def factory(self, *arguments: Any, **options: Any) -> EnvironmentSessionFactory:
        factory = EnvironmentSessionFactory(*arguments, **{"rows": [{"prompt": PLAY}], **options})
        factory.bind(self.services())
        return factory

    async def session(self, factory: EnvironmentSessionFactory, row: dict[str, Any] | None = None, **options: Any) -> EnvironmentSession:
        number = next(self._serial)
        return await factory.create(row if row is not None else factory.prompt_rows()[0], number, f"e{number}", **options)

    async def play(
        self, factory: EnvironmentSessionFactory, row: dict[str, Any] | None = None, within_s: float = 30, **options: Any
    ) -> EnvironmentSession:
        """A session that has run and been closed."""
        session = await self.session(factory, row, **options)
        try:
            await asyncio.wait_for(session.run(), within_s)
        finally:
            await session.close()
        return session

    def offered(self) -> list[list[str]]:
        """The names of the tools that came with each conversation of a test (they begin with "Play")."""
        bodies = [body for body in self.engine.bodies("/render") if "Play" in str(body["messages"][0]["content"])]
        return [[tool["function"]["name"] for tool in body.get("tools") or []] for body in bodies]

    def prompts(self) -> list[str]:
        """What the engine was shown, call by call."""
        sent = (body["token_ids"] for body in self.engine.bodies("/generate"))
        return [self.engine.tokenizer.decode(ids) for ids in sent]


def generation_of(trainer: GRPOTrainer, bench: Bench) -> Generation:
    """The trainer's groups as a run makes them, up to the learner."""
    config, journal = trainer.config, Journal(bench.folder / "journal.sqlite")
    bench.config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"seal_grace_s": 0.1})})
    trainer.factory.bind(bench.services())
    section = config.rollout
    runner = RolloutRunner(trainer.factory, journal, None, section.max_retries, retry_pause_s=0.01)
    assembler = Assembler(section.groups_per_step, section.max_group_replacements, section.normalise_advantage)
    order = TaskOrder(trainer.factory.prompt_rows(), seed=0, shuffle=section.shuffle_tasks)
    return Generation(config, runner, journal, order, assembler, RunState("t", config.run.steps))


@asynccontextmanager
async def a_bench(folder: Path) -> AsyncIterator[Bench]:
    async with FakeEngine() as engine:
        engine.version = "t-0"
        settings = Settings(
            engines=(engine.url,),
            model="policy",
            store=folder / "store",
            admin_key_hash=key_hash(ADMIN_KEY),
            retry=Retry(total_s=1.0, base_s=0.01),
            seal_grace_s=0.2,
        )
        proxy = Proxy(settings)
        runner = web.AppRunner(main_app(proxy), handler_cancellation=True, shutdown_timeout=0.5, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            async with ProxyClient(f"http://127.0.0.1:{runner.addresses[0][1]}", ADMIN_KEY) as client:
                yield Bench(engine, client, folder)
        finally:
            await runner.cleanup()
            await proxy.close()
