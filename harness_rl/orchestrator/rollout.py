"""One rollout from task to reward. A failure that is not the policy's is retried in a fresh session; every attempt is journalled before it
starts."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from dataclasses import dataclass
from typing import Any

from harness_rl.config import RewardSection
from harness_rl.errors import Cause
from harness_rl.orchestrator.journal import Journal, RolloutState
from harness_rl.orchestrator.rewards import RewardFunction, score
from harness_rl.sessions.base import HarnessRolloutOutcome, RolloutFailure, SessionFactory

log = logging.getLogger(__name__)


@dataclass
class Rollout:
    """A finished group member."""

    rollout_id: str
    """Of the last attempt; its folder is RUN/rollouts/<rollout_id>."""
    group_id: str
    member: int
    attempts: int
    reward: float | None
    """None: no attempt could be scored. Not zero."""
    outcome: HarnessRolloutOutcome | None
    causes: list[Cause]
    """Of every failed attempt, in order."""
    seconds: float


def rollout_seed(*parts: object) -> int:
    """63 bits from what names a rollout's sampling: the same parts give the same seed in every run."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


@dataclass(frozen=True)
class RolloutRunner:
    """How rollouts of this run are made; shared by training, evaluation and warm-up."""

    factory: SessionFactory
    journal: Journal
    reward_function: RewardFunction | None
    max_retries: int
    reward_deadline_s: float = RewardSection().deadline_s
    retry_pause_s: float = 0.5
    """Mean of the jittered pause before a retry, so that a burst of failures does not come back as a burst."""

    async def run(
        self,
        row: dict[str, Any],
        *,
        group_id: str,
        member: int,
        seed: int,
        script: list[dict[str, Any]] | None = None,
        temperature: float | None = None,
    ) -> Rollout:
        """Never raises for a failed rollout; only cancellation passes through. `seed` fixes how its calls are sampled."""
        started = time.monotonic()
        causes: list[Cause] = []
        rollout_id = ""
        before = self.journal.attempts(group_id, member)  # of a process that died: an evaluation or a warm start is made again
        for attempt in range(self.max_retries + 1):
            number = before + attempt
            rollout_id = f"{group_id}-{member}" + (f"r{number}" if number else "")
            self.journal.open_rollout(rollout_id, group_id, member, number)
            try:
                outcome, reward = await self._attempt(row, seed, rollout_id, script, temperature)
            except RolloutFailure as failure:
                causes.append(failure.cause)
                self.journal.end_rollout(rollout_id, RolloutState.FAILED, cause=failure.cause, message=str(failure))
                log.warning("rollout %s: %s: %s", rollout_id, failure.cause, failure)
                if not failure.cause.retryable or attempt == self.max_retries:
                    break
                await asyncio.sleep(self.retry_pause_s * random.uniform(0.5, 1.5) * 2**attempt)
                continue
            except asyncio.CancelledError:
                self.journal.end_rollout(rollout_id, RolloutState.FAILED, cause=Cause.CANCELLED)
                raise
            self.journal.end_rollout(rollout_id, RolloutState.SCORED, reward=reward, turns=outcome.turns)
            return Rollout(rollout_id, group_id, member, attempt + 1, reward, outcome, causes, time.monotonic() - started)
        return Rollout(rollout_id, group_id, member, len(causes), None, None, causes, time.monotonic() - started)

    async def _attempt(
        self, row: dict[str, Any], seed: int, rollout_id: str, script: list[dict[str, Any]] | None, temperature: float | None
    ) -> tuple[HarnessRolloutOutcome, float]:
        try:
            session = await self.factory.create(row, seed, rollout_id, script=script, temperature=temperature)
            try:
                await session.run()
                outcome = session.outcome()
                if self.reward_function is None:
                    session.verify()  # says why, where the verdict is not valid
                return outcome, await score(outcome, self.reward_function, self.reward_deadline_s)
            finally:
                await session.close()
        except RolloutFailure:
            raise
        except Exception as error:
            log.exception("rollout %s failed in a way that has no name", rollout_id)
            raise RolloutFailure(Cause.INTERNAL, f"{type(error).__name__}: {error}") from error
