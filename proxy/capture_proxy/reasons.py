"""Why a call is not trained: one vocabulary for trace, metrics, learner and viewer.

Invariant: every call an agent makes ends either trained or with exactly one of these names, so that the counts add up to the calls seen.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """A turn's `mask_reason`, and the key under which a call without a turn is counted."""

    AUXILIARY = "auxiliary"
    """A side call of the harness (a title, a summary): recorded, not part of the task's policy."""
    RETRY = "retry"
    """The client asked the same again and said so; this earlier attempt was not used."""
    DISCARDED = "discarded"
    """The client threw a length-cut answer away and asked the same again."""
    ABANDONED = "abandoned"
    """The client left before the answer was complete, or the proxy died while the call ran."""
    TRUNCATED = "truncated"
    """Cut by a limit, where the run's policy is not to train cut turns."""
    CONSTRAINED = "constrained"
    """A grammar forced tokens (tool_choice required/named, JSON output): the logprobs are of the masked distribution."""
    GREEDY = "greedy"
    """Sampled at temperature 0: there is no distribution to train on."""
    IMAGE = "image"
    """The conversation holds an image: the learner's model reads token ids alone, so its logprobs would be of another prompt."""
    TOKEN_COUNT_MISMATCH = "token_count_mismatch"
    """The engine's ids and logprobs do not fit together, or a value is not a logprob."""
    STALE = "stale"
    """Sampled by a version older than the run allows."""
    UNPROVEN = "unproven"
    """The version that sampled the tokens is unknown or not (yet) proven."""
    LATE = "late"
    """Made or still running after the session was sealed."""
    PROBE = "probe"
    """Made by us to test the engine."""
    DEMONSTRATION = "demonstration"
    """Written by a script, not sampled."""
    LIMIT = "limit"
    """Refused before sampling because a limit of the session was reached."""
    REFUSED = "refused"
    """Refused before sampling because the request itself is not acceptable."""
    ENGINE_FAILED = "engine_failed"
    """No engine gave an answer."""
    SCRIPT_ENDED = "script_ended"
    """Answered with a plain closing message because the session's script has no more turns."""
