"""Every way a Harbor trial can end, as Harbor's own result classes record it, and the one cause that it gets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from harbor.models.trial.result import ExceptionInfo, StepResult, TimingInfo, TrialResult
from harbor.models.verifier.result import VerifierResult

from harness_rl.errors import Cause, Fault
from harness_rl.sessions.causes import classify, facts_of, verdict_failure

START = datetime(2026, 1, 1, tzinfo=UTC)
ENVIRONMENT, SETUP, AGENT, VERIFIER, AFTER = range(5)
"""The phase in which an exception occurred."""


def at(phase: int, seconds: float = 0.0) -> datetime:
    return START + timedelta(minutes=phase, seconds=seconds)


def exception(name: str, phase: int, message: str = "words\nof it") -> ExceptionInfo:
    return ExceptionInfo(exception_type=name, exception_message=message, exception_traceback="", occurred_at=at(phase, 30))


def trial(reached: int, *, rewards: dict[str, float] | None = None, error: ExceptionInfo | None = None, steps: Any = None) -> TrialResult:
    """A result as Harbor leaves it when the phase `reached` was the last to start."""
    timing = [TimingInfo(started_at=at(phase), finished_at=at(phase, 40)) if phase <= reached else None for phase in range(4)]
    return TrialResult.model_construct(
        environment_setup=timing[ENVIRONMENT],
        agent_setup=timing[SETUP],
        agent_execution=timing[AGENT],
        verifier=timing[VERIFIER],
        verifier_result=VerifierResult(rewards=rewards) if rewards is not None else None,
        exception_info=error,
        step_results=steps,
    )


def status(turns: int, **reasons: int) -> dict[str, Any]:
    return {"calls_seen": turns + sum(reasons.values()), "turns": turns, "calls_by_reason": reasons}


GOOD = {"reward": 1.0}

FAILED = [
    # what, result, status, turns, cause
    ("start timeout", trial(ENVIRONMENT, error=exception("EnvironmentStartTimeoutError", ENVIRONMENT)), status(0), 0, Cause.SANDBOX_START),
    ("start refused", trial(ENVIRONMENT, error=exception("SandboxBuildFailedError", ENVIRONMENT)), status(0), 0, Cause.SANDBOX_START),
    ("start broke", trial(ENVIRONMENT, error=exception("OSError", ENVIRONMENT)), status(0), 0, Cause.SANDBOX_START),
    ("unhealthy", trial(ENVIRONMENT, error=exception("HealthcheckError", ENVIRONMENT)), status(0), 0, Cause.SANDBOX_START),
    ("no layer", trial(SETUP, error=exception("RuntimeError", SETUP)), status(0), 0, Cause.AGENT_SETUP),
    ("setup timeout", trial(SETUP, error=exception("AgentSetupTimeoutError", SETUP)), status(0), 0, Cause.AGENT_SETUP),
    (
        "crash before a call",
        trial(VERIFIER, rewards={"reward": 0}, error=exception("NonZeroAgentExitCodeError", AGENT)),
        status(0),
        0,
        Cause.AGENT_CRASH,
    ),
    ("no call", trial(VERIFIER, rewards=GOOD), status(0), 0, Cause.NO_MODEL_CALL),
    (
        "timeout without a call",
        trial(VERIFIER, rewards={"reward": 0}, error=exception("AgentTimeoutError", AGENT)),
        status(0),
        0,
        Cause.NO_MODEL_CALL,
    ),
    ("only refused calls", trial(VERIFIER, rewards=GOOD), status(0, refused=2), 0, Cause.NO_MODEL_CALL),
    (
        "engine down",
        trial(VERIFIER, rewards={"reward": 0}, error=exception("NonZeroAgentExitCodeError", AGENT)),
        status(0, engine_failed=3),
        0,
        Cause.ENGINE,
    ),
    (
        "engine died on the way",
        trial(VERIFIER, rewards={"reward": 0}, error=exception("NonZeroAgentExitCodeError", AGENT)),
        status(2, engine_failed=3),
        2,
        Cause.ENGINE,
    ),
    (
        "proxy died under the agent",
        trial(VERIFIER, rewards={"reward": 0}, error=exception("NetworkConnectionError", AGENT)),
        status(2),
        2,
        Cause.ENGINE,
    ),
    ("sandbox lost", trial(AGENT, error=exception("SandboxLikelyOutOfMemoryError", AGENT)), status(2), 2, Cause.SANDBOX_LOST),
    ("sandbox lost while grading", trial(VERIFIER, error=exception("RuntimeRequestError", VERIFIER)), status(2), 2, Cause.SANDBOX_LOST),
    (
        "unknown exception in the agent's phase is no reward",
        trial(VERIFIER, rewards=GOOD, error=exception("SomethingNew", AGENT)),
        status(2),
        2,
        Cause.INTERNAL,
    ),
    ("cancelled", trial(AGENT, error=exception("CancelledError", AGENT)), status(2), 2, Cause.CANCELLED),
]

NO_VERDICT = [
    ("no reward file", trial(VERIFIER, error=exception("RewardFileNotFoundError", VERIFIER)), "RewardFileNotFoundError"),
    ("empty file", trial(VERIFIER, error=exception("RewardFileEmptyError", VERIFIER)), "RewardFileEmptyError"),
    ("malformed", trial(VERIFIER, error=exception("VerifierOutputParseError", VERIFIER)), "VerifierOutputParseError"),
    ("bare number", trial(VERIFIER, error=exception("ValidationError", VERIFIER)), "ValidationError"),
    ("timeout", trial(VERIFIER, error=exception("VerifierTimeoutError", VERIFIER)), "VerifierTimeoutError"),
    ("tests not uploaded", trial(VERIFIER, error=exception("AddTestsDirError", VERIFIER)), "AddTestsDirError"),
    ("no download", trial(VERIFIER, error=exception("DownloadVerifierDirError", VERIFIER)), "DownloadVerifierDirError"),
    ("agent timeout, then none", trial(VERIFIER, error=exception("AgentTimeoutError", AGENT)), "AgentTimeoutError"),
    ("no numbers", trial(VERIFIER, rewards={}), "no reward"),
    ("not graded", trial(AGENT, error=exception("NonZeroAgentExitCodeError", AGENT)), "did not run"),
]


@pytest.mark.parametrize(("what", "result", "seen", "turns", "cause"), FAILED, ids=[row[0] for row in FAILED])
def test_failed_rollout(what: str, result: TrialResult, seen: dict[str, Any], turns: int, cause: Cause) -> None:
    failure = classify(facts_of(result, seen, turns))
    assert failure is not None
    assert failure.cause is cause
    assert "\n" not in failure.message


@pytest.mark.parametrize(("what", "result", "words"), NO_VERDICT, ids=[row[0] for row in NO_VERDICT])
def test_f09_no_verdict(what: str, result: TrialResult, words: str) -> None:
    facts = facts_of(result, status(2), 2)
    assert classify(facts) is None, "the rollout itself is fine and its trace is kept"
    failure = verdict_failure(facts)
    assert failure is not None
    assert failure.cause is Cause.VERIFIER
    assert words in failure.message


def test_a_plain_success_is_graded() -> None:
    facts = facts_of(trial(VERIFIER, rewards=GOOD), status(2), 2)
    assert classify(facts) is None
    assert verdict_failure(facts) is None
    assert not facts.timed_out


def test_c11_agent_timeout_with_a_verdict_is_graded() -> None:
    facts = facts_of(trial(VERIFIER, rewards=GOOD, error=exception("AgentTimeoutError", AGENT)), status(2), 2)
    assert classify(facts) is None
    assert verdict_failure(facts) is None
    assert facts.timed_out


def test_c11_timeout_of_a_step_is_not_missed() -> None:
    step = StepResult.model_construct(
        step_name="one",
        exception_info=exception("AgentTimeoutError", AGENT),
        agent_execution=TimingInfo(started_at=at(AGENT)),
        verifier=TimingInfo(started_at=at(VERIFIER)),
        verifier_result=VerifierResult(rewards=GOOD),
    )
    result = trial(SETUP, rewards=GOOD, steps=[step])
    facts = facts_of(result, status(2), 2)
    assert classify(facts) is None
    assert verdict_failure(facts) is None
    assert facts.timed_out


def test_an_agent_that_gives_up_after_calls_is_graded() -> None:
    facts = facts_of(trial(VERIFIER, rewards={"reward": 0}, error=exception("NonZeroAgentExitCodeError", AGENT)), status(4, limit=1), 4)
    assert classify(facts) is None
    assert verdict_failure(facts) is None
    assert facts.agent_exited_badly
    assert facts.limit_reached


@pytest.mark.parametrize(
    ("engines", "held", "cause"), [([False], False, Cause.ENGINE), ([True], True, Cause.ENGINE), ([False, True], False, None)]
)
def test_a_timeout_while_nobody_answered_is_the_engines(engines: list[bool], held: bool, cause: Cause | None) -> None:
    result = trial(VERIFIER, rewards={"reward": 0}, error=exception("AgentTimeoutError", AGENT))
    endpoint = {"engines": dict(enumerate(engines)), "held": held}
    failure = classify(facts_of(result, status(2, abandoned=1), 2, endpoint))
    assert (failure.cause if failure else None) is cause


def test_an_engine_failure_that_the_agent_survived_is_no_failure() -> None:
    facts = facts_of(trial(VERIFIER, rewards=GOOD), status(4, engine_failed=1), 4)
    assert classify(facts) is None


def test_a_broken_stop_after_the_verdict_keeps_it() -> None:
    result = trial(VERIFIER, rewards=GOOD, error=exception("RuntimeError", AFTER))
    assert classify(facts_of(result, status(2), 2)) is None


def test_the_judgement_of_harbor_counts() -> None:
    result = SimpleNamespace(**{**vars(trial(VERIFIER, rewards=GOOD)), "reward_valid": False})
    failure = verdict_failure(facts_of(result, status(2), 2))
    assert failure is not None
    assert failure.cause is Cause.VERIFIER


def test_a_result_without_that_judgement_is_judged_by_ours() -> None:
    result = SimpleNamespace(**vars(trial(VERIFIER, rewards=GOOD)))
    assert verdict_failure(facts_of(result, status(2), 2)) is None


def test_words_of_the_policy_do_not_change_the_class() -> None:
    """Harbor calls an exit an API error when the agent's output has the words; the policy could write them to drop its failures."""
    facts = facts_of(trial(VERIFIER, rewards=GOOD, error=exception("ApiRateLimitError", AGENT)), status(3), 3)
    assert classify(facts) is None
    assert facts.agent_exited_badly


def test_every_cause_has_a_fault() -> None:
    assert {cause.fault for cause in Cause} <= set(Fault)
