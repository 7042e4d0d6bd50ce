"""The session contract: one rollout of one agent on one task, from creation to a scored, sealed trace.

A session owns exactly one capture session and (for black-box agents) one sandbox. However it ends, by itself, by a failure, a deadline or
a cancellation, both are gone when `close()` returns. A failure is a `RolloutFailure` with a `Cause`; it is never turned into a reward of 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from harness_rl.errors import Cause, HarnessRLError

if TYPE_CHECKING:
    from capture_proxy.client import ProxyClient
    from capture_proxy.trace import TrainingTrace
    from harness_rl.config import RunConfig


class RolloutFailure(HarnessRLError):
    """The rollout has no reward: `cause` names why, `message` says what happened in one line."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(f"{cause.value}: {message}")
        self.cause = cause
        self.message = message


class StopReason(StrEnum):
    """How the agent's part of a scored rollout ended."""

    FINISHED = "finished"
    """The agent ended by itself and reported success."""
    AGENT_EXIT = "agent_exit"
    """The agent ended by itself with a non-zero exit code, after model calls (its own limits, repeated format errors)."""
    AGENT_TIMEOUT = "agent_timeout"
    """The agent ran into its time limit and was stopped."""
    LIMIT = "limit"
    """A limit of the capture session (calls, tokens, context) had been reached before the agent ended."""


def set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


async def never() -> None:
    await asyncio.Event().wait()


@dataclass(frozen=True)
class SessionServices:
    """What a run lends to its session factory."""

    proxy: ProxyClient
    handoff_socket: Path
    """Unix socket on which the proxy takes over listeners that were opened inside sandboxes."""
    model: str
    """The model name that the proxy serves."""
    sampling: dict[str, float]
    limits: dict[str, Any]
    """Of the capture session; `deadline_s` is the wall clock of the whole rollout."""
    rollouts_dir: Path
    config: RunConfig
    template: dict[str, Any] = field(default_factory=dict)
    """How the engine renders conversations: `chat_template_kwargs`, `control_tokens`."""
    history: str = "template"
    """What the model sees of its earlier thinking."""
    proxy_up: asyncio.Event = field(default_factory=set_event)
    """Set while the proxy serves; clear while a dead one is started again."""
    proxy_restarts: Callable[[], int] = int
    """How often it was; what a restarted proxy knows of an older rollout may lack calls."""
    proxy_died: Callable[[], Awaitable[None]] = never
    """Returns once the present one has died."""


@dataclass
class VerifyResult:
    """What the task's verifier said."""

    env_reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    """The verifier's other numbers, by name."""
    artifacts: dict[str, str] = field(default_factory=dict)
    """Name → path of what the verifier left (its output, its reward file), below the rollout's folder."""
    done: bool = True


@dataclass
class HarnessRolloutOutcome:
    """What a reward function gets. The meanings of the first seven fields are those of OpenEnv and TRL."""

    env_reward: float | None
    completion: list[dict[str, Any]]
    """Messages of the last branch: the last request's messages and the answer to it."""
    trace: TrainingTrace
    tool_call_count: int
    tool_failure_count: int
    tool_calls_by_name: dict[str, int]
    timed_out: bool
    """The agent was stopped at its time limit; a valid reward is kept all the same."""
    metrics: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    """Captured model calls."""
    stop_reason: str = StopReason.FINISHED.value

    @property
    def truncated(self) -> bool:
        """A limit cut it: the last answer's length, or the conversation's."""
        return bool(self.metrics.get("rollout/truncated"))


class Session(Protocol):
    async def run(self) -> None:
        """Run the agent and its verifier to the end. Raises RolloutFailure, or CancelledError with everything already released."""
        ...

    def fetch_training_trace(self) -> TrainingTrace:
        """The sealed trace. Raises RolloutFailure where there is none."""
        ...

    def verify(self, transcript: list[dict[str, Any]] | None = None) -> VerifyResult:
        """The recorded verdict. Raises RolloutFailure(VERIFIER) where there is no valid reward."""
        ...

    def outcome(self) -> HarnessRolloutOutcome:
        """Trace and verdict in one; `env_reward` is None where the verdict is not valid. Raises RolloutFailure without a trace."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent and bounded; never raises for what is already gone."""
        ...


class SessionFactory(Protocol):
    def prompt_rows(self) -> list[dict[str, Any]]:
        """The factory's own tasks as data set rows: `prompt`, `task_name`, `task_path`, ..."""
        ...

    def identity(self) -> dict[str, Any]:
        """What of the agent's set-up changes what a model sees, as plain data: a warm start is only good for the same."""
        ...

    def bind(self, services: SessionServices) -> None:
        """Lend the run's services; once, before the first `create`."""
        ...

    def demonstration(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        """The assistant turns of a policy that solves the task. Raises UserError where there are none."""
        ...

    async def create(
        self,
        task: dict[str, Any],
        seed: int,
        episode_id: str,
        *,
        script: list[dict[str, Any]] | None = None,
        temperature: float | None = None,
    ) -> Session:
        """A session for one data set row. `script` plays these assistant turns instead of sampling (a demonstration)."""
        ...
