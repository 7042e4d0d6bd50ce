"""One capture session of the proxy as its owner sees it: minted, sealed once, its trace fetched, deleted.

Invariant: a trace is held here only when it is whole: sealed, with every turn that the proxy counted, from a proxy that was not started
again meanwhile. Otherwise `failure` says why there is none; nothing here raises for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from capture_proxy.client import CreatedSession, ProxyClient, ProxyError
from capture_proxy.reasons import Reason
from harness_rl.errors import Cause
from harness_rl.sessions.base import RolloutFailure, SessionServices

if TYPE_CHECKING:
    from capture_proxy.trace import TrainingTrace

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Capture:
    """`timeout_s` bounds each exchange with the proxy, the seal's own grace aside."""

    def __init__(self, created: CreatedSession, services: SessionServices, timeout_s: float) -> None:
        self.created = created
        self.trace: TrainingTrace | None = None
        self.failure: RolloutFailure | None = None
        """Why there is no trace."""
        self.status: dict[str, Any] | None = None
        """The proxy's final word on the session."""
        self.endpoint: dict[str, Any] | None = None
        """State of the engines, asked where the agent left a call without an answer: was there nobody to give one?"""
        self._services = services
        self._timeout_s = timeout_s
        self._grace_s = services.config.rollout.seal_grace_s
        self._proxy_restarts = services.proxy_restarts()
        self._lock = asyncio.Lock()

    @property
    def session_id(self) -> str:
        return self.created.session_id

    @property
    def api_key(self) -> str:
        return self.created.api_key

    async def seal(self) -> None:
        """Close the session and fetch its trace. Once; a failure is kept, not raised."""
        async with self._lock:
            if self.trace is not None or self.failure is not None:
                return
            proxy = self._services.proxy
            try:
                async with asyncio.timeout(self._grace_s + self._timeout_s):
                    status = self.status = await proxy.seal(self.session_id, grace_s=self._grace_s)
                    trace = await proxy.trace(self.session_id)
                    if status["calls_by_reason"].get(Reason.ABANDONED):
                        self.endpoint = await proxy.health()
                if len(trace.turns) != status["turns"]:
                    raise ValueError(f"it has {len(trace.turns)} turns, the sealed session {status['turns']}")
            except (ProxyError, TimeoutError) as error:
                self.failure = RolloutFailure(Cause.CAPTURE, f"the trace could not be fetched: {error or type(error).__name__}")
            except ValueError as error:
                self.failure = RolloutFailure(Cause.CAPTURE, f"the trace is not valid: {error}")
            else:
                if self._services.proxy_restarts() == self._proxy_restarts:
                    self.trace = trace
                else:  # calls that found nobody listening are in no log
                    self.failure = RolloutFailure(Cause.CAPTURE, "the capture proxy was started again during this rollout")

    async def delete(self) -> None:
        """Have the proxy forget the session; its log stays."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._services.proxy.delete(self.session_id)
        except (ProxyError, TimeoutError) as error:
            if getattr(error, "status", None) != 404:
                logger.warning("capture session %s was not deleted: %s", self.session_id, error or type(error).__name__)


async def mint(proxy: ProxyClient, **about: Any) -> CreatedSession:
    """A capture session; one that is minted while we are cancelled is deleted again. Raises RolloutFailure."""
    minting = asyncio.create_task(proxy.create_session(**about))
    try:
        await asyncio.wait({minting})
    except asyncio.CancelledError:
        with contextlib.suppress(ProxyError):
            await proxy.delete((await minting).session_id)
        raise
    try:
        return minting.result()
    except ProxyError as error:
        raise RolloutFailure(Cause.CAPTURE, f"no capture session: {error}") from error


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` (which must be bounded) to its end even when cancelled meanwhile; only then let the cancellation through."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and (failure := task.exception()):
            logger.error("clean-up failed: %s: %s", type(failure).__name__, failure)
        raise cancelled
    return task.result()


async def join(task: asyncio.Task[None]) -> None:
    """Wait for a task that others may wait for too: a cancelled waiter does not cancel it."""
    await asyncio.wait({task})
    task.result()
