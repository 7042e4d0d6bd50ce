"""What a run tells while it goes: one live `RunState` for panels and one JSON line a step for everything else.

`RunState` is written by the orchestrator alone and read by anything that draws; no number in it is computed by a reader.
Metric names follow TRL's (`reward`, `rewards/<fn>/mean`, `rollout/*`, `tools/*`) and each is written by its full name, so that its meaning
and its reduction are never guessed from the name.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Metric(StrEnum):
    """Names in a metrics line that somebody reads again; TRL's where TRL has one. All are of one step.

    Open families: `rows/<RowState>` and `calls/<Reason>` count, `tokens/<kind>` counts, `perf/<part>_s` are seconds;
    `sample/stale_share/task/<task>` and `/<quarter by duration>` are shares of the tokens that could train; `mismatch/<cause>/*` are engine
    against learner.
    """

    STEP = "step"
    REWARD = "reward"
    """Mean over all scored rollouts, before groups are filtered."""
    REWARD_STD = "reward_std"
    """Population standard deviation over the same rollouts."""
    REWARD_TRAINED = "reward_trained"
    """Mean over the rollouts of the groups that were trained."""
    SCORED = "rollout/scored"
    """How many rollouts `reward` is the mean of."""
    GENERATED_TOK_S = "rollout/generated_tok_s"
    """Tokens sampled by the engine per second of wall clock."""
    TRAINED_TOK_S = "perf/trained_tok_s_wall_clock"
    STALENESS = "sample/staleness_mean"
    """Optimizer steps between sampling and training, mean over trained tokens."""
    STALENESS_MAX = "sample/staleness_max"
    STEP_SECONDS = "perf/step_s"
    """Wall clock of the whole step; the other `perf/<part>_s` are parts and may overlap."""


@dataclass
class RunState:
    """A snapshot of a run, for people. Times are `time.monotonic()` seconds unless said otherwise."""

    name: str
    total_steps: int
    phase: str = "starting"
    """starting, eval, warm-up, training, stopping, done, failed"""
    step: int = 0
    """Optimizer steps done."""
    version: str = ""
    """The policy version that the engine serves."""
    started_at: float = field(default_factory=time.monotonic)
    training_since: float | None = None
    rollouts_running: int = 0
    rollouts_done: int = 0
    rollouts_failed: Counter[str] = field(default_factory=Counter)
    """By `Cause`."""
    groups_ready: int = 0
    groups_zero_variance: int = 0
    sandboxes: int = 0
    engine: str = "starting"
    """starting, ready, paused, restarting, stopped"""
    learner: str = "starting"
    """starting, waiting, training, syncing, stopped"""
    holding: bool = False
    """The proxy holds new calls because weights are being replaced."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward over all scored rollouts of each finished step."""
    last: dict[str, float] = field(default_factory=dict)
    """The newest metrics line."""
    evals: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """label -> mean, low, high (95 % interval)."""
    messages: list[str] = field(default_factory=list)
    """The newest last; what a plain log prints as lines."""

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end, from the pace so far; None before the first step."""
        if self.training_since is None or self.step == 0:
            return None
        pace = (time.monotonic() - self.training_since) / self.step
        return pace * (self.total_steps - self.step)

    def say(self, message: str) -> None:
        self.messages.append(message)


class MetricsLog:
    """`metrics.jsonl`: one strict JSON line a step, flushed, so that a killed run keeps what it had."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def take_back(self, step: int) -> list[dict[str, Any]]:
        """Forget the lines of steps after `step`, which were not kept in a checkpoint; returns those that stay."""
        if not self._path.exists():
            return []
        lines = [line for line in read_metrics(self._path) if line[Metric.STEP] <= step]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        temporary.replace(self._path)
        return lines

    def write(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(strict_json(dict(line)), allow_nan=False)
        with self._path.open("a") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; a torn last line is left out."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    items = list(values)
    return sum(items) / len(items) if items else math.nan


def std(values: Iterable[float]) -> float:
    """Population standard deviation; NaN of nothing."""
    items = list(values)
    if not items:
        return math.nan
    centre = mean(items)
    return math.sqrt(sum((item - centre) ** 2 for item in items) / len(items))


def wilson_interval(successes: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a share (Wilson 1927); (0, 1) of nothing."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of rewards: Wilson's where all are from 0 to 1, else the normal one (NaN of fewer than two)."""
    if all(0.0 <= value <= 1.0 for value in values):
        return wilson_interval(sum(values), len(values))
    if len(values) < 2:
        return math.nan, math.nan
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def strict_json(value: Any) -> Any:
    """NaN and infinity as None: JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return value
