"""Harbor trials as sessions, in this process: the unmodified agent in a local sandbox, all its model calls through the capture proxy.

The capture session is sealed when the agent has ended and before anything is graded, so nothing that grading does can be captured; the
agent's processes are killed and the verifier's folders emptied at the same point, so nothing that the agent left can touch the verdict.
However a session ends, its sandbox is gone and its capture session sealed when `run()` returns or raises, also by cancellation.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from capture_proxy.client import CreatedSession, handoff_listener
from harness_rl.errors import Cause
from harness_rl.sessions.base import HarnessRolloutOutcome, RolloutFailure, SessionServices, VerifyResult
from harness_rl.sessions.capture import Capture, uninterrupted
from harness_rl.sessions.causes import TrialFacts, classify, facts_of
from harness_rl.sessions.ending import EndingSession
from harness_rl.sessions.harbor_trial import TrialRun, TrialSpec
from harness_rl.sessions.outcome import build_outcome, rollout_record, write_record
from harness_rl.sessions.verdict import believed, judge, unpaid

if TYPE_CHECKING:
    from harness_rl.sandboxes.bubblewrap import Verification

SandboxHooks = Callable[..., AbstractContextManager[Any]]
"""`sandbox_hooks(on_listener=...)`: tells the sandbox that is made inside the block who takes over its one open port."""
TRIAL_FOLDER = "trial"
"""Harbor's own folder of the trial, inside the rollout's folder."""


class HarborSession(EndingSession):
    """One trial and its capture session. Made by `HarborSessionFactory.create` (harbor.py)."""

    def __init__(
        self, spec: TrialSpec, capture: CreatedSession, services: SessionServices, about: dict[str, Any], hooks: SandboxHooks
    ) -> None:
        super().__init__(spec.name, Capture(capture, services, spec.stop_timeout_s))
        self.spec = spec
        self._services = services
        self._about = about
        """What the rollout's record says of its origin: task, seed, harness."""
        self._trial = TrialRun(spec, self._agent_ended, partial(hooks, on_listener=self._hand_over))
        self._left: list[Verification] = []
        """What the agent of each step left running or planted where only the verifier may write."""
        self._facts: TrialFacts | None = None

    async def run(self) -> None:
        """Raises RolloutFailure when the rollout did not run or was not captured; a missing verdict is `verify`'s to raise."""
        started = time.monotonic()
        watch = asyncio.create_task(self._end_with_the_proxy(), name=f"proxy of {self.spec.name}")
        try:
            # What an attempt of the same name left when it was killed must not be taken for this one's.
            await asyncio.to_thread(shutil.rmtree, self.spec.trials_dir, ignore_errors=True)
            await self._trial.run()
        except RolloutFailure as failure:
            self._failure = failure
        except asyncio.CancelledError:
            self._failure = RolloutFailure(Cause.CANCELLED, f"stopped during {self._trial.phase}")
            raise
        finally:
            watch.cancel()
            self._about["wall_s"] = round(time.monotonic() - started, 3)
            await uninterrupted(self._settle())
        if self._failure is not None:
            raise self._failure

    def outcome(self) -> HarnessRolloutOutcome:
        """Trace and verdict; `env_reward` is None where there is no valid verdict. Raises RolloutFailure without a trace."""
        trace = self.fetch_training_trace()
        verdict = self._verdict if isinstance(self._verdict, VerifyResult) else VerifyResult(env_reward=None)
        outcome = build_outcome(trace, verdict, self._facts or TrialFacts())
        outcome.metrics["tampered"] = float(any(found.tampered for found in self._left))
        return outcome

    async def _close(self) -> None:
        await self._trial.halt()
        await self._settle()
        await self.capture.delete()

    async def _hand_over(self, sock: socket.socket) -> None:
        """Give the listener that the sandbox opened to the proxy, for this session alone; our copy is closed once it is not in use."""
        services = self._services
        with sock:
            await uninterrupted(handoff_listener(services.handoff_socket, services.proxy.admin_key, self.capture.session_id, sock))

    async def _end_with_the_proxy(self) -> None:
        """An agent whose capture route is gone would only wait for its own time limit."""
        await self._services.proxy_died()
        if self.capture.trace is None:
            self._trial.abort(RolloutFailure(Cause.CAPTURE, "the capture proxy died during this rollout"))

    async def _agent_ended(self, environment: Any, last: bool) -> None:
        """Between agent and grading. Never raises: a failure here ends the trial with its own name instead of becoming one of Harbor's."""
        try:
            async with asyncio.timeout(self.spec.stop_timeout_s):
                found = await environment.before_verification(keep_services=self.spec.keep_services)
        except (OSError, RuntimeError) as error:  # TimeoutError is an OSError, the sandbox's errors are RuntimeErrors
            self._trial.abort(RolloutFailure(Cause.SANDBOX_LOST, f"before grading: {type(error).__name__}: {error}"))
        else:
            self._left.append(found)
        if last:
            await self.capture.seal()
            if self.capture.failure is not None:
                self._trial.abort(self.capture.failure)

    async def _settled(self) -> None:
        await self.capture.seal()
        folder = self.spec.trials_dir
        if self._trial.ended and self.spec.trial_dir.is_dir():
            self.spec.trial_dir.rename(folder / TRIAL_FOLDER)
        result, section = self._trial.result, self._services.config.reward
        if result is not None:
            turns = len(self.capture.trace.turns) if self.capture.trace else 0
            self._facts = facts_of(result, self.capture.status or {}, turns, self.capture.endpoint)
            self._failure = self._failure or self._run_failure(self._facts)
            who = f"rollout {self.spec.name}: its agent"
            try:
                if self._failure is not None:
                    raise self._failure
                verdict = judge(self._facts, folder / TRIAL_FOLDER, self._trial.steps, section.key)
                self._verdict = believed(verdict, self._left, self._trial.shared_verifier, section.tampered, who)
            except RolloutFailure as failure:
                self._ungraded(failure, who)
        elif self._failure is None:
            self._failure = RolloutFailure(Cause.CANCELLED, "closed before it ran")
        try:
            await asyncio.to_thread(write_record, folder, self._record(), self.capture.trace)
        except OSError as error:
            self._failure = self._failure or RolloutFailure(Cause.INTERNAL, f"{folder}: the rollout's record could not be written: {error}")

    def _ungraded(self, failure: RolloutFailure, who: str) -> None:
        """There is no verdict: the agent's own doing, which pays nothing, or what `run` or `verify` raises."""
        try:
            if self.capture.trace is None:
                raise failure
            self._verdict = unpaid(failure, self._left, who)
        except RolloutFailure:
            self._verdict = failure if self._failure is None else None
        else:
            self._failure = None
            self._about["ungraded"] = failure.message

    def _run_failure(self, facts: TrialFacts) -> RolloutFailure | None:
        """A sandbox or an agent that never came up explains a missing trace, not the other way round."""
        if facts.agent_started and self.capture.failure is not None:
            return self.capture.failure
        return classify(facts)

    def _record(self) -> dict[str, Any]:
        failure = self._failure or (self._verdict if isinstance(self._verdict, RolloutFailure) else None)
        outcome = self.outcome() if self.capture.trace is not None else None
        about = {**self._about, "left_by_agent": [asdict(found) for found in self._left]}
        return rollout_record(about, outcome, failure, result=self._trial.result, status=self.capture.status)
