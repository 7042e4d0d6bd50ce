"""The verdict of a finished trial, from the product's own record of that trial and nothing else.

Harbor's reading and our reading of the raw reward files must agree. A verifier that could not do its work (its own script lacked a tool,
its own download failed) has not measured the rollout: that is an error, not a 0.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness_rl.errors import Cause
from harness_rl.sessions.base import RolloutFailure, VerifyResult
from harness_rl.sessions.causes import TrialFacts, verdict_failure
from harness_rl.sessions.rewards import RewardError, choose_reward, read_rewards

if TYPE_CHECKING:
    from harness_rl.sandboxes.bubblewrap import Verification

logger = logging.getLogger(__name__)

STDOUT_NAME = "test-stdout.txt"
_MAX_OUTPUT = 1 << 20
_GRADING = frozenset({Cause.VERIFIER, Cause.SANDBOX_LOST, Cause.WALL_CLOCK})
"""Failures that an agent can bring about after its end."""

# Only lines that the verifier's own script (below /tests) or its downloader writes; words that the agent's work may print do not count.
_NEVER_RAN = (
    re.compile(r"^/tests/[^\s:]+: (?:line \d+: |\d+: )?(?P<what>[^\s:]+: (?:command )?not found)$", re.MULTILINE),
    re.compile(r"^bash: (?P<what>/tests/\S+: .*(?:not found|No such file or directory))$", re.MULTILINE),
    re.compile(r"^(?P<what>curl: \((?:6|7|28|35)\) .*)$", re.MULTILINE),
    re.compile(r"^(?P<what>wget: unable to resolve host address .*)$", re.MULTILINE),
    re.compile(r"^(?P<what>E: (?:Unable to locate package|Failed to fetch|Unable to fetch) .*)$", re.MULTILINE),
)


def judge(facts: TrialFacts, trial_dir: Path, steps: list[str], key: str) -> VerifyResult:
    """The verdict of a trial. `steps` names the graded steps of a multi-step task. Raises RolloutFailure(VERIFIER)."""
    folders = [trial_dir / "steps" / step / "verifier" for step in steps] or [trial_dir / "verifier"]
    failure = verdict_failure(facts)
    if failure:
        raise _explained(failure, folders)
    try:
        readings = [read_rewards(folder) for folder in folders]
        if not steps:
            _agree(facts.rewards or {}, readings[0])
        reward, metrics = choose_reward({name: float(value) for name, value in (facts.rewards or {}).items()}, key)
    except RewardError as error:
        raise RolloutFailure(Cause.VERIFIER, str(error)) from None
    if reward == 0:
        for folder in folders:
            if missing := tests_never_ran(_output(folder)):
                raise RolloutFailure(Cause.VERIFIER, f"the tests never ran: {missing}")
    return VerifyResult(env_reward=reward, metrics=metrics, artifacts=_artifacts(folders, trial_dir))


def believed(verdict: VerifyResult, left: Sequence[Verification], shared: bool, policy: str, who: str) -> VerifyResult:
    """The verdict as far as it may be believed: what programs said that the agent had replaced pays nothing (`reward.tampered`).

    `left` is what each step's sandbox was found with, `shared` whether a verdict was given in the agent's own sandbox.
    """
    replaced = sorted({name for found in left for name in found.replaced})
    if not replaced or policy == "keep" or not shared:
        return verdict
    logger.warning("%s replaced %s: its reward is at most 0", who, ", ".join(replaced))
    return replace(verdict, env_reward=None if verdict.env_reward is None else min(verdict.env_reward, 0.0))


def unpaid(failure: RolloutFailure, left: Sequence[Verification], who: str) -> VerifyResult:
    """A reward of 0 for an agent that kept its own rollout from being graded: it replaced programs, or left something in the verifier's
    way. Made again instead, a bad rollout would cost it nothing. Raises `failure` where it is not the agent's doing.

    It is taken for the agent's doing wherever the agent did such a thing, whatever `reward.tampered` says and whichever verifier the task
    has: its artifacts are collected with the programs of its sandbox."""
    doing = [reason for found in left for reason in (*(f"replaced {name}" for name in found.replaced), *found.hindered)]
    if failure.cause not in _GRADING or not doing:
        raise failure
    logger.warning("%s was not graded (%s), by its own doing: its reward is 0 (%s)", who, failure.message, "; ".join(doing[:5]))
    return VerifyResult(env_reward=0.0)


def tests_never_ran(output: str) -> str | None:
    """The line of the verifier's output that shows that its own script or download failed, or None."""
    for pattern in _NEVER_RAN:
        if match := pattern.search(output):
            return match.group("what")[:200]
    return None


def _agree(harbor: Mapping[str, float], ours: Mapping[str, float]) -> None:
    if harbor.keys() != ours.keys() or any(float(harbor[name]) != ours[name] for name in ours):
        raise RewardError(f"two readings of the reward file differ: {dict(harbor)} and {dict(ours)}")


def _explained(failure: RolloutFailure, folders: list[Path]) -> RolloutFailure:
    """The same failure with what the files and the output tell beyond Harbor's words."""
    notes: list[str] = []
    for folder in folders:
        try:
            read_rewards(folder)
        except RewardError as error:
            notes.append(str(error))
        if missing := tests_never_ran(_output(folder)):
            notes.append(missing)
    return RolloutFailure(failure.cause, "; ".join([failure.message, *notes]))


def _output(folder: Path) -> str:
    path = folder / STDOUT_NAME
    if path.is_symlink() or not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(_MAX_OUTPUT).decode(errors="replace")


def _artifacts(folders: list[Path], trial_dir: Path) -> dict[str, str]:
    """Name in the trial's folder → path, of the plain files that the verifier left."""
    files = (path for folder in folders for path in sorted(folder.iterdir()) if path.is_file() and not path.is_symlink())
    return {path.relative_to(trial_dir).as_posix(): str(path) for path in files}
