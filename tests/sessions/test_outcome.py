"""Outcome, verdict and record of a rollout, from a hand-made trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capture_proxy.trace import TrainingTrace
from harness_rl.errors import Cause
from harness_rl.sandboxes.bubblewrap import Verification
from harness_rl.sessions.base import RolloutFailure, VerifyResult
from harness_rl.sessions.causes import TrialFacts
from harness_rl.sessions.outcome import build_outcome, rollout_record, write_record
from harness_rl.sessions.verdict import judge, unpaid
from harness_rl.sessions.verdict import tests_never_ran as never_ran

SYSTEM = {"role": "system", "content": "You act."}
USER = {"role": "user", "content": "Write hello."}


def call(number: int, name: str = "bash") -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def assistant(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def tool(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


def turn(node: str, messages: list[dict[str, Any]], answer: dict[str, Any], trained: int = 1, **metadata: Any) -> dict[str, Any]:
    return {
        "node_id": node,
        "prompt_token_ids": [10, 11],
        "completion_token_ids": [20, 21, 22],
        "per_token_logps": [-0.5, -0.1, -2.0],
        "loss_mask": [0, 0, trained, 0, trained],
        "request": {"messages": messages},
        "response": {"choices": [{"index": 0, "message": answer, "finish_reason": "stop"}]},
        "metadata": {"role": "agent", "mask_reason": None, **metadata},
    }


FIRST = assistant(call(1), call(2, "edit"))
SECOND = assistant(call(3))
MIDDLE = [SYSTEM, USER, FIRST, tool(1, "<returncode>0</returncode>\nerror.log"), tool(2, "<returncode>2</returncode>")]
LAST = [*MIDDLE, SECOND, tool(3, "Traceback: no")]
DONE = {"role": "assistant", "content": "done"}


def trace() -> TrainingTrace:
    return TrainingTrace.model_validate(
        {
            "turns": [
                turn("t", [USER], {"role": "assistant", "content": "A title"}, 0, role="auxiliary", mask_reason="auxiliary"),
                turn("a", [SYSTEM, USER], assistant(call(9, "lost")), 0, mask_reason="retry"),
                turn("b", [SYSTEM, USER], FIRST),
                turn("c", MIDDLE, SECOND),
                turn("d", LAST, DONE),
                turn("e", LAST, assistant(call(8)), 0, mask_reason="late"),
            ]
        }
    )


def test_outcome_of_the_last_branch() -> None:
    outcome = build_outcome(trace(), VerifyResult(1.0, {"aux": 0.5}), TrialFacts())
    assert outcome.env_reward == 1.0
    assert outcome.completion == [*LAST, DONE]
    assert outcome.tool_calls_by_name == {"bash": 2, "edit": 1}
    assert outcome.tool_call_count == 3
    assert outcome.tool_failure_count == 2, "a stated return code wins over words, each result counts once"
    assert outcome.metrics == {"aux": 0.5, "rollout/history_search": 0.0, "rollout/truncated": 0.0}
    assert outcome.turns == 6
    assert outcome.stop_reason == "finished"
    assert not outcome.timed_out


@pytest.mark.parametrize(
    ("facts", "reason", "timed_out"),
    [
        (TrialFacts(exceptions=(("AgentTimeoutError", "", None),), limit_reached=True), "agent_timeout", True),
        (TrialFacts(exceptions=(("NonZeroAgentExitCodeError", "", None),)), "agent_exit", False),
        (TrialFacts(exceptions=(("NonZeroAgentExitCodeError", "", None),), limit_reached=True), "limit", False),
    ],
)
def test_stop_reason(facts: TrialFacts, reason: str, timed_out: bool) -> None:
    outcome = build_outcome(trace(), VerifyResult(None), facts)
    assert (outcome.stop_reason, outcome.timed_out, outcome.env_reward) == (reason, timed_out, None)


@pytest.mark.parametrize(
    ("reasons", "limit", "truncated"),
    [(["stop", "stop"], False, False), (["stop", "length"], False, True), (["length", "stop"], False, False), (["stop"], True, True)],
)
def test_c07_a_rollout_is_truncated_where_its_end_was_cut(reasons: list[str], limit: bool, truncated: bool) -> None:
    turns = [turn(f"n{n}", [USER], DONE, finish_reason=reason) for n, reason in enumerate(reasons)]
    turns.append(turn("title", [USER], DONE, 0, role="auxiliary", mask_reason="auxiliary", finish_reason="length"))
    made = TrainingTrace.model_validate({"turns": turns})
    outcome = build_outcome(made, VerifyResult(1.0), TrialFacts(limit_reached=limit))
    assert outcome.truncated is truncated and outcome.metrics["rollout/truncated"] == float(truncated)
    assert [turn.metadata["finish_reason"] for turn in made.turns[:-1]] == reasons


def shell(command: Any) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command}) if not isinstance(command, bytes) else command.decode()}
    return {"id": "c", "type": "function", "function": function}


@pytest.mark.parametrize(
    ("command", "flagged"),
    [
        ("git log --all --oneline", True),
        ("cd repo && git -C . --no-pager log -p --reflog", True),
        ("git show origin/main:src/a.py", True),
        ("git reflog", True),
        ("git -c core.pager=cat fsck --lost-found", True),
        ("git rev-list --objects -n 5 HEAD", True),
        ("git cat-file -p 1234abcd", True),
        ("cat .git/packed-refs", True),
        ("ls -R /repo/.git/objects/pack", True),
        ("git checkout stash@{0} -- a.py", True),
        ("git diff HEAD ORIG_HEAD", True),
        ("git fetch origin", True),
        (["bash", "-lc", "git log --branches"], True),
        (b"git log --all, cut before its end", True),
        ("git status && git diff", False),
        ("git log -5 --stat", False),
        ("git show HEAD~1", False),
        ("git add -A && git commit -m 'git is fine' && git branch fix", False),
        ("grep -rn 'reflog' docs", False),
        ("echo refs/heads; ls digit/objects", False),
    ],
)
def test_i04_a_search_through_the_history_is_flagged_and_ordinary_work_is_not(command: Any, flagged: bool) -> None:
    made = TrainingTrace.model_validate({"turns": [turn("a", [USER], assistant(shell("ls"), shell(command))), turn("b", LAST, DONE)]})
    outcome = build_outcome(made, VerifyResult(1.0), TrialFacts())
    assert outcome.metrics["rollout/history_search"] == float(flagged)
    assert outcome.env_reward == 1.0  # a report, no verdict


def test_i04_a_retry_that_the_agent_threw_away_is_no_search() -> None:
    thrown = turn("a", [USER], assistant(shell("git log --all")), 0, mask_reason="retry")
    made = TrainingTrace.model_validate({"turns": [thrown, turn("b", [USER], DONE)]})
    assert build_outcome(made, VerifyResult(1.0), TrialFacts()).metrics["rollout/history_search"] == 0.0


def test_an_empty_trace_has_an_empty_outcome() -> None:
    outcome = build_outcome(TrainingTrace(turns=[]), VerifyResult(None), TrialFacts())
    assert (outcome.completion, outcome.tool_call_count, outcome.turns) == ([], 0, 0)


def test_record_on_disk(tmp_path: Path) -> None:
    outcome = build_outcome(trace(), VerifyResult(1.0), TrialFacts())
    record = rollout_record({"episode_id": "e1", "seed": 3}, outcome, RolloutFailure(Cause.VERIFIER, "why"), status={"turns": 6})
    write_record(tmp_path / "e1", record, trace())
    assert TrainingTrace.from_bytes((tmp_path / "e1/trace.bin").read_bytes()) == trace()
    saved = json.loads((tmp_path / "e1/outcome.json").read_text())
    assert (saved["cause"], saved["message"], saved["episode_id"], saved["trained_tokens"]) == ("verifier", "why", "e1", 6)
    assert saved["completion"] == outcome.completion
    assert sorted(path.name for path in (tmp_path / "e1").iterdir()) == ["outcome.json", "trace.bin"]


def graded(rewards: dict[str, float], **more: Any) -> TrialFacts:
    return TrialFacts(
        environment_started=True, agent_started=True, verifier_started=True, rewards=rewards, reward_valid=True, turns=2, **more
    )


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    folder = tmp_path / "verifier"
    folder.mkdir()
    return folder


def test_verdict(verifier: Path) -> None:
    (verifier / "reward.json").write_text('{"reward": 1, "aux": 0.5}')
    (verifier / "test-stdout.txt").write_text("1 passed")
    verdict = judge(graded({"reward": 1, "aux": 0.5}), verifier.parent, [], "reward")
    assert (verdict.env_reward, verdict.metrics) == (1.0, {"aux": 0.5})
    assert sorted(verdict.artifacts) == ["verifier/reward.json", "verifier/test-stdout.txt"]


def test_two_readings_must_agree(verifier: Path) -> None:
    (verifier / "reward.txt").write_text("0")
    with pytest.raises(RolloutFailure, match="differ") as caught:
        judge(graded({"reward": 1.0}), verifier.parent, [], "reward")
    assert caught.value.cause is Cause.VERIFIER


def test_i06_numbers_elsewhere_are_never_read(verifier: Path) -> None:
    """A forged result tree beside the real one, and a verifier that left nothing."""
    for name in ("agent", "artifacts"):
        (verifier.parent / name / "verifier").mkdir(parents=True)
        (verifier.parent / name / "verifier" / "reward.txt").write_text("1000")
        (verifier.parent / name / "result.json").write_text('{"reward": 1000}')
    with pytest.raises(RolloutFailure, match="neither"):
        judge(graded({"reward": 1.0}), verifier.parent, [], "reward")


def test_a_boolean_that_harbor_takes_for_one_is_no_reward(verifier: Path) -> None:
    (verifier / "reward.json").write_text('{"reward": true}')
    with pytest.raises(RolloutFailure, match="not a number"):
        judge(graded({"reward": 1.0}), verifier.parent, [], "reward")


def test_f16_a_missing_verdict_names_the_missing_tool(verifier: Path) -> None:
    (verifier / "test-stdout.txt").write_text("/tests/test.sh: line 3: pytest: command not found\n")
    facts = TrialFacts(verifier_started=True, exceptions=(("RewardFileNotFoundError", "No reward file", None),))
    with pytest.raises(RolloutFailure, match="pytest: command not found"):
        judge(facts, verifier.parent, [], "reward")


def test_f15_a_zero_of_tests_that_never_ran_is_none(verifier: Path) -> None:
    (verifier / "reward.txt").write_text("0")
    (verifier / "test-stdout.txt").write_text("curl: (6) Could not resolve host: example.org\n")
    with pytest.raises(RolloutFailure, match="never ran"):
        judge(graded({"reward": 0.0}), verifier.parent, [], "reward")
    (verifier / "reward.txt").write_text("1")
    assert judge(graded({"reward": 1.0}), verifier.parent, [], "reward").env_reward == 1.0


def test_words_of_the_agents_work_are_not_taken_for_the_verifiers() -> None:
    assert never_ran("run.sh: line 3: helo: command not found\nFAILED") is None
    assert never_ran("/app/run.sh: line 3: helo: command not found") is None
    assert never_ran("/tests/test.sh: 3: uvx: not found") == "uvx: not found"


def test_each_step_of_a_multi_step_task_is_read(tmp_path: Path) -> None:
    for step, text in (("one", "1"), ("two", "0")):
        (tmp_path / "steps" / step / "verifier").mkdir(parents=True)
        (tmp_path / "steps" / step / "verifier" / "reward.txt").write_text(text)
    assert judge(graded({"reward": 0.5}), tmp_path, ["one", "two"], "reward").env_reward == 0.5
    (tmp_path / "steps/two/verifier/reward.txt").write_text("nan")
    with pytest.raises(RolloutFailure, match="not finite"):
        judge(graded({"reward": 0.5}), tmp_path, ["one", "two"], "reward")


@pytest.mark.parametrize("cause", [Cause.VERIFIER, Cause.SANDBOX_LOST, Cause.WALL_CLOCK])
def test_an_agent_that_kept_itself_from_being_graded_earns_nothing(cause: Cause) -> None:
    failure = RolloutFailure(cause, "rm: exit code 1")
    for found in (Verification(0, [], ["/usr/bin/rm"]), Verification(0, [], [], ["its disk quota is full"])):
        assert unpaid(failure, [found], "its agent").env_reward == 0.0


def test_a_failure_that_is_not_the_agents_doing_stays_unscorable() -> None:
    for failure, found in (
        (RolloutFailure(Cause.VERIFIER, "no reward"), Verification(3, ["/tests/x"], [])),
        (RolloutFailure(Cause.CAPTURE, "the proxy died"), Verification(0, [], ["/usr/bin/rm"])),
        (RolloutFailure(Cause.CANCELLED, "stopped"), Verification(0, [], ["/usr/bin/rm"])),
    ):
        with pytest.raises(RolloutFailure) as caught:
            unpaid(failure, [found], "its agent")
        assert caught.value is failure
