"""Why an agent gets an error instead of an answer, independent of its dialect.

Invariant: whatever a client may usefully repeat says when.
"""

from __future__ import annotations

from capture_proxy.reasons import Reason
from capture_proxy.store import StoreError
from capture_proxy.upstream import EngineError, EngineRefused, EngineUnavailable

CONTEXT_FULL = "context_length_exceeded"


class CallRefused(Exception):
    """The call gets an error instead of an answer."""

    def __init__(self, status: int, code: str | None, message: str, reason: Reason, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.reason = reason
        self.retry_after_s = retry_after_s


def conversation_over(why: str) -> CallRefused:
    """A limit of the session, told as a full context: what a client can do about either is to stop or to compact.

    Some know it by its code, and litellm by these words alone: without them stock mini-swe-agent asks on for minutes.
    """
    text = f"This model's maximum context length is used up: this conversation is over: {why}"
    return CallRefused(400, CONTEXT_FULL, text, Reason.LIMIT)


def refusal_of(error: EngineError | StoreError) -> CallRefused:
    """What the agent is told when the engine or the store failed its call."""
    if isinstance(error, EngineRefused) and error.context_full:
        return CallRefused(400, CONTEXT_FULL, str(error), Reason.LIMIT)
    if isinstance(error, EngineRefused):
        return CallRefused(400, None, str(error), Reason.REFUSED)
    if isinstance(error, EngineUnavailable | StoreError):
        return CallRefused(503, None, str(error), Reason.ENGINE_FAILED, retry_after_s=5)
    return CallRefused(502, None, str(error), Reason.ENGINE_FAILED)
