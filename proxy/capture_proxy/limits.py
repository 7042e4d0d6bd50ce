"""What one session may take of the proxy: calls in a minute, and bytes.

Invariant: a session at its limit is told so before its request is read or anything is sampled, and other sessions notice nothing of it.
"""

from __future__ import annotations

import math
from time import monotonic

from capture_proxy.reasons import Reason
from capture_proxy.refusal import CallRefused, conversation_over
from capture_proxy.session import Session

MINUTE_S = 60.0


def check_rate(session: Session) -> None:
    """Counts a call, or raises a 429 that says when the next one may come. What is refused does not count."""
    limit = session.spec.limits.max_calls_per_minute
    if limit is None:
        return
    now = monotonic()
    recent = session.recent_calls
    while recent and recent[0] <= now - MINUTE_S:
        recent.popleft()
    if len(recent) >= limit:
        wait_s = min(math.ceil(recent[0] + MINUTE_S - now), 60)
        raise CallRefused(429, None, f"max_calls_per_minute: {limit} calls of this session in a minute", Reason.LIMIT, max(wait_s, 1))
    recent.append(now)


def body_room(session: Session, body_limit: int) -> int:
    """Largest body that the session may send now. Raises a full context when it holds all the bytes that it may."""
    limit = session.spec.limits.max_bytes
    if limit is None:
        return body_limit
    room = limit - session.log.size - sum(call.body_bytes for call in session.running.values())
    if room <= 0:
        raise full(limit)
    return min(room, body_limit)


def full(limit: int) -> CallRefused:
    """A session out of bytes is a conversation out of context: what a client can do about both is to stop or to compact."""
    return conversation_over(f"the session may hold {limit} bytes (max_bytes)")
