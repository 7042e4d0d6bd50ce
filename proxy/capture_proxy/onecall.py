"""vLLM 0.33's one-call form: the server reads an answer with its parsers in the very request that samples it, which saves the derender.

Invariant: an agent never gets from it what the separate form would not give. It is used only where the server names the ids of its
logprobs, and taken at its word only after the two forms have agreed on the first answers with tool calls, and without; where they ever
differ it is left for good.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

TRIALS = 4
"""Answers of a kind that are read in both forms before the one-call form is trusted with it."""
_DECODING = ("skip_special_tokens", "spaces_between_special_tokens")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """What a render says that a server has to know to read the answer to its prompt."""

    context: dict[str, Any]
    """vLLM's `parse_context`."""
    decoding: dict[str, Any]
    """The sampling parameters under which its parsers see what they look for."""

    @classmethod
    def of(cls, rendered: dict[str, Any]) -> Reading | None:
        """That of a render's answer; None: the server has no one-call form."""
        if not isinstance(rendered.get("parse_context"), dict):
            return None
        params = rendered.get("sampling_params") or {}
        return cls(rendered["parse_context"], {key: params[key] for key in _DECODING if params.get(key) is not None})

    def fields(self) -> dict[str, Any]:
        """What a generate request has besides."""
        return {"output_mode": "derender", "parse_context": self.context}


class Readable(Protocol):
    @property
    def calls(self) -> tuple[tuple[str, str], ...]: ...


class OneCall:
    """What is known of one server's one-call form."""

    def __init__(self, url: str) -> None:
        self.left: str | None = None
        """Why it is not used (any more)."""
        self._url = url
        self._alike: Counter[bool] = Counter()
        """Answers that both forms read alike: with tool calls (True), and without."""

    def leave(self, why: str) -> None:
        """It is not used again."""
        log.warning("engine %s: answers are read by a request of their own: %s", self._url, why)
        self.left = why

    def trusts(self, read: Readable) -> bool:
        """Whether such an answer needs no second look."""
        return self.left is None and self._alike[bool(read.calls)] >= TRIALS

    def compare(self, read: Readable, separately: Readable) -> None:
        """What the two forms made of one answer."""
        if read == separately:
            self._alike[bool(read.calls)] += 1
        elif self.left is None:
            self.leave(f"its one-call form reads {read!r} where the separate one reads {separately!r}")
