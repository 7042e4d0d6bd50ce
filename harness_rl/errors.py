"""Every failure has one name, given by the boundary it crossed, and one fault: whose it is.

Three rules hold by construction:

1. A user's mistake is a `UserError`: one line (what is wrong, where, what to do), exit code 2, never a traceback.
2. A rollout that fails is data: its `Cause` is recorded once, its siblings go on, and its reward is None, never 0.
3. A broken invariant (`InvariantError`) ends the run: training on a guess is worse than stopping.

    HarnessRLError
    ├── UserError          config, paths, flags, tasks: exit 2
    ├── EngineError        the inference server died, refused or answered nonsense
    ├── SandboxError       the sandbox could not be built, reached or stopped
    ├── LearnerError       the learner process died or refused
    │   └── LearnerGone    it died or fell silent: it can be started again
    └── InvariantError     capture, rows or weights disagree with what was proven
"""

from __future__ import annotations

from enum import StrEnum


class HarnessRLError(Exception):
    """Base of all errors that harness-rl raises on purpose."""


class UserError(HarnessRLError):
    """The input is wrong; the message says what, where, and what to do. The CLI prints it and exits with 2."""


class EngineError(HarnessRLError):
    """The inference server died, refused a call or answered something that breaks its protocol."""


class SandboxError(HarnessRLError):
    """A sandbox could not be built, reached or stopped."""


class LearnerError(HarnessRLError):
    """The learner process died, timed out or reported a failure."""


class LearnerGone(LearnerError):
    """The learner process ended or fell silent without a word of its own: another one can go on from the last checkpoint."""


class InvariantError(HarnessRLError):
    """Capture, rows or weights disagree with what was proven; the run must not go on."""


class Fault(StrEnum):
    """Whose failure it is."""

    OURS = "ours"
    PROVIDER = "provider"
    HARNESS = "harness"
    MODEL = "model"
    TASK = "task"
    USER = "user"


class Cause(StrEnum):
    """Why a rollout has no reward (or why it ended early). Metrics, journal and trace viewer share this enum."""

    SANDBOX_START = "sandbox_start"
    """The sandbox did not come up."""
    SANDBOX_LOST = "sandbox_lost"
    """The sandbox died or could not be reached while the rollout was going."""
    ENVIRONMENT = "environment"
    """A white-box environment could not be made or reset, or gave something to show that a model cannot be shown."""
    ENVIRONMENT_LOST = "environment_lost"
    """The environment's session was lost in the middle of the episode; what it would say now is about another one."""
    AGENT_SETUP = "agent_setup"
    """The agent's layer was not usable in the sandbox."""
    AGENT_CRASH = "agent_crash"
    """The agent exited with an error before it made any model call."""
    NO_MODEL_CALL = "no_model_call"
    """The agent ended without a single captured turn."""
    ENGINE = "engine"
    """Model calls failed because the engine did."""
    CAPTURE = "capture"
    """The capture could not be fetched, or is not valid."""
    WALL_CLOCK = "wall_clock"
    """The rollout's own deadline passed outside the agent's phase."""
    VERIFIER = "verifier"
    """The verifier failed or left no valid reward."""
    REWARD_FUNCTION = "reward_function"
    """`rollout_reward_fn` raised or returned something that is not a finite float or None."""
    REWARD_TIMEOUT = "reward_timeout"
    """`rollout_reward_fn` had not returned after `reward.deadline_s`."""
    REWARD_NONE = "reward_none"
    """`rollout_reward_fn` returned None: the user asked to leave this rollout out."""
    CANCELLED = "cancelled"
    """The run stopped while the rollout was going."""
    ABANDONED = "abandoned"
    """The control process died while the rollout was going; its task is played again."""
    INTERNAL = "internal"
    """An unexpected exception in our own code; the log has it."""

    @property
    def fault(self) -> Fault:
        return _FAULTS[self]

    @property
    def retryable(self) -> bool:
        """True where a fresh sandbox may do better: the failure says nothing about the policy."""
        return self in _RETRYABLE


_FAULTS = {
    Cause.SANDBOX_START: Fault.PROVIDER,
    Cause.SANDBOX_LOST: Fault.PROVIDER,
    Cause.ENVIRONMENT: Fault.TASK,
    Cause.ENVIRONMENT_LOST: Fault.PROVIDER,
    Cause.AGENT_SETUP: Fault.HARNESS,
    Cause.AGENT_CRASH: Fault.HARNESS,
    Cause.NO_MODEL_CALL: Fault.HARNESS,
    Cause.ENGINE: Fault.OURS,
    Cause.CAPTURE: Fault.OURS,
    Cause.WALL_CLOCK: Fault.PROVIDER,
    Cause.VERIFIER: Fault.TASK,
    Cause.REWARD_FUNCTION: Fault.USER,
    Cause.REWARD_TIMEOUT: Fault.USER,
    Cause.REWARD_NONE: Fault.USER,
    Cause.CANCELLED: Fault.OURS,
    Cause.ABANDONED: Fault.OURS,
    Cause.INTERNAL: Fault.OURS,
}

_RETRYABLE = frozenset(
    {
        Cause.SANDBOX_START,
        Cause.SANDBOX_LOST,
        Cause.ENVIRONMENT,
        Cause.ENVIRONMENT_LOST,
        Cause.AGENT_SETUP,
        Cause.AGENT_CRASH,
        Cause.NO_MODEL_CALL,
        Cause.ENGINE,
        Cause.CAPTURE,
        Cause.WALL_CLOCK,
        Cause.VERIFIER,
    }
)


def first_error(error: BaseException) -> BaseException:
    """The first leaf of an exception group; our own named errors before any other."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    named = error.subgroup(HarnessRLError)
    return first_error((named or error).exceptions[0])
