"""A real proxy process in front of the toy engine, and sessions with real sandboxes and the real mini-swe-agent. Needs root."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp

from capture_proxy.client import ProxyClient
from harness_rl.config import RunConfig
from harness_rl.sessions.base import SessionServices
from harness_rl.sessions.harbor import HarborSessionFactory
from harness_rl.sessions.harbor_session import HarborSession


def _load_fake_engine() -> ModuleType:
    name = "fake_engine"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "proxy" / "fake_engine.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


FakeEngine: Any = _load_fake_engine().FakeEngine
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
PROMPTS = {"agent": {"system_template": "You act.", "instance_template": "{{task}}"}}

_TASK = """schema_version = "1.4"
[agent]
timeout_sec = {agent_timeout}
[verifier]
timeout_sec = 30
[environment]
docker_image = "debian:bookworm-slim"
workdir = "/app"
network_mode = "no-network"
cpus = 1
memory_mb = 512
storage_mb = 128
"""
HONEST = """#!/bin/bash
PATH=/usr/sbin:/usr/bin:/sbin:/bin
if [ "$(cat /app/hello.txt)" = hello ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
JSON_ONLY = """#!/bin/bash
PATH=/usr/sbin:/usr/bin:/sbin:/bin
sleep 0.5
if [ -e /app/hello.txt ]; then r=1; else r=0; fi
echo "{\\"reward\\": $r, \\"checks\\": 3}" > /logs/verifier/reward.json
sleep 0.5
"""


def act(command: str) -> str:
    """An assistant answer that runs a command."""
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


def write_task(folder: Path, test: str = HONEST, agent_timeout: float = 60.0) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "task.toml").write_text(_TASK.format(agent_timeout=agent_timeout))
    (folder / "instruction.md").write_text("Write the word hello to hello.txt.")
    (folder / "tests" / "test.sh").write_text(test)
    return folder


@dataclass
class Rig:
    """Engine, proxy and factory of one test."""

    engine: Any
    proxy: ProxyClient
    services: SessionServices
    folder: Path
    proxy_pid: int
    made: list[HarborSession] = field(default_factory=list)

    def factory(self, task: Path, **options: Any) -> HarborSessionFactory:
        factory = HarborSessionFactory(split=task, **{"agent_config": PROMPTS, **options})
        factory.bind(self.services)
        return factory

    async def session(self, task: Path, episode: str = "e0", **options: Any) -> HarborSession:
        factory = self.factory(task, **options)
        session = await factory.create(factory.prompt_rows()[0], seed=0, episode_id=episode)
        self.made.append(session)
        return session

    async def agent_call(self, session: HarborSession) -> int:
        """A model call with the session's key on the proxy's main listener; its HTTP status."""
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": f"Bearer {session.capture.api_key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.proxy.base_url}/v1/chat/completions", json=body, headers=headers) as answer,
        ):
            return answer.status


@contextlib.asynccontextmanager
async def rig(folder: Path, **rollout: Any) -> AsyncIterator[Rig]:
    """Everything up; at the end every session is closed and the proxy has no session left."""
    key = secrets.token_hex(16)
    key_file, handoff = folder / "admin-key", folder / "handoff"
    key_file.write_text(key)
    async with FakeEngine() as engine:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "capture_proxy", "--engine", engine.url, "--model", "policy", "--store", str(folder / "capture"),
            "--admin-key-file", str(key_file), "--port", "0", "--handoff-socket", str(handoff),
            stdout=asyncio.subprocess.PIPE, env=dict(os.environ),
        )  # fmt: skip
        assert process.stdout is not None
        try:
            line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
            async with ProxyClient(line.split()[-1], key) as proxy:
                config = RunConfig.model_validate({"rollout": {"seal_grace_s": 0.5, **rollout}, "sandbox": {"stop_timeout_s": 10}})
                limits = {"max_calls": 8, "deadline_s": config.rollout.deadline_s}
                services = SessionServices(proxy, handoff, "policy", {"temperature": 1.0}, limits, folder / "rollouts", config)
                made = Rig(engine, proxy, services, folder, process.pid)
                try:
                    yield made
                finally:
                    await asyncio.gather(*(session.close() for session in made.made))
                health = await proxy.health()
                assert health["sessions_open"] + health["sessions_sealed"] == 0
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), 10)
