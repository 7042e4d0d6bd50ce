"""Every way a Harbor trial can end, mapped to one cause or to "graded". The decision is by phase first and by exception name second.

Harbor takes an exception class that it does not know for a valid reward; here it is the other way round: a reward counts only when the
trial ended in one of the few ways that are the agent's own doing, or broke after the verdict. Exceptions are known by class name only,
because that is what Harbor's results carry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from capture_proxy.reasons import Reason
from harness_rl.errors import Cause
from harness_rl.sessions.base import RolloutFailure

AGENT_TIMEOUT = "AgentTimeoutError"

ENDPOINT_ERRORS = frozenset({"NetworkConnectionError", "ApiError"})
"""The agent gave up because its model endpoint did not answer or is broken: our agents know it from the exception that ended them."""

AGENT_EXITS = frozenset(
    {
        "NonZeroAgentExitCodeError",
        "ContextWindowExceededError",
        "ContextLengthExceededError",
        "OutputTokenExceededError",
        "OutputLengthExceededError",
        "AgentSafetyRefusalError",
        # Harbor guesses the next ones from words in the agent's output, which the policy writes. What really became of the model calls, the
        # proxy knows.
        "ApiRateLimitError",
        "ApiUsageLimitError",
        "ApiInternalServerError",
        "ApiOverloadedError",
        "ApiConnectionClosedError",
        "ApiResponseStalledError",
        "ApiProviderResourceNotFoundError",
        "UnknownApiError",
        "AgentAuthenticationError",
        "ModelNotFoundError",
        "UnsupportedModelParametersError",
    }
)
"""The agent's process ended with a non-zero exit code."""

SANDBOX_ERRORS = frozenset(
    {
        "EnvironmentStartTimeoutError",
        "SandboxBuildFailedError",
        "SandboxError",
        "RuntimeRequestError",
        "SandboxLikelyOutOfMemoryError",
        "MemoryLimitExceededError",
        "HealthcheckError",
    }
)


@dataclass(frozen=True)
class TrialFacts:
    """What a classification needs to know of a trial's result and of its capture session."""

    exceptions: tuple[tuple[str, str, datetime | None], ...] = ()
    """(class name, message, time) of the trial and of its steps, in order."""
    environment_started: bool = False
    """The sandbox's start ended without an exception, so that the agent's set-up began."""
    agent_started: bool = False
    verifier_started: bool = False
    verifier_started_at: datetime | None = None
    rewards: dict[str, float] | None = None
    """Harbor's own reading of the verdict."""
    reward_valid: bool = False
    """Harbor's own judgement; an ending that is the agent's own doing is valid in every version."""
    turns: int = 0
    """Captured turns."""
    calls_seen: int = 0
    engine_failures: int = 0
    """Model calls that the engine failed to answer."""
    unserved: bool = False
    """At the end the agent waited for an answer while no engine was up, or while the proxy held all calls."""
    limit_reached: bool = False
    reasons: dict[str, int] = field(default_factory=dict)
    """Calls by reason, for messages."""

    @property
    def timed_out(self) -> bool:
        return any(name == AGENT_TIMEOUT for name, _, _ in self.exceptions)

    @property
    def agent_exited_badly(self) -> bool:
        return any(name in AGENT_EXITS for name, _, _ in self.exceptions)


def classify(facts: TrialFacts) -> RolloutFailure | None:
    """Why the rollout as a whole failed, or None when it was run and captured properly (its verdict is judged by `verdict_failure`)."""
    foreign = [entry for entry in facts.exceptions if entry[0] != AGENT_TIMEOUT and entry[0] not in AGENT_EXITS]
    cancelled = next((entry for entry in foreign if entry[0] == "CancelledError"), None)
    if cancelled:
        return RolloutFailure(Cause.CANCELLED, "the trial was cancelled")
    if not facts.agent_started:
        return _before_agent(facts)
    for name, message, _ in foreign:
        if name in ENDPOINT_ERRORS:
            return RolloutFailure(Cause.ENGINE, f"the agent gave up on its model endpoint: {_line(name, message)}")
    if not facts.turns:
        return _without_turns(facts, foreign)
    if facts.engine_failures and (facts.agent_exited_badly or facts.timed_out):
        return RolloutFailure(Cause.ENGINE, f"{facts.engine_failures} of {facts.calls_seen} model calls failed and the agent gave up")
    if facts.unserved and facts.timed_out:
        return RolloutFailure(Cause.ENGINE, "the agent ran into its time limit while no engine answered")
    for name, message, at in foreign:
        if name in SANDBOX_ERRORS:
            return RolloutFailure(Cause.SANDBOX_LOST, _line(name, message))
        if not facts.verifier_started or (at and facts.verifier_started_at and at < facts.verifier_started_at):
            return RolloutFailure(Cause.INTERNAL, _line(name, message))
    return None


