"""A rollout whose loop is the user's `rollout_func`, as a session: called in a thread of its own with this rollout's one prompt.

Invariant: the trace that leaves this session trains what `rollout_func.py` has proven, or what the user vouches for, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness_rl.errors import Cause
from harness_rl.sessions.base import RolloutFailure, SessionServices
from harness_rl.sessions.capture import Capture
from harness_rl.sessions.chatclient import ChatClient
from harness_rl.sessions.environment_session import EnvironmentSession, EpisodeSpec, completion_ids
from harness_rl.sessions.environments import environment_failure, first_messages
from harness_rl.sessions.rewardfuncs import Sample
from harness_rl.sessions.rollout_func import BadRollout, BudgetSpent, RolloutFacade, RolloutFunc, proven, read_returned, trusted, unproven
from harness_rl.sessions.toolloop import Episode
from harness_rl.sessions.toolschema import tool_schema

if TYPE_CHECKING:
    from capture_proxy.trace import TrainingTrace


@dataclass(frozen=True)
class UsersLoop:
    function: RolloutFunc
    trainer: Any
    """What the function gets, with `generate` of each rollout put before it."""
    trust: bool


class RolloutFuncSession(EnvironmentSession):
    """Made by `EnvironmentSessionFactory.create`, like any other."""

    def __init__(self, spec: EpisodeSpec, capture: Capture, services: SessionServices, about: dict[str, Any], loop: UsersLoop) -> None:
        super().__init__(spec, capture, services, about)
        self._loop = loop
        self._result: Any = None
        self._version: str | None = None
        self._counts: dict[str, float] = {}

    async def _converse(self, policy: ChatClient) -> None:
        row = self.spec.row
        self._episode = Episode(first_messages(row, "data set row"))
        self._instance = await self.spec.kind.take()
        self._instance.watch.begin()

        async def generate(prompt: Any, tools: list[Any] | None) -> dict[str, Any]:
            return await self._generate(policy, prompt, tools)

        facade = RolloutFacade(self._loop.trainer, asyncio.get_running_loop(), generate)
        self._version = await self._served()
        try:
            async with asyncio.timeout(self.spec.episode_s):
                self._result = await self.instance.call(self._loop.function, [row["prompt"]], facade)
        except TimeoutError:
            self._timed_out = True
        except Exception as error:
            raise environment_failure(error, "rollout_func raised") from error
        if self._timed_out:
            limit = self.spec.episode_s
            raise RolloutFailure(Cause.WALL_CLOCK, f"rollout_func did not return within {limit:g} s (rollout.agent_timeout_s)")

    async def _generate(self, policy: ChatClient, prompt: Any, tools: list[Any] | None) -> dict[str, Any]:
        schemas = [tool if isinstance(tool, dict) else tool_schema(tool) for tool in tools or ()]
        answer = await policy.ask(first_messages({"prompt": prompt}, "generate"), schemas)
        if answer is None:
            raise BudgetSpent("the rollout's budget (tokens or calls) leaves nothing to sample")
        trace = await self._services.proxy.trace(self.capture.session_id)
        turn = next(turn for turn in trace.turns if turn.node_id == answer.node_id)
        return {
            "prompt_ids": turn.prompt_token_ids.tolist(),
            "completion_ids": turn.completion_token_ids.tolist(),
            "logprobs": turn.per_token_logps.tolist(),
            "text": answer.message.get("content") or "",
            "message": answer.message,
            "finish_reason": answer.finish_reason,
        }

    async def _served(self) -> str | None:
        version: str | None = (await self._services.proxy.health())["version"]
        return version

    async def _sample(self, trace: TrainingTrace) -> Sample:
        try:
            returned = read_returned(self._result)
            kept = await self._kept(trace, returned)
        except BadRollout as error:
            raise RolloutFailure(Cause.ENVIRONMENT, f"rollout_func: {error}") from error
        self._recount(trace, kept)
        self.capture.trace = kept
        spec = self.spec
        ids = returned[0].completion_ids.tolist() if len(returned) == 1 else completion_ids(kept)
        text = await self.instance.call(self._loop.trainer.processing_class.decode, ids, skip_special_tokens=True)
        prompt = spec.row["prompt"]
        return Sample(
            prompt=prompt,
            completion=text if isinstance(prompt, str) else [{"role": "assistant", "content": text}],
            completion_ids=ids,
            columns={**spec.row, **returned[0].extra},
            instance=self.instance,
            kind=spec.kind,
            trainer_state=spec.trainer_state,
        )

    async def _kept(self, trace: TrainingTrace, returned: Any) -> TrainingTrace:
        """The trace that is trained. Raises BadRollout."""
        found = proven(trace, returned)
        self._counts = {"rollout_func/unproven": float(found is None), "rollout_func/trusted": 0.0}
        if found is not None:
            return found
        if not self._loop.trust:
            if not trace.turns:
                raise BadRollout("it did not ask trainer.generate; set rollout.trust_rollout_func where its samples come from elsewhere")
            return unproven(trace)
        version = self._version if await self._served() == self._version else None  # else nobody knows which weights sampled it
        self._counts = {"rollout_func/unproven": float(version is None), "rollout_func/trusted": float(version is not None)}
        return trusted(returned, version, float(self._services.sampling.get("temperature", 1.0)))

    def _recount(self, captured: TrainingTrace, kept: TrainingTrace) -> None:
        """The proxy's counts know nothing of what is not trained after all."""
        if self.capture.status is None:
            return
        by_id = {turn.node_id: turn for turn in kept.turns}
        reasons = Counter(self.capture.status["calls_by_reason"])
        for turn in captured.turns:
            now = by_id.get(turn.node_id)
            if turn.loss_mask.any() and (now is None or not now.loss_mask.any()):
                reasons["trained"] -= 1
                reasons[str(now.metadata["mask_reason"] if now is not None else "unproven")] += 1
        self.capture.status = {**self.capture.status, "calls_by_reason": {name: count for name, count in reasons.items() if count}}

    def _metrics(self) -> dict[str, float]:
        return super()._metrics() | self._counts
