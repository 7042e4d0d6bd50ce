"""`HarborSessionFactory`: a folder of Harbor tasks and a harness, as sessions in this process.

What a session is told of the run goes into the sandbox through the agent's own environment there; the environment of this process is
neither read for it nor changed by it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_rl.agents.registry import check_name
from harness_rl.errors import Cause, UserError
from harness_rl.sandboxes.hooks import PROXY_PORT
from harness_rl.sessions.base import RolloutFailure, SessionServices
from harness_rl.sessions.capture import mint
from harness_rl.tasks.load import TaskRef, list_tasks, read_task, solution_commands

if TYPE_CHECKING:
    from harness_rl.agents.base import AgentSpec
    from harness_rl.config import RunConfig, SandboxSection
    from harness_rl.sessions.harbor_session import HarborSession
    from harness_rl.sessions.harbor_trial import TrialSpec

logger = logging.getLogger(__name__)

SANDBOXES = {"local": "harness_rl.sandboxes.bubblewrap:BubblewrapEnvironment"}
"""`sandbox.kind` -> the Harbor environment."""
_EPISODE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


class HarborSessionFactory:
    """Harbor trials in this process.

        factory = HarborSessionFactory(split="examples/tasks/quickstart/train", harness="mini-swe-agent")
        factory.bind(services)
        session = await factory.create(factory.prompt_rows()[0], seed=0, episode_id="e0")

    `split` is a task or a folder of tasks; `agent_config` the agent's own configuration (a mapping, or a YAML file) merged over its
    defaults; `step_limit` the agent's own limit of model calls. Raises UserError for what cannot work.
    """

    def __init__(
        self,
        server_url: str | None = None,
        *,
        split: str | Path,
        harness: str = "mini-swe-agent",
        sandbox: str = "local",
        agent_config: Mapping[str, Any] | str | Path | None = None,
        model_class: str | None = None,
        step_limit: int = 0,
        rootfs: str | Path | None = None,
    ) -> None:
        if server_url is not None:
            raise UserError(f"HarborSessionFactory: no sessions on {server_url}: trials run in this process; leave the server's URL out")
        if sandbox not in SANDBOXES:
            raise UserError(f"HarborSessionFactory: unknown sandbox {sandbox!r}; known: {', '.join(SANDBOXES)}")
        self.split = Path(split)
        self.harness = harness
        self.model_class = model_class or check_name(harness).model_classes[0]
        self._environment_import = SANDBOXES[sandbox]
        self._rootfs = rootfs
        self._agent_config = _agent_config(agent_config, step_limit)
        self._services: SessionServices | None = None
        self._agent: AgentSpec | None = None
        self._layers: asyncio.Task[list[Path]] | None = None

    @classmethod
    def from_config(cls, config: RunConfig, split: Path) -> HarborSessionFactory:
        """The factory that a run's configuration describes, on `split`."""
        harness = config.harness
        return cls(
            split=split,
            harness=harness.name,
            sandbox=config.sandbox.kind,
            agent_config=harness.config,
            model_class=harness.model_class,
            step_limit=harness.step_limit,
        )

    def identity(self) -> dict[str, Any]:
        """The agent, its model class and its configuration."""
        return {"harness": self.harness, "model_class": self.model_class, "agent_config": self._agent_config}

    def prompt_rows(self) -> list[dict[str, Any]]:
        """One row a task: `prompt` (its instruction), `task_name`, `task_path`."""
        return [{"prompt": task.instruction, "task_name": task.name, "task_path": str(task.path)} for task in list_tasks(self.split)]

    def refuse_unrunnable(self) -> None:
        """Raise UserError for the first task that the sandbox cannot run as it is written. Reads files, starts nothing; imports Harbor.

        Whether a task's own solution passes is for `harness-rl tasks check`; training does not need one.
        """
        from harness_rl.tasks.lint import NO_SOLUTION, lint

        tasks = list_tasks(self.split)
        try:
            refused = {task.name: found for task in tasks if (found := [problem for problem in lint(task) if problem.rule != NO_SOLUTION])}
        except ModuleNotFoundError as error:
            raise UserError(f"sessions: {error.name} is not installed; pip install 'harness-rl[harbor]'") from None
        for name, problems in refused.items():
            others = f" ({len(refused)} of {len(tasks)} tasks are refused; harness-rl tasks check names all)" if len(refused) > 1 else ""
            raise UserError(f"task {name}: {problems[0]}{others}")

    def demonstration(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        """The task's own solution as turns of a policy inside the harness. Raises UserError."""
        return check_name(self.harness).script(solution_commands(read_task(Path(task["task_path"]))))

    def bind(self, services: SessionServices) -> None:
        """Lend the run's services. Imports Harbor (seconds). Raises UserError where it is not installed or the harness is unknown."""
        try:
            from harness_rl.agents import registry
            from harness_rl.sessions.harbor_trial import load_litellm
        except ModuleNotFoundError as error:
            raise UserError(f"sessions: {error.name} is not installed; pip install 'harness-rl[harbor]'") from None
        load_litellm()
        try:
            self._agent = registry.get(self.harness)
            self._agent.layers(self.model_class)
        except ValueError as error:
            raise UserError(f"harness: {error}") from None
        self._services = services

    async def create(
        self,
        task: dict[str, Any],
        seed: int,
        episode_id: str,
        *,
        script: list[dict[str, Any]] | None = None,
        temperature: float | None = None,
    ) -> HarborSession:
        """A session for one row. Raises UserError for a bad row, RolloutFailure where layers or capture session cannot be had."""
        from harness_rl.sandboxes.hooks import sandbox_hooks
        from harness_rl.sessions.harbor_session import HarborSession

        if self._services is None:
            raise RuntimeError("call bind() first")
        if not _EPISODE.fullmatch(episode_id):
            raise UserError(f"episode_id {episode_id!r}: use 1 to 64 letters, digits, '.', '_' or '-'")
        if not task.get("task_path"):
            raise UserError(
                f"dataset row {str(task)[:80]}: it has no task_path; take the rows from prompt_rows(), or add the task's folder"
            )
        ref = read_task(Path(task["task_path"]))
        services = self._services
        await services.proxy_up.wait()
        layers = await self._agent_layers()
        about = {
            "episode_id": episode_id,
            "task_name": task.get("task_name") or ref.name,
            "task_path": str(ref.path),
            "seed": seed,
            "harness": self.harness,
            "demonstration": script is not None,
            "started_at": time.time(),
        }
        sampling: dict[str, Any] = {**services.sampling, "seed": seed}
        if temperature is not None:
            sampling["temperature"] = temperature
        capture = await mint(
            services.proxy,
            metadata=about,
            sampling=sampling,
            limits=services.limits,
            template=services.template,
            history=services.history,
            script=script,
        )
        return HarborSession(self._spec(ref, episode_id, capture.api_key, layers), capture, services, about, sandbox_hooks)

    def _spec(self, task: TaskRef, episode_id: str, api_key: str, layers: list[Path]) -> TrialSpec:
        from harness_rl.sessions.harbor_trial import TrialSpec

        assert self._services is not None and self._agent is not None, "bind() set both"
        services, config = self._services, self._services.config
        kwargs: dict[str, Any] = {
            "layers": [str(layer) for layer in layers],
            "proxy_port": PROXY_PORT,
            "limits": sandbox_limits(config.sandbox),
        }
        if self._rootfs is not None:
            kwargs["rootfs"] = str(self._rootfs)
        return TrialSpec(
            task_path=task.path,
            trials_dir=services.rollouts_dir / episode_id,
            name=episode_id,
            agent_import=self._agent.import_path,
            agent_kwargs={"model_class": self.model_class, "config": self._agent_config},
            agent_env={"OPENAI_BASE_URL": f"http://127.0.0.1:{PROXY_PORT}/v1", "OPENAI_API_KEY": api_key},
            model=f"openai/{services.model}",
            environment_import=self._environment_import,
            environment_kwargs=kwargs,
            agent_timeout_s=config.rollout.agent_timeout_s,
            deadline_s=float(services.limits.get("deadline_s") or config.rollout.deadline_s),
            stop_timeout_s=config.sandbox.stop_timeout_s,
            keep_services=bool(task.metadata.get("keep_services", False)),
        )

    async def _agent_layers(self) -> list[Path]:
        """The agent's layers, found or built once; whoever waits may be cancelled without stopping the build for the others."""
        from harness_rl.agents.registry import build_agent

        if self._layers is None:
            self._layers = asyncio.create_task(build_agent(self.harness, logger.info, self.model_class), name=f"layers of {self.harness}")
        try:
            return await asyncio.shield(self._layers)
        except (OSError, RuntimeError) as error:
            self._layers = None
            raise RolloutFailure(Cause.AGENT_SETUP, f"no layer of {self.harness}: {error}") from error


def sandbox_limits(section: SandboxSection) -> dict[str, Any]:
    """The `[sandbox]` section as the environment's `limits`."""
    return {
        "memory_mb": section.memory_mb,
        "cpus": section.cpus,
        "pids": section.pids,
        "storage_mb": section.disk_mb,
        "download_mb": section.download_mb,
        "stop_timeout_s": section.stop_timeout_s,
    }


def _agent_config(given: Mapping[str, Any] | str | Path | None, step_limit: int) -> dict[str, Any]:
    """The agent's configuration as data, with the step limit in it. Raises UserError."""
    config: dict[str, Any] = {}
    if isinstance(given, Mapping):
        config = {**given}
    elif given is not None:
        config = _read_yaml(Path(given))
    if step_limit:
        config["agent"] = {**(config.get("agent") or {}), "step_limit": step_limit}
    return config


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"harness.config: {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise UserError(f"harness.config: {path} holds no mapping; write the agent's options as YAML keys")
    return data
