"""vLLM 0.33's one-call form: the server reads an answer with its parsers in the very request that samples it, which saves the derender.

Invariant: an untried reading never reaches an agent. The form is used where the server names the ids of its logprobs and decodes for its
parsers as its derender does; for each kind of request the first answers, and one in many later ones, are read in both forms, and where
these differ the form is left until the server is looked at anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

from capture_proxy.sample import Parsed

TRIALS = 4
"""Answers of a kind that are read in both forms at first."""
AGAIN = 64
"""Later one in so many."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """What a render says that a server has to know to read the answer to its prompt."""

    context: dict[str, Any]
    """vLLM's `parse_context`."""
    decoding: dict[str, Any]
    """Sampling parameters under which its parsers see what they look for."""

    @classmethod
    def of(cls, rendered: dict[str, Any]) -> Reading | None:
        """That of a render's answer; None: the server has no such form, or (for requests without tools, for one) would leave out special
        tokens that its derender keeps."""
        params = rendered.get("sampling_params") or {}
        if not isinstance(rendered.get("parse_context"), dict) or params.get("skip_special_tokens") is not False:
            return None
        names = ("skip_special_tokens", "spaces_between_special_tokens")
        return cls(rendered["parse_context"], {name: params[name] for name in names if params.get(name) is not None})

    @property
    def kind(self) -> tuple[str, ...]:
        """Requests that the server's parsers treat alike."""
        return tuple(repr(self.context.get(name)) for name in ("tool_choice", "chat_template_kwargs"))

    def fields(self) -> dict[str, Any]:
        """What a generate request has besides."""
        return {"output_mode": "derender", "parse_context": self.context}


class OneCall:
    """What is known of one server's one-call form."""

    def __init__(self, url: str) -> None:
        self.why_left: str | None = None
        """Why it is not used (any more)."""
        self._url = url
        self._works = False
        """An answer has come in this form, with ids."""
        self._trying = False
        self._alike: Counter[tuple[tuple[str, ...], bool]] = Counter()
        """Answers that both forms read alike, by the request's kind and whether they have tool calls."""
        self._unchecked: Counter[tuple[tuple[str, ...], bool]] = Counter()

    def take(self) -> bool:
        """Whether a call may use the form. Until it is known to work one call at a time tries, and the others go the safe way."""
        if self.why_left is not None or self._trying:
            return False
        self._trying = not self._works
        return True

    def give_back(self, works: bool) -> None:
        """After `take`: whether an answer came in this form."""
        self._trying = False
        self._works = self._works or works

    def leave(self, why: str) -> None:
        """It is not used again."""
        if self.why_left is None:
            self.why_left = why
            log.warning("engine %s: answers are read by a request of their own: %s", self._url, why)

    def trusts(self, reading: Reading, read: Parsed) -> bool:
        """Whether such an answer needs no second look."""
        kind = reading.kind, bool(read.calls)
        if self.why_left is not None or self._alike[kind] < TRIALS:
            return False
        self._unchecked[kind] += 1
        return self._unchecked[kind] % AGAIN > 0

    def compare(self, reading: Reading, read: Parsed, separately: Parsed) -> None:
        """What the two forms made of one answer."""
        if read == separately:
            self._alike[reading.kind, bool(read.calls)] += 1
        else:
            self.leave(f"its one-call form reads {read!r:.300} where the separate one reads {separately!r:.300}")
