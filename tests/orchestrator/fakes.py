"""A session factory whose rollouts are made by a function; traces are real `TrainingTrace`s of two sampled tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capture_proxy.trace import TrainingTrace, hash_ids, hash_sample
from harness_rl.sessions.base import HarnessRolloutOutcome, VerifyResult
from harness_rl.tasks.load import read_task, solution_commands


def trace(version: str = "t-0", prompt: tuple[int, ...] = (1, 2), completion: tuple[int, ...] = (3, 4)) -> TrainingTrace:
    logps = [-0.5] * len(completion)
    mask = [1] * len(completion)
    return TrainingTrace.model_validate(
        {
            "schema_version": 1,
            "turns": [
                {
                    "node_id": "n0",
                    "prompt_token_ids": list(prompt),
                    "completion_token_ids": list(completion),
                    "per_token_logps": logps,
                    "loss_mask": [0] * len(prompt) + mask,
                    "request": {},
                    "response": {},
                    "metadata": {
                        "parent": None,
                        "branch": 0,
                        "role": "agent",
                        "origin": "sampled",
                        "mask_reason": None,
                        "sampling": {"temperature": 1.0},
                        "weight_versions": [[version, 0, len(completion)]],
                        "prompt_hash": hash_ids(prompt),
                        "completion_hash": hash_ids(completion),
                        "sample_hash": hash_sample(completion, logps, mask),
                    },
                }
            ],
        }
    )


def outcome(reward: float | None, **fields: Any) -> HarnessRolloutOutcome:
    values: dict[str, Any] = {
        "env_reward": reward,
        "completion": [],
        "trace": trace(),
        "tool_call_count": 1,
        "tool_failure_count": 0,
        "tool_calls_by_name": {"bash": 1},
        "timed_out": False,
        "turns": 1,
    }
    return HarnessRolloutOutcome(**values | fields)


@dataclass
class FakeSession:
    play: Callable[[], Awaitable[HarnessRolloutOutcome]]
    factory: FakeFactory
    found: HarnessRolloutOutcome | None = None

    async def run(self) -> None:
        self.found = await self.play()

    def fetch_training_trace(self) -> TrainingTrace:
        return self.outcome().trace

    def verify(self, transcript: list[dict[str, Any]] | None = None) -> VerifyResult:
        return VerifyResult(self.outcome().env_reward)

    def outcome(self) -> HarnessRolloutOutcome:
        assert self.found is not None
        return self.found

    async def close(self) -> None:
        self.factory.open -= 1


@dataclass
class FakeFactory:
    """`play(task, episode_id)` gives the outcome, or raises."""

    play: Callable[[dict[str, Any], str], Awaitable[HarnessRolloutOutcome]]
    open: int = 0
    most_open: int = 0
    episodes: list[str] = field(default_factory=list)
    seeds: dict[str, int] = field(default_factory=dict)
    """Of each episode."""

    def prompt_rows(self) -> list[dict[str, Any]]:
        return [{"prompt": f"task {n}", "task_name": f"t{n}"} for n in range(3)]

    def identity(self) -> dict[str, Any]:
        return {"harness": "fake"}

    def demonstration(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"content": solution_commands(read_task(Path(task["task_path"])))}]

    def bind(self, services: Any) -> None:
        pass

    async def create(self, task: dict[str, Any], seed: int, episode_id: str, **_: Any) -> FakeSession:
        await asyncio.sleep(0)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.episodes.append(episode_id)
        self.seeds[episode_id] = seed
        return FakeSession(lambda: self.play(task, episode_id), self)
