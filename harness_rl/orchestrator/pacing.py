"""When work starts, when a full batch closes and what is given up: decisions alone, from the times that the pacer is told.

A run and `harness-rl simulate` decide by this same code, each by its own clock. Invariant: no group starts that could only join a batch
whose policy is more than `max_staleness` steps ahead of the one that the engine serves; the rest makes that bound cheaper, never weaker.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from harness_rl.config import RolloutSection

SAMPLES = 64
"""Durations that an estimate is of: the newest."""
ENOUGH = 8
"""Durations below which there is no estimate, and work starts as soon as it may."""

TICK_S = 0.001
"""Shorter waits are none."""

Work = tuple[float, float]
"""Seconds from and to which something was sampled; to = infinity while it goes on."""


@dataclass
class Pacer:
    rollout: RolloutSection
    steps: int
    clock: Callable[[], float]
    version: int = 0
    """Optimizer steps in the weights that the engine serves."""
    trained: int = 0
    """Optimizer steps done."""
    delayed_s: float = 0.0
    """Time for which full batches were kept open."""
    _versions: list[tuple[float, int]] = field(default_factory=list)
    """(since, version) of what the engine served, in order."""
    _groups: dict[str, dict[int, Work]] = field(default_factory=dict)
    """Of each group under way, the work of each member that has started."""
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """Of groups, from their first member's start to their last one's end."""
    _usable: deque[bool] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """Of the same groups: whether they could be trained."""
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _step_began: float | None = None
    _full_since: float | None = None

    def __post_init__(self) -> None:
        self._versions.append((-math.inf, self.version))

    # -- what it is told ----------------------------------------------------------------------------------------------------------------

    def serves(self, version: int) -> None:
        if version != self.version:
            self._versions.append((self.clock(), version))
        self.version = version

    def step_began(self) -> None:
        """The learner has a batch to work on. Told again while it works on one, that is the next one's turn."""
        if self._step_began is None:
            self._step_began = self.clock()

    def step_ended(self, step: int, another_waits: bool) -> None:
        now = self.clock()
        if self._step_began is not None:
            self._step_seconds.append(now - self._step_began)
        self._step_began = now if another_waits else None
        self.trained = step

    def group_began(self, group_id: str) -> None:
        self._groups[group_id] = {}

    def member_began(self, group_id: str, member: int) -> None:
        self._groups[group_id][member] = (self.clock(), math.inf)

    def member_ended(self, group_id: str, member: int) -> None:
        self._groups[group_id][member] = (self._groups[group_id][member][0], self.clock())

    def group_ended(self, group_id: str, usable: bool) -> None:
        """All its members came to their end."""
        work = self._groups.pop(group_id)
        self._durations.append(self.clock() - min(began for began, _ in work.values()))
        self._usable.append(usable)

    def group_dropped(self, group_id: str) -> None:
        """It was given up, which says nothing about how long a group takes."""
        del self._groups[group_id]

    # -- what it decides ----------------------------------------------------------------------------------------------------------------

    def start_in(self, batch: int) -> float:
        """Seconds until a group may start that would join batch `batch` (from 0) at the latest; infinity: not before something changes."""
        if batch >= self.steps or batch - self.version > self.rollout.max_staleness:
            return math.inf
        if self.rollout.admission == "eager":
            return 0.0
        takes = self.batch_seconds
        early = 0.0 if takes is None else self.wanted_in(batch) - takes
        return early if early > TICK_S else 0.0

    @property
    def batch_seconds(self) -> float | None:
        """How long the groups of a batch take that start together; None before enough groups were seen.

        As long as the slowest, and as long again where groups without signal have to be replaced: a late batch makes the learner wait, an
        early one only ages.
        """
        if len(self._durations) < ENOUGH:
            return None
        return max(self._durations) * (1 if all(self._usable) else 2)

    def wanted_in(self, batch: int) -> float:
        """Seconds until the learner asks for batch `batch` (from 0), as its steps so far tell."""
        if not self._step_seconds:
            return 0.0
        step = sorted(self._step_seconds)[len(self._step_seconds) // 2]
        ahead = batch - self.trained
        if self._step_began is None:
            return ahead * step
        return max(0.0, self._step_began + step - self.clock()) + (ahead - 1) * step if ahead > 0 else 0.0

    def keep_open_for(self, batch: int) -> float:
        """Seconds for which the full batch `batch` (from 0) may be kept open, so that what would be too old for the next one joins it."""
        if self.stale_share(batch + 1) <= self.rollout.delay_stale_share:
            return 0.0
        now = self.clock()
        if self._full_since is None:
            self._full_since = now
        left = self._full_since + self.rollout.delay_s - now
        return left if left > TICK_S else 0.0

    def batch_closed(self) -> None:
        if self._full_since is not None:
            self.delayed_s += self.clock() - self._full_since
            self._full_since = None

    def given_up(self, batch: int) -> list[str]:
        """Groups under way of whose work no more than `min_fresh_share` could be trained even in batch `batch` (from 0), the next to close;
        all of them where the run has no such batch. Their place is worth more than they are."""
        if batch >= self.steps:
            return list(self._groups)
        limit = self.rollout.min_fresh_share
        return [name for name, work in self._groups.items() if work and 1 - self._stale_share(work.values(), batch) <= limit]

    def stale_share(self, batch: int) -> float:
        """Of all work under way, how much (by time) would be too old in batch `batch` (from 0)."""
        return self._stale_share([work for group in self._groups.values() for work in group.values()], batch)

    def _stale_share(self, work: Iterable[Work], batch: int) -> float:
        oldest = batch - self.rollout.max_staleness
        since = next((at for at, version in self._versions if version >= oldest), math.inf)
        now, stale, whole = self.clock(), 0.0, 0.0
        for began, ended in work:
            until = min(ended, now)
            whole += until - began
            stale += max(0.0, min(until, since) - began)
        return stale / whole if whole > 0 else 0.0
