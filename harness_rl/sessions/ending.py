"""How every session ends: settled once, closed once, and asked for its trace and its verdict afterwards.

Invariant: whoever asks first, `run()` or `close()`, sealing and the record happen once, and neither is cut short by a cancellation.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from harness_rl.errors import Cause
from harness_rl.sessions.base import RolloutFailure, VerifyResult
from harness_rl.sessions.capture import Capture, join, uninterrupted

if TYPE_CHECKING:
    from capture_proxy.trace import TrainingTrace


class EndingSession(ABC):
    """What the kinds of sessions share. `name` is the rollout's."""

    def __init__(self, name: str, capture: Capture) -> None:
        self.capture = capture
        self._name = name
        self._failure: RolloutFailure | None = None
        self._verdict: VerifyResult | RolloutFailure | None = None
        self._settling: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def fetch_training_trace(self) -> TrainingTrace:
        """The sealed trace. Raises RolloutFailure where there is none."""
        if self.capture.trace is None:
            raise self.capture.failure or RolloutFailure(Cause.CAPTURE, "the session has not run")
        return self.capture.trace

    def verify(self, transcript: list[dict[str, Any]] | None = None) -> VerifyResult:
        """The verdict that was given during `run` (the transcript is not consulted). Raises RolloutFailure."""
        verdict = self._verdict or self._failure or RolloutFailure(Cause.VERIFIER, "the session has not run")
        if isinstance(verdict, RolloutFailure):
            raise verdict
        return verdict

    async def close(self) -> None:
        """Release everything that the session holds. Idempotent and bounded."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close {self._name}")
        await uninterrupted(join(self._closing))

    async def _settle(self) -> None:
        if self._settling is None:
            self._settling = asyncio.create_task(self._settled(), name=f"settle {self._name}")
        await join(self._settling)

    @abstractmethod
    async def _settled(self) -> None:
        """Seal, decide what the rollout came to, and write its record."""

    @abstractmethod
    async def _close(self) -> None:
        """Settle, and let go of everything."""