def verdict_failure(facts: TrialFacts) -> RolloutFailure | None:
    """Why there is no verdict, seen from Harbor's result alone; None where there is one (the raw reward files are checked after that)."""
    last = facts.exceptions[-1] if facts.exceptions else None
    if not facts.verifier_started:
        return RolloutFailure(Cause.VERIFIER, "the verifier did not run" + (f" after {_line(last[0], last[1])}" if last else ""))
    if not facts.rewards:
        return RolloutFailure(Cause.VERIFIER, _line(last[0], last[1]) if last else "the verifier left no reward")
    if not facts.reward_valid:
        return RolloutFailure(Cause.VERIFIER, "Harbor calls the reward invalid" + (f" after {_line(last[0], last[1])}" if last else ""))
    return None


def facts_of(result: Any, status: dict[str, Any], turns: int, endpoint: dict[str, Any] | None = None) -> TrialFacts:
    """Facts from a Harbor TrialResult (any supported version), the proxy's final status of the session and, where asked, its health."""
    reasons: dict[str, int] = dict(status.get("calls_by_reason") or {})
    steps = list(result.step_results or [])
    recorded = [holder.exception_info for holder in (result, *steps) if holder.exception_info is not None]
    verifier_starts = [holder.verifier.started_at for holder in (result, *steps) if holder.verifier is not None]
    rewards = result.verifier_result.rewards if result.verifier_result is not None else None
    # Harbor before 0.24 has no judgement of its own, and 0.25 has none that can be told that an agent's exit is the agent's own doing.
    valid = bool(getattr(result, "reward_valid", bool(rewards)))
    own_doing = bool(recorded) and all(entry.exception_type == AGENT_TIMEOUT or entry.exception_type in AGENT_EXITS for entry in recorded)
    return TrialFacts(
        exceptions=tuple((entry.exception_type, entry.exception_message, entry.occurred_at) for entry in recorded),
        environment_started=result.agent_setup is not None,
        agent_started=any(holder.agent_execution is not None for holder in (result, *steps)),
        verifier_started=bool(verifier_starts),
        verifier_started_at=min((at for at in verifier_starts if at is not None), default=None),
        rewards=rewards,
        reward_valid=valid or own_doing,
        turns=turns,
        calls_seen=int(status.get("calls_seen", turns)),
        engine_failures=reasons.get(Reason.ENGINE_FAILED, 0),
        unserved=endpoint is not None and (bool(endpoint["held"]) or not any(endpoint["engines"].values())),
        limit_reached=reasons.get(Reason.LIMIT, 0) > 0,
        reasons=reasons,
    )


def _before_agent(facts: TrialFacts) -> RolloutFailure:
    name, message, _ = facts.exceptions[0] if facts.exceptions else ("", "the trial ended before the agent started", None)
    cause = Cause.AGENT_SETUP if facts.environment_started else Cause.SANDBOX_START
    if name == "ProxyError":
        cause = Cause.CAPTURE  # the proxy did not take over the sandbox's listener
    return RolloutFailure(cause, _line(name, message))


def _without_turns(facts: TrialFacts, foreign: list[tuple[str, str, datetime | None]]) -> RolloutFailure:
    if facts.unserved:
        return RolloutFailure(Cause.ENGINE, "no engine answered a single call")
    if facts.engine_failures:
        return RolloutFailure(Cause.ENGINE, f"all {facts.calls_seen} model calls failed ({_counts(facts.reasons)})")
    if facts.calls_seen:
        return RolloutFailure(Cause.NO_MODEL_CALL, f"none of {facts.calls_seen} model calls was captured ({_counts(facts.reasons)})")
    for name, message, _ in foreign:
        if name in SANDBOX_ERRORS:
            return RolloutFailure(Cause.SANDBOX_LOST, _line(name, message))
    if facts.exceptions and not facts.timed_out:
        return RolloutFailure(Cause.AGENT_CRASH, _line(*facts.exceptions[0][:2]))
    return RolloutFailure(Cause.NO_MODEL_CALL, "the agent " + ("timed out" if facts.timed_out else "ended") + " without a model call")


def _counts(reasons: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(reasons.items()) if count) or "no reason recorded"


def _line(name: str, message: str) -> str:
    """Class name and the message's beginning and end in one line (a failed command's reason is usually its last words)."""
    text = " ".join(message.split())
    if len(text) > 400:
        text = f"{text[:150]} ... {text[-240:]}"
    return f"{name}: {text}" if name else text
