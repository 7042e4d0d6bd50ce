"""What a simulated run is made of: how rollouts go, how long steps and updates take. Given by the config's [simulate], or read from a run.

Durations are of the machine that they were measured on. What engines, learners and sandboxes there are is the config's.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from harness_rl.config import SimulateSection

GIVEN_PLAYS = 512
"""Rollouts that are drawn from given distributions."""


@dataclass(frozen=True)
class Call:
    before_s: float
    """In the sandbox, since the call before it or since the rollout's start."""
    seconds: float
    """In an engine that has room for it."""
    tokens: int
    """Sampled."""


@dataclass(frozen=True)
class Play:
    """One rollout."""

    calls: tuple[Call, ...]
    after_s: float
    """From the last call's answer to the reward."""

    @property
    def tokens(self) -> int:
        return sum(call.tokens for call in self.calls)


@dataclass(frozen=True)
class Workload:
    plays: dict[str, list[Play]]
    """By task; a group's members are drawn from those of its task."""
    usable: float
    """Share of groups whose rewards differ."""
    step_s: list[float]
    """Of a learner that has a step for itself: its forward, backward and optimizer."""
    stopped_s: list[float]
    """Of updates: how long the engines stood."""
    probe_s: list[float]
    """Of updates: how long new calls were held beyond that."""
    calls_per_engine: float
    """Calls that one engine runs as fast as it ran these."""


def given(section: SimulateSection, seed: int) -> Workload:
    """Of the config alone. What one rollout takes and samples shares a log-normal factor of mean 1: long ones are long throughout."""
    draw = random.Random(f"{seed}/plays")
    plays = [_play(section, draw) for _ in range(GIVEN_PLAYS if section.spread or section.calls % 1 else 1)]
    return Workload(
        plays={"given": plays},
        usable=section.usable,
        step_s=[section.step_s],
        stopped_s=[section.stopped_s],
        probe_s=[section.probe_s],
        calls_per_engine=section.calls_per_engine,
    )


def _play(section: SimulateSection, draw: random.Random) -> Play:
    factor = math.exp(draw.gauss(-(section.spread**2) / 2, section.spread)) if section.spread else 1.0
    count = int(section.calls) + (draw.random() < section.calls % 1)
    calls = tuple(
        Call(
            before_s=section.start_s if number == 0 else section.gap_s * factor,
            seconds=section.call_s * factor,
            tokens=max(1, round(section.tokens_per_call * factor)),
        )
        for number in range(count)
    )
    return Play(calls, section.verify_s)
