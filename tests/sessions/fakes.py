"""A proxy, an agent and an environment that behave as a test asks, so that Harbor's real trial and our session run without root.

The world of a test is found by its name in the agent's and the environment's arguments, because Harbor makes both from import paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.agents.installed.base import NonZeroAgentExitCodeError
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities

from capture_proxy.client import CreatedSession, ProxyError
from capture_proxy.trace import TrainingTrace
from harness_rl.config import RunConfig
from harness_rl.sandboxes.bubblewrap import Verification
from harness_rl.sessions.base import SessionServices
from harness_rl.sessions.harbor_session import HarborSession
from harness_rl.sessions.harbor_trial import TrialSpec

WORLDS: dict[str, World] = {}


@dataclass
class FakeProxy:
    """The admin side of a capture proxy, in memory."""

    admin_key: str = "admin"
    sessions: dict[str, dict[str, Any]] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    seal_error: Exception | None = None
    broken_trace: bool = False
    engine_up: bool = True
    reasons: dict[str, int] = field(default_factory=dict)

    async def create_session(self, **about: Any) -> CreatedSession:
        await asyncio.sleep(0.002)
        name = f"s{len(self.sessions) + len(self.deleted)}"
        self.sessions[name] = {"about": about, "turns": 0, "state": "open", "late": 0}
        return CreatedSession(name, f"hrl-{name}", {})

    def call(self, api_key: str) -> None:
        """What a model call of the agent does."""
        session = self.sessions[api_key.removeprefix("hrl-")]
        session["turns" if session["state"] == "open" else "late"] += 1

    async def seal(self, session_id: str, grace_s: float | None = None) -> dict[str, Any]:
        await asyncio.sleep(0.002)
        if self.seal_error is not None:
            raise self.seal_error
        session = self.sessions[session_id]
        session["state"] = "sealed"
        seen = session["turns"] + sum(self.reasons.values())
        return {"state": "sealed", "turns": session["turns"], "calls_seen": seen, "calls_by_reason": self.reasons}

    async def health(self) -> dict[str, Any]:
        return {"engines": {"http://engine": self.engine_up}, "held": False}

    async def trace(self, session_id: str) -> TrainingTrace:
        await asyncio.sleep(0.002)
        if self.broken_trace:
            raise ValueError("turn 't0', loss_mask: 4 values for 2 + 3 tokens")
        return TrainingTrace.model_validate({"turns": [_turn(number) for number in range(self.sessions[session_id]["turns"])]})

    async def delete(self, session_id: str, purge: bool = False) -> None:
        await asyncio.sleep(0.002)
        if session_id not in self.sessions:
            raise ProxyError("unknown session", 404)
        del self.sessions[session_id]
        self.deleted.append(session_id)


def _turn(number: int) -> dict[str, Any]:
    return {
        "node_id": f"t{number}",
        "prompt_token_ids": [10, 11],
        "completion_token_ids": [20, 21, 22],
        "per_token_logps": [-0.5, -0.1, -2.0],
        "loss_mask": [0, 0, 1, 0, 1],
        "request": {"messages": [{"role": "user", "content": "go"}]},
        "response": {"choices": [{"message": {"role": "assistant", "content": f"answer {number}"}}]},
        "metadata": {"role": "agent", "mask_reason": None},
    }


@dataclass
class World:
    """How a test's agents and environments behave, and what is alive in them."""

    proxy: FakeProxy = field(default_factory=FakeProxy)
    start_s: float = 0.0
    start_error: Exception | None = None
    setup_error: Exception | None = None
    agent_s: float = 0.0
    agent_calls: int = 2
    agent_error: Exception | None = None
    clean_error: Exception | None = None
    verify_s: float = 0.0
    reward: str | None = "1"
    stop_s: float = 0.0
    stop_error: Exception | None = None
    alive: set[str] = field(default_factory=set)
    """Environments that were started and not stopped."""
    events: list[str] = field(default_factory=list)


