"""One Harbor trial in this process, under our own deadline, with hooks at the boundaries that matter.

Whatever Harbor or the sandbox does, `TrialRun.run` ends within the deadline plus a bounded stop, and `TrialRun.halt` is safe to call from
anywhere, at any time, more than once. Importing this module imports Harbor; the rest of the package does without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import sys
import tomllib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harbor.models.task.verifier_mode import task_has_any_shared_verifier
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.hooks import TrialEvent, TrialHookEvent
from harbor.trial.trial import Trial

from harness_rl.errors import Cause
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.capture import uninterrupted
from harness_rl.sessions.causes import AGENT_EXITS, SANDBOX_ERRORS

logger = logging.getLogger(__name__)

_PHASES = {
    TrialEvent.ENVIRONMENT_START: "the sandbox's start",
    TrialEvent.AGENT_START: "the agent's run",
    TrialEvent.AGENT_END: "the collection of the agent's output",
    TrialEvent.VERIFICATION_START: "the verifier's run or the sandbox's stop",
}


@dataclass(frozen=True)
class TrialSpec:
    """What a trial is made of, in our words."""

    task_path: Path
    trials_dir: Path
    name: str
    """Unique in the process: Harbor names its logger and the sandbox after it."""
    agent_import: str
    agent_kwargs: dict[str, Any]
    agent_env: dict[str, str]
    """Environment of the agent's process, in the sandbox only."""
    model: str
    environment_import: str
    environment_kwargs: dict[str, Any]
    agent_timeout_s: float
    """Upper bound; a shorter one of the task holds."""
    deadline_s: float
    """Wall clock of the whole trial."""
    stop_timeout_s: float
    keep_services: bool = False
    """Spare what the agent left running, for a task whose verifier talks to a server that the agent had to start."""

    @property
    def trial_dir(self) -> Path:
        return self.trials_dir / self.name

    def config(self) -> TrialConfig:
        fields: dict[str, Any] = {}
        if "override_error_policy" in TrialConfig.model_fields:
            # Harbor guesses API errors from the agent's output, which the policy writes; such a rollout is graded as any other (causes.py).
            fields["override_error_policy"] = {name: {"should_grade": True, "has_valid_reward": True} for name in AGENT_EXITS}
        return TrialConfig(
            task=TaskConfig(path=self.task_path),
            trial_name=self.name,
            trials_dir=self.trials_dir,
            agent=AgentConfig(
                import_path=self.agent_import,
                model_name=self.model,
                kwargs=self.agent_kwargs,
                env=self.agent_env,
                max_timeout_sec=self.agent_timeout_s,
                # A task without a limit of its own would otherwise have none at all: Harbor applies the upper bound to a limit only.
                override_timeout_sec=None if _has_agent_timeout(self.task_path) else self.agent_timeout_s,
            ),
            environment=EnvironmentConfig(import_path=self.environment_import, kwargs=self.environment_kwargs, delete=True),
            verifier=VerifierConfig(max_timeout_sec=self.deadline_s),
            **fields,
        )


