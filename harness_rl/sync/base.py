"""Weight sync: one protocol for every transport, each step with a deadline, and never a resume on weights that are not whole.

    pause(mode) -> start -> update || broadcast -> finish(version) -> read the version back -> reset_prefix_cache -> resume -> probe

The prefix cache is reset only after `finish`, because blocks filled before it would belong to no policy. A failure before `resume` leaves
the engines paused; a failed probe pauses them again. What is sampled between resume and a passed probe is `unproven` (the proxy's part).

What becomes of running calls is the mode's: `keep` freezes them, and they go on under the new weights; `wait` lets them end, and aborts
those that take too long; `abort` ends them with what they have, and the proxy asks for the rest under the new weights. What becomes of
their history's keys and values is `kv`: recomputed under the new weights, or kept (then cached blocks are told apart by the proxy's salt).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from harness_rl.sync.client import EngineClient, PauseMode, StepLate, SyncFailed
from harness_rl.sync.everywhere import GRACE_S, Calls, everywhere
from harness_rl.sync.load import Load
from harness_rl.sync.verify import LogprobProbe, Proof, Score, WeightProofFailed, prove

T = TypeVar("T")


class WeightSender(Protocol):
    """One transport. `push` runs between `start` and `finish`: it brings every tensor of every engine to the learner's."""

    def connect(self, engines: Sequence[EngineClient]) -> None: ...

    def push(self, engines: Sequence[EngineClient]) -> dict[str, float]:
        """Returns what it counted, for the report."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class StopPolicy:
    """What an update does to what runs."""

    mode: PauseMode = "keep"
    kv: Literal["recompute", "keep"] = "recompute"
    wait_s: float = 60.0
    """Under `wait`: how long running calls have to end before they are aborted."""


@dataclass
class SyncReport:
    version: str
    proof: Proof
    seconds: dict[str, float] = field(default_factory=dict)
    """pause, transfer, finish, probe; `stopped` is the time from the first pause, or from when the engines were put to sleep, to the last
    resume."""
    counts: dict[str, float] = field(default_factory=dict)
    """Where the servers tell: `running` calls at the stop; `cut`, those of them that were aborted; `recomputed_tokens`, of their histories,
    to be read again under the new weights (rounded up to blocks). And what the sender counted."""
    adapter: str | None = None
    """The name under which the engines have this policy; None: it is their own model."""


class WeightSync:
    """Brings every engine to the learner's weights and proves it. Connects on first use, and again after an engine was restarted."""

    def __init__(
        self, engines: Sequence[EngineClient], sender: WeightSender, probe: LogprobProbe, score: Score, policy: StopPolicy | None = None
    ) -> None:
        self._engines, self._sender, self._probe, self._score = engines, sender, probe, score
        self._policy = policy or StopPolicy()
        self._version: str | None = None
        """What the engines were last brought to; None before the first sync."""
        self._asleep = False
        self._rested_at: float | None = None
        """When the engines were put to sleep, until they sample again."""

    def sync(self, version: str, prompts: list[NDArray[np.int32]]) -> SyncReport:
        """Raises SyncFailed or WeightProofFailed; then no engine samples on, and the next sync connects anew."""
        connected, self._version = self._version, None
        clock: dict[str, float] = {}
        self._everywhere("health", lambda engine: engine.wait_healthy())
        if connected is None or set(self._everywhere("version", lambda engine: engine.version())) != {connected}:
            # First use, or an engine was started anew: what it was connected with died with it.
            self._sender.close()
            self._sender.connect(self._engines)
        running = self._running()
        stop_began = time.perf_counter() if self._rested_at is None else self._rested_at
        with timed(clock, "pause"):
            counts = self._pause(running)
        with timed(clock, "transfer"):
            self._wake("weights")
            self._everywhere("start", lambda engine: engine.start_update())
            counts |= self._sender.push(self._engines)
        with timed(clock, "finish"):
            self._everywhere("finish", lambda engine: engine.finish_update(version))
            self._everywhere("version", lambda engine: _check_version(engine, version))
            if self._policy.kv == "recompute":
                self._everywhere("reset_prefix_cache", lambda engine: engine.reset_prefix_cache())
            self._wake("kv_cache")
            self._asleep = False
            self._everywhere("resume", lambda engine: engine.resume())
        self._rested_at = None
        clock["stopped"] = time.perf_counter() - stop_began
        with timed(clock, "probe"):
            proof = self.prove(version, prompts)
        self._version = version
        return SyncReport(version, proof, clock, counts)

    def rest(self) -> None:
        """Give the engines' memory to the learner until the next `sync` (they share one GPU). Raises SyncFailed."""
        self._rested_at = time.perf_counter()
        self._everywhere("sleep", lambda engine: engine.sleep(self._policy.mode))
        self._asleep = True

    def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        if self._asleep:
            self._everywhere("wake", lambda engine: engine.wake(part))

    def _pause(self, running: _Running) -> dict[str, float]:
        """Nothing samples any more. `running`: what did. Returns the sync's counts."""
        policy, clear = self._policy, self._policy.kv == "recompute"
        cut: float | None = 0.0
        if self._asleep:
            return {}
        if policy.mode != "wait":
            self._everywhere("pause", lambda engine: engine.pause(policy.mode, clear))
            cut = running.calls if policy.mode == "abort" else 0.0
        elif not self._drain(clear):
            running = self._running()
            self._everywhere("pause", lambda engine: engine.pause("abort", clear))
            cut = running.calls
        else:
            running = _Running(0.0, 0.0)
        counts = {"running": running.calls, "cut": cut, "recomputed_tokens": running.tokens if clear else 0.0}
        return {name: value for name, value in counts.items() if value is not None}

    def _running(self) -> _Running:
        return _Running.of(self._everywhere("load", lambda engine: engine.load()))

    def _drain(self, clear: bool) -> bool:
        """Whether all running calls ended in time."""
        wait_s = self._policy.wait_s
        try:
            self._everywhere("drain", lambda engine: engine.pause("wait", clear, wait_s), wait_s)
        except StepLate:
            return False
        return True

    def prove(self, version: str, prompts: list[NDArray[np.int32]]) -> Proof:
        """As `verify.prove`; a failure stops all engines."""
        try:
            return prove(self._engines, self._probe, self._score, version, prompts)
        except (WeightProofFailed, SyncFailed):
            self._stop()
            raise

    def _stop(self) -> None:
        """Every engine that still answers samples no more."""
        deadline = time.monotonic() + max(engine.timeout_s for engine in self._engines) + GRACE_S
        Calls("pause", self._engines, lambda engine: engine.pause("keep", True)).start().settle(deadline)

    def _everywhere(self, step: str, call: Callable[[EngineClient], T], timeout_s: float | None = None) -> list[T]:
        """Run `call` for all engines at once; the first failure names the step."""
        return everywhere(step, self._engines, call, timeout_s)

    def close(self) -> None:
        self._sender.close()
        for engine in self._engines:
            engine.close()


@dataclass(frozen=True)
class _Running:
    """What samples on all engines together; None where one does not tell."""

    calls: float | None
    tokens: float | None

    @classmethod
    def of(cls, loads: Sequence[Load]) -> _Running:
        calls, tokens = [load.running for load in loads], [load.kv_tokens for load in loads]
        return cls(
            None if None in calls else float(sum(n for n in calls if n is not None)),
            None if None in tokens else float(sum(n for n in tokens if n is not None)),
        )


def _check_version(engine: EngineClient, version: str) -> None:
    found = engine.version()
    if found != version:
        raise SyncFailed(f"engine {engine.url} says it has weights {found!r} after {version!r} was finished")


@contextmanager
def timed(clock: dict[str, float], name: str) -> Iterator[None]:
    """Write the block's seconds under `name`, if it ends well."""
    began = time.perf_counter()
    yield
    clock[name] = time.perf_counter() - began
