"""A Harbor task as a white-box environment: its sandbox behind one tool, `bash`, and its verifier's reward.

Invariant: an episode is one real trial with our loop in its agent's place. Sandbox, isolation, clean-up before grading, verifier and the
reading of its verdict are those of every other rollout; nothing can be run in the sandbox once grading has begun, and an episode that is
given up leaves no sandbox behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import tomllib
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from harness_rl.config import SandboxSection
from harness_rl.errors import Cause, UserError
from harness_rl.sandboxes.hooks import sandbox_hooks
from harness_rl.sessions.base import RolloutFailure, VerifyResult
from harness_rl.sessions.causes import classify, facts_of
from harness_rl.sessions.environments import LocalSandboxes
from harness_rl.sessions.harbor import SANDBOXES, sandbox_limits
from harness_rl.sessions.harbor_trial import TrialRun, TrialSpec, load_litellm
from harness_rl.sessions.verdict import believed, judge, unpaid
from harness_rl.tasks.load import CONFIG, TaskRef, list_tasks, read_task

if TYPE_CHECKING:
    from harness_rl.sandboxes.bubblewrap import Verification

VERIFIER_S = 600.0
"""What start and grading may take beside the conversation."""


@dataclass
class Desk:
    """Where the trial hands its sandbox to the loop, and gets it back."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    instruction: str = ""
    environment: BaseEnvironment | None = None
    """While the loop has it."""


_desk: ContextVar[Desk | None] = ContextVar("harness_rl_desk", default=None)


class LoopAgent(BaseAgent):
    """Harbor's agent of such a trial: it lends the sandbox to whoever stands at the desk, and ends when told so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["skip_model_parsing"] = True
        super().__init__(*args, **kwargs)

    @staticmethod
    def name() -> str:
        return "harness-rl-loop"

    def version(self) -> str | None:
        return None

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing to install."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        desk = _desk.get()
        if desk is None:
            raise RuntimeError("this agent lends its sandbox to a HarborEnvironment; run it through one")
        desk.instruction, desk.environment = instruction, environment
        desk.opened.set()
        try:
            await desk.closed.wait()
        finally:
            desk.environment = None


class HarborEnvironment(LocalSandboxes):
    """`environment_factory=HarborEnvironment`, with rows from `task_rows`: each has the `task_path` that `reset` takes.

    `sandbox`: limits of tasks that name none; left out, the run's `[sandbox]` section holds. `command_s`: wall clock of one command.
    `output_chars`: how much of a command's output is shown; the middle is left out. `episode_s`: wall clock of the conversation.
    `reward_key`, `tampered`: as in a run's `[reward]` section.
    """

    def __init__(
        self,
        *,
        sandbox: SandboxSection | None = None,
        command_s: float = 60.0,
        output_chars: int = 8000,
        episode_s: float = 900.0,
        reward_key: str = "reward",
        tampered: str = "zero",
    ) -> None:
        load_litellm()
        self.own_sandbox = sandbox
        self._command_s, self._output_chars, self._episode_s = command_s, output_chars, episode_s
        self._reward_key, self._tampered = reward_key, tampered
        self._episode: _Episode | None = None

    async def reset(self, task_path: str, **columns: Any) -> str:
        """Starts the task's sandbox and returns its instruction. Raises RolloutFailure, and UserError for a task that it cannot play."""
        await self.__aexit__()
        task = read_task(Path(task_path))
        if tomllib.loads((task.path / CONFIG).read_text()).get("steps"):
            raise UserError(f"task {task.name}: it has several steps, which this environment cannot play; use a harness, or another task")
        self._episode = _Episode(task, self.own_sandbox or self.run_sandbox or SandboxSection(), self._episode_s)
        return await self._episode.start()

    async def bash(self, command: str) -> str:
        """Run a command with bash in the task's sandbox. Each command starts in the same folder.

        Args:
            command: The command, or several lines of a script.
        """
        sandbox = self._episode.desk.environment if self._episode is not None else None
        if sandbox is None:
            raise RuntimeError("the sandbox is closed: the episode is over")
        result = await sandbox.exec(command, timeout_sec=int(self._command_s))
        shown = _shortened("".join(filter(None, (result.stdout, result.stderr))), self._output_chars)
        return shown if result.return_code == 0 else f"{shown.rstrip()}\n[exit code {result.return_code}]".lstrip()

    async def get_reward(self) -> float | None:
        """Ends the episode and grades it. Raises RolloutFailure where the verifier gives no verdict."""
        if self._episode is None:
            raise RuntimeError("reset() comes first")
        return (await self._episode.verdict(self._reward_key, self._tampered)).env_reward

    async def __aenter__(self) -> HarborEnvironment:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._episode is not None:
            await self._episode.close()
            self._episode = None


