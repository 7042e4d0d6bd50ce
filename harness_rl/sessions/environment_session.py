"""A white-box episode as a session: the loop runs in this process, its model calls go through the capture proxy like any agent's.

Invariant: the capture session is sealed before anything is scored, and the environment is asked for its reward before it may be reset.
However the session ends, its capture session is sealed and its record written when `run()` returns or raises; its environment goes back to
the pool only after a whole episode.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness_rl.errors import Cause
from harness_rl.sessions.base import HarnessRolloutOutcome, RolloutFailure, SessionServices, StopReason, VerifyResult
from harness_rl.sessions.capture import Capture, uninterrupted
from harness_rl.sessions.causes import TrialFacts
from harness_rl.sessions.chatclient import ChatClient
from harness_rl.sessions.ending import EndingSession
from harness_rl.sessions.environments import EnvironmentKind, Instance, begun, tools_of
from harness_rl.sessions.outcome import build_outcome, rollout_record, used_turns, write_record
from harness_rl.sessions.rewardfuncs import Sample, Scored, WeightedReward, score_sample
from harness_rl.sessions.toolloop import Episode, Message, play

if TYPE_CHECKING:
    from capture_proxy.trace import TrainingTrace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeSpec:
    """What an episode is made of."""

    name: str
    row: Mapping[str, Any]
    """The data set row."""
    columns: Mapping[str, Any]
    """What of it `reset` gets."""
    kind: EnvironmentKind
    rewards: Sequence[WeightedReward]
    trainer_state: Any
    max_calls: int
    """Answers; 0 = no such limit."""
    episode_s: float
    """Wall clock of the conversation: model and tools."""
    deadline_s: float
    """Wall clock of everything: reset and rewards too."""


class EnvironmentSession(EndingSession):
    """One episode. Made by `EnvironmentSessionFactory.create` (environment_factory.py)."""

    def __init__(self, spec: EpisodeSpec, capture: Capture, services: SessionServices, about: dict[str, Any]) -> None:
        super().__init__(spec.name, capture)
        self.spec = spec
        self._services = services
        self._about = about
        self._folder = services.rollouts_dir / spec.name
        self._instance: Instance | None = None
        self._episode: Episode | None = None
        self._scored: Scored | None = None
        self._seconds: dict[str, float] = {}
        self._timed_out = False
        self._whole = False
        """The episode came to its end and its environment was asked for everything: it may be reset."""

    async def run(self) -> None:
        """Raises RolloutFailure when the episode did not run or was not captured; a missing reward is `verify`'s to raise."""
        started = time.monotonic()
        try:
            # What an attempt of the same name left when it was killed must not be taken for this one's.
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            async with asyncio.timeout(self.spec.deadline_s):
                await self._run()
        except TimeoutError:
            self._failure = RolloutFailure(Cause.WALL_CLOCK, f"not over after {self.spec.deadline_s:g} s (rollout.deadline_s)")
        except RolloutFailure as failure:
            self._failure = failure
        except asyncio.CancelledError:
            self._failure = RolloutFailure(Cause.CANCELLED, "stopped during the episode")
            raise
        except Exception as error:
            logger.exception("episode %s failed in a way that has no name", self.spec.name)
            self._failure = RolloutFailure(Cause.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            self._about["wall_s"] = round(time.monotonic() - started, 3)
            await uninterrupted(self._settle())
        if self._failure is not None:
            raise self._failure

    def outcome(self) -> HarnessRolloutOutcome:
        """Trace and verdict; `env_reward` is None where there is no valid reward. Raises RolloutFailure without a trace."""
        trace = self.fetch_training_trace()
        verdict = self._verdict if isinstance(self._verdict, VerifyResult) else VerifyResult(None, self._metrics())
        outcome = build_outcome(trace, verdict, TrialFacts())
        episode = self._episode
        if episode is None:
            return outcome
        cut = outcome.truncated or episode.truncated
        return replace(
            outcome,
            metrics={**outcome.metrics, "rollout/truncated": float(cut)},
            completion=episode.messages,
            tool_call_count=episode.calls.total(),
            tool_failure_count=episode.failures.total(),
            tool_calls_by_name=dict(episode.calls),
            timed_out=self._timed_out,
            stop_reason=(StopReason.AGENT_TIMEOUT if self._timed_out else episode.stop).value,
        )

    async def _run(self) -> None:
        async with ChatClient(self.capture.created, self._services.model) as policy:
            await self._converse(policy)
        if self.instance.busy:
            limit = self.spec.episode_s
            raise RolloutFailure(Cause.WALL_CLOCK, f"a tool call did not return within {limit:g} s (rollout.agent_timeout_s)")
        await self.capture.seal()
        sample = await self._sample(self.fetch_training_trace())
        with _timed(self._seconds, "env/reward_s"):
            self._verdict = await self._score(sample)
        self._whole = not self.instance.busy

    async def _converse(self, policy: ChatClient) -> None:
        """The episode's conversation, to its end or its time limit."""
        spec = self.spec
        with _timed(self._seconds, "env/reset_s"):
            prompt = await self._reset()
        self._episode = Episode(prompt)
        try:
            async with asyncio.timeout(spec.episode_s):
                await play(policy, self._episode, tools_of(self.instance, spec.kind), spec.kind.schemas, spec.max_calls)
        except TimeoutError:
            self._timed_out = True

    @property
    def instance(self) -> Instance:
        assert self._instance is not None, "set by _reset, before anything else"
        return self._instance

    async def _reset(self) -> list[Message]:
        """The first messages, with what a fresh environment shows."""
        self._instance = await self.spec.kind.take()
        return await begun(self._instance, self.spec.kind, self.spec.row, self.spec.columns)

    async def _sample(self, trace: TrainingTrace) -> Sample:
        """What reward functions see. Raises RolloutFailure for an episode without one model call."""
        spec, episode = self.spec, self._episode
        assert episode is not None, "set by _converse"
        if not trace.turns:
            raise RolloutFailure(Cause.NO_MODEL_CALL, f"no model call was captured ({_ended(episode, self._timed_out)})")
        return sample_of(spec.row, episode, self.instance, spec.kind, completion_ids(trace), spec.trainer_state)

    async def _score(self, sample: Sample) -> VerifyResult | RolloutFailure:
        try:
            self._scored = await score_sample(self.spec.rewards, sample)
        except RolloutFailure as failure:
            if failure.cause is Cause.ENVIRONMENT_LOST:
                raise
            return failure
        if self._scored.reward is None:
            return RolloutFailure(Cause.REWARD_NONE, "no reward function applies to it: each returned None")
        return VerifyResult(self._scored.reward, self._metrics())

    def _metrics(self) -> dict[str, float]:
        """In the names of a step's metrics line, where each becomes a mean (see `stepmetrics`)."""
        metrics = dict(self._seconds)
        if self._scored is not None:
            metrics |= {f"rewards/{name}": value for name, value in self._scored.parts.items()}
            metrics |= {f"log/{name}": value for name, value in self._scored.logged.items()}
        if self._episode is not None:
            metrics["completions/clipped_ratio"] = float(self._episode.truncated)
            metrics["tools/loop_exhausted_frac"] = float(self._episode.exhausted)
            metrics["tools/unknown_name"] = float(self._episode.unknown)
            if self._episode.calls:
                metrics["tools/latency_s"] = self._episode.tool_seconds / self._episode.calls.total()
        return metrics

    async def _settled(self) -> None:
        await self.capture.seal()
        if self._failure is None and self._verdict is None:
            self._failure = RolloutFailure(Cause.CANCELLED, "closed before it ran")
        try:
            await asyncio.to_thread(write_record, self._folder, self._record(), self.capture.trace)
        except OSError as error:
            words = f"{self._folder}: the rollout's record could not be written: {error}"
            self._failure = self._failure or RolloutFailure(Cause.INTERNAL, words)

    async def _close(self) -> None:
        await self._settle()
        if self._instance is not None:
            if self._whole:
                self.spec.kind.put(self._instance)
            else:
                await self._instance.retire()
            self._instance = None
        await self.capture.delete()

    def _record(self) -> dict[str, Any]:
        failure = self._failure or (self._verdict if isinstance(self._verdict, RolloutFailure) else None)
        outcome = self.outcome() if self.capture.trace is not None else None
        about = self._about
        if self._scored is not None and self._scored.extra:
            about = {**about, "extra": json.loads(json.dumps(self._scored.extra, default=str))}
        return rollout_record(about, outcome, failure, status=self.capture.status)


def sample_of(
    row: Mapping[str, Any], episode: Episode, instance: Instance, kind: EnvironmentKind, ids: list[int], trainer_state: Any = None
) -> Sample:
    """What reward functions see of an episode that is over."""
    text = isinstance(row.get("prompt"), str)
    return Sample(
        prompt=_text(episode.prompt[-1:]) if text else episode.prompt,
        completion=_text(episode.completion) if text else [parsed(message) for message in episode.completion],
        completion_ids=ids,
        columns=row,
        instance=instance,
        kind=kind,
        trainer_state=trainer_state,
    )


def completion_ids(trace: TrainingTrace) -> list[int]:
    """All ids after the first prompt of the last branch: what the policy said and what tools answered."""
    used = used_turns(trace)
    if not used:
        return []
    last = first = used[-1]
    by_id = {turn.node_id: turn for turn in trace.turns}
    while (parent := by_id.get(str(first.metadata.get("parent")))) is not None:
        first = parent
    ids = [*last.prompt_token_ids.tolist(), *last.completion_token_ids.tolist()]
    return ids[len(first.prompt_token_ids) :]


def parsed(message: Message) -> Message:
    """A message as TRL shows it: a tool call's arguments are an object, where the policy wrote one."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in message["tool_calls"]]}


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _text(messages: Sequence[Message]) -> str:
    """What a conversation's assistant (or only) messages say, for prompts that are plain texts."""
    contents = [message.get("content") for message in messages if message["role"] != "tool"]
    return "".join(content for content in contents if isinstance(content, str))


def _ended(episode: Episode, timed_out: bool) -> str:
    if timed_out:
        return "the time limit passed first"
    return "its prompt does not fit the model's context" if episode.truncated else "the policy was not asked"


class _timed:
    """Adds the seconds of a block to `into[name]`, also when it raises."""

    def __init__(self, into: dict[str, float], name: str) -> None:
        self._into, self._name = into, name

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._into[self._name] = self._into.get(self._name, 0.0) + time.monotonic() - self._started