class FakeEnvironment(BaseEnvironment):
    def __init__(self, *args: Any, world: str, **kwargs: Any) -> None:
        self.world = WORLDS[world]
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "fake"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True, network_allowlist=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self.world.alive.add(self.session_id)
        await asyncio.sleep(self.world.start_s)
        if self.world.start_error is not None:
            raise self.world.start_error

    async def stop(self, delete: bool) -> None:
        await asyncio.sleep(self.world.stop_s)
        self.world.alive.discard(self.session_id)
        if self.world.stop_error is not None:
            raise self.world.stop_error

    async def before_verification(self, *, keep_services: bool = False) -> Verification:
        self.world.events.append("clean")
        await asyncio.sleep(0.001)
        if self.world.clean_error is not None:
            raise self.world.clean_error
        return Verification(0, [], [])

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        if "test.sh" in command and "chmod" not in command:
            self.world.events.append("verify")
            await asyncio.sleep(self.world.verify_s)
        else:
            await asyncio.sleep(0)
        return ExecResult(stdout="", stderr="", return_code=0)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None: ...

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None: ...

    async def download_file(self, source_path: str, target_path: Path | str) -> None: ...

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        if str(source_dir) == "/logs/verifier" and self.world.reward is not None:
            (Path(target_dir) / "reward.txt").write_text(self.world.reward)


class FakeAgent(BaseAgent):
    def __init__(self, *args: Any, world: str, **kwargs: Any) -> None:
        self.world = WORLDS[world]
        super().__init__(*args, **kwargs)

    @staticmethod
    def name() -> str:
        return "fake"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        if self.world.setup_error is not None:
            raise self.world.setup_error

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        for _ in range(self.world.agent_calls):
            await asyncio.sleep(0.001)
            self.world.proxy.call(self.extra_env["OPENAI_API_KEY"])
        await asyncio.sleep(self.world.agent_s)
        if self.world.agent_error is not None:
            raise self.world.agent_error


def exit_code(words: str = "exit 1") -> NonZeroAgentExitCodeError:
    return NonZeroAgentExitCodeError(f"Command failed ({words})")


_TASK = """schema_version = "1.4"
[agent]
timeout_sec = {agent_timeout}
[verifier]
timeout_sec = 20.0
[environment]
docker_image = "debian:bookworm-slim"
network_mode = "no-network"
"""


def write_task(folder: Path, agent_timeout: float = 30.0, steps: tuple[str, ...] = ()) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "task.toml").write_text(
        _TASK.format(agent_timeout=agent_timeout) + "".join(f'[[steps]]\nname = "{name}"\n' for name in steps)
    )
    for name in steps:
        (folder / "steps" / name).mkdir(parents=True)
        (folder / "steps" / name / "instruction.md").write_text(f"Do {name}.")
    (folder / "instruction.md").write_text("Write hello.")
    (folder / "tests" / "test.sh").write_text("#!/bin/bash\n")
    return folder


@contextlib.contextmanager
def named(world: World) -> Iterator[str]:
    name = f"w{id(world)}"
    WORLDS[name] = world
    try:
        yield name
    finally:
        del WORLDS[name]


class Bench:
    """Makes sessions of one world."""

    def __init__(self, world: World, name: str, folder: Path, *, deadline_s: float = 20.0, stop_timeout_s: float = 5.0) -> None:
        self.world, self.name, self.folder = world, name, folder
        self.deadline_s, self.stop_timeout_s = deadline_s, stop_timeout_s
        self.task = write_task(folder / "task")
        self._serial = itertools.count()
        config = RunConfig.model_validate({"rollout": {"seal_grace_s": 0.1}})
        self.services = SessionServices(world.proxy, folder / "socket", "policy", {}, {}, folder / "rollouts", config)  # type: ignore[arg-type]

    async def session(self) -> HarborSession:
        episode = f"e{next(self._serial)}"
        capture = await self.world.proxy.create_session()
        spec = TrialSpec(
            task_path=self.task,
            trials_dir=self.folder / "rollouts" / episode,
            name=episode,
            agent_import=f"{__name__}:FakeAgent",
            agent_kwargs={"world": self.name},
            agent_env={"OPENAI_API_KEY": capture.api_key},
            model="openai/policy",
            environment_import=f"{__name__}:FakeEnvironment",
            environment_kwargs={"world": self.name},
            agent_timeout_s=30.0,
            deadline_s=self.deadline_s,
            stop_timeout_s=self.stop_timeout_s,
        )
        return HarborSession(spec, capture, self.services, {"episode_id": episode}, hooks=lambda **_: contextlib.nullcontext())