def task_rows(split: str | Path) -> list[dict[str, Any]]:
    """One row for each task at `split`, whose instruction `reset` adds. Raises UserError."""
    prompt = [{"role": "user", "content": ""}]
    return [{"prompt": prompt, "task_name": task.name, "task_path": str(task.path)} for task in list_tasks(Path(split))]


class _Episode:
    """One trial, its desk, and what was found when grading began."""

    def __init__(self, task: TaskRef, section: SandboxSection, episode_s: float) -> None:
        self.desk = Desk()
        self._folder = Path(tempfile.mkdtemp(prefix="harness-rl-episode-"))
        self._left: list[Verification] = []
        self._running: asyncio.Task[None] | None = None
        spec = TrialSpec(
            task_path=task.path,
            trials_dir=self._folder,
            name=f"episode-{uuid.uuid4().hex[:12]}",
            agent_import=LoopAgent.import_path(),
            agent_kwargs={},
            agent_env={},
            model="policy",
            environment_import=SANDBOXES["local"],
            environment_kwargs={"limits": sandbox_limits(section)},
            agent_timeout_s=episode_s,
            deadline_s=episode_s + VERIFIER_S,
            stop_timeout_s=section.stop_timeout_s,
            keep_services=bool(task.metadata.get("keep_services", False)),
        )
        self._trial = TrialRun(spec, self._agent_ended, self._around)

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        token = _desk.set(self.desk)
        try:
            with sandbox_hooks():  # without a listener: no port of the sandbox leads out
                yield
        finally:
            _desk.reset(token)

    async def start(self) -> str:
        """The instruction, once the sandbox is up. Raises RolloutFailure."""
        self._running = asyncio.create_task(self._trial.run(), name=f"trial {self._trial.spec.name}")
        opened = asyncio.create_task(self.desk.opened.wait())
        try:
            await asyncio.wait({self._running, opened}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
        if not self.desk.opened.is_set():
            await self._running
            raise self._failure() or RolloutFailure(Cause.SANDBOX_START, "the trial ended before its sandbox was up")
        return self.desk.instruction

    async def verdict(self, key: str, tampered: str) -> VerifyResult:
        """Let go of the sandbox and wait for the verifier. Raises RolloutFailure."""
        assert self._running is not None
        self.desk.closed.set()
        trial = self._trial
        who = f"{trial.spec.name}: its policy"
        try:
            await asyncio.shield(self._running)
            result = trial.result
            assert result is not None
            verdict = judge(facts_of(result, {}, 0), trial.spec.trial_dir, trial.steps, key)
        except RolloutFailure as failure:
            return unpaid(failure, self._left, who)
        return believed(verdict, self._left, trial.shared_verifier, tampered, who)

    async def close(self) -> None:
        """Stop what still runs. Idempotent and bounded."""
        self.desk.closed.set()
        await self._trial.halt()
        if self._running is not None:
            await asyncio.wait({self._running})
            if not self._running.cancelled():
                self._running.exception()  # whoever waited for it has it
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _failure(self) -> RolloutFailure | None:
        return None if self._trial.result is None else classify(facts_of(self._trial.result, {}, 0))

    async def _agent_ended(self, environment: Any, last: bool) -> None:
        try:
            async with asyncio.timeout(self._trial.spec.stop_timeout_s):
                self._left.append(await environment.before_verification(keep_services=self._trial.spec.keep_services))
        except (OSError, RuntimeError) as error:  # TimeoutError is an OSError, the sandbox's errors are RuntimeErrors
            self._trial.abort(RolloutFailure(Cause.SANDBOX_LOST, f"before grading: {type(error).__name__}: {error}"))


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