class TrialRun:
    """A trial's life. `on_agent_end(environment, last)` is awaited after each step's agent, before anything is graded."""

    def __init__(
        self,
        spec: TrialSpec,
        on_agent_end: Callable[[Any, bool], Awaitable[None]],
        around: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self.spec = spec
        self._on_agent_end = on_agent_end
        self._around = around
        """Entered around the trial, in its own task."""
        self.trial: Trial | None = None
        self.phase = "the trial's preparation"
        """Where it is, or where it was when it was stopped."""
        self._task: asyncio.Task[TrialResult] | None = None
        self._abort: RolloutFailure | None = None
        self._halted = False
        self._agent_ends = 0

    @property
    def result(self) -> TrialResult | None:
        """Harbor's result as far as it has come; None before the trial began."""
        return (
            None if self.trial is None else self.trial._result
        )  # the public property raises before the start; the field is the same since 0.22

    @property
    def steps(self) -> list[str]:
        """Names of the graded steps of a multi-step task."""
        result = self.result
        return [step.step_name for step in (result.step_results or []) if step.verifier is not None] if result is not None else []

    @property
    def shared_verifier(self) -> bool:
        """Whether a verdict was given in the agent's own sandbox."""
        return self.trial is not None and bool(task_has_any_shared_verifier(self.trial.task.config))

    @property
    def ended(self) -> bool:
        return self._task is None or self._task.done()

    async def run(self) -> None:
        """Raises RolloutFailure for what Harbor does not record in its result, CancelledError with the trial already stopped."""
        if self._task is not None:
            raise RuntimeError("a trial runs once")
        if self._abort is not None:
            raise self._abort
        self._task = asyncio.create_task(self._drive(), name=f"trial {self.spec.name}")
        try:
            await asyncio.wait({self._task}, timeout=self.spec.deadline_s)
        finally:
            late = not self._task.done()
            if late:
                await uninterrupted(self.halt())
        if self._abort is not None:
            raise self._abort
        if late:
            raise RolloutFailure(Cause.WALL_CLOCK, f"{self.phase} had not ended after {self.spec.deadline_s:g} s (rollout.deadline_s)")
        if self._task.cancelled():
            raise RolloutFailure(Cause.CANCELLED, f"stopped during {self.phase}")
        error = self._task.exception()
        if error is not None:
            # Before the trial exists, the sandbox's class may refuse the task.
            cause = Cause.SANDBOX_START if type(error).__name__ in SANDBOX_ERRORS else Cause.INTERNAL
            raise RolloutFailure(cause, f"{self.phase}: {type(error).__name__}: {error}") from error

    def abort(self, failure: RolloutFailure) -> None:
        """End the trial, also from within one of its hooks: what follows would be for nothing."""
        self._abort = self._abort or failure
        if self._task is not None:
            self._task.cancel()

    async def halt(self) -> None:
        """Stop the trial and its sandbox, within three times `stop_timeout_s`; it is taken away from under a Harbor that hangs."""
        task = self._task
        if task is None or task.done():
            return
        self._halted = True
        task.cancel()
        if not await _ended(task, self.spec.stop_timeout_s):
            logger.warning("trial %s: still in %s %g s after it was cancelled", self.spec.name, self.phase, self.spec.stop_timeout_s)
        # Harbor leaves a stop that is interrupted to itself, and sets it no limit.
        try:
            async with asyncio.timeout(self.spec.stop_timeout_s):
                if self.trial is not None:
                    await self.trial.agent_environment.stop(delete=True)
        except (OSError, RuntimeError) as error:  # TimeoutError is an OSError, the sandbox's errors are RuntimeErrors
            logger.error("trial %s: its sandbox did not stop (%s: %s)", self.spec.name, type(error).__name__, error)
        task.cancel()
        if not await _ended(task, self.spec.stop_timeout_s):
            logger.error("trial %s: does not end; it is left behind", self.spec.name)

    async def _drive(self) -> TrialResult:
        # `Trial.create` is synchronous but for its name: some 40 ms of pure Python for a small task, most of it for hashing the task's
        # files. A thread would not make that cheaper.
        with self._around():
            trial = self.trial = await Trial.create(self.spec.config())
            steps = len(trial.task.config.steps or []) or 1
            for event in _PHASES:
                trial.add_hook(event, self._note_phase)

            async def agent_end(_: TrialHookEvent) -> None:
                self._agent_ends += 1
                await self._on_agent_end(trial.agent_environment, self._agent_ends == steps)

            trial.add_hook(TrialEvent.AGENT_END, agent_end)
            return await trial.run()

    async def _note_phase(self, event: TrialHookEvent) -> None:
        if not self._halted:
            self.phase = _PHASES[event.event]


async def _ended(task: asyncio.Task[Any], timeout_s: float) -> bool:
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    return bool(done)


def load_litellm() -> None:
    """Import litellm with its own price list. Harbor imports it to parse a model's name; it would first try to download that list.

    litellm takes this setting from the environment only, while it is imported. So the variable is set for the import and taken back after
    it; call this where nothing else runs. Harbor's telemetry needs no such care: only its jobs and its command line send any.
    """
    if "litellm" in sys.modules:
        return
    name, before = "LITELLM_LOCAL_MODEL_COST_MAP", os.environ.get("LITELLM_LOCAL_MODEL_COST_MAP")
    os.environ.setdefault(name, "True")
    try:
        importlib.import_module("litellm")
    finally:
        if before is None:
            del os.environ[name]


def _has_agent_timeout(task_path: Path) -> bool:
    """Whether the task, or one of its steps, limits the agent's time."""
    document = tomllib.loads((task_path / "task.toml").read_text())
    sections = [document, *document.get("steps", [])]
    return any((section.get("agent") or {}).get("timeout_sec") is not None for section in sections)
