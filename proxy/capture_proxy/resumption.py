"""A call that the engine ended on the way (an update of its weights aborts what runs) goes on from what it has sampled.

Invariant: a joined sample is what one engine call could have given under the same weights: every id with the logprob that was reported for
it, one version span per policy that sampled, no more ids than the call may have, and nothing after the place where a stop text is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from capture_proxy.codec import Logps
from capture_proxy.ids import Ids
from capture_proxy.sample import Sample

ABORTED = "abort"
_DECODE_BACK = 16
"""Ids before a stop text's earliest start that are decoded with it: the bytes of one character may be spread over several ids."""


@dataclass
class Partial:
    """What a call has so far."""

    sample: Sample | None = None
    """Only ever one without a problem; None: it starts from its prompt."""
    parts: list[tuple[int, int | None]] = field(default_factory=list)
    """(first id, seed) of each further request that the call took."""

    @property
    def ids(self) -> Ids:
        return np.empty(0, np.int32) if self.sample is None else self.sample.ids

    def add(self, sample: Sample, goes_on: bool) -> Sample:
        """The call so far, `sample` included. What was aborted is kept only where the call `goes_on` from it, and held up."""
        joined = sample if self.sample is None else joined_sample(self.sample, sample)
        if joined.finish_reason == ABORTED:
            self.sample = joined if goes_on and joined.problem is None and len(joined.ids) else None
            if self.sample is None:
                self.parts.clear()
        return joined

    def params(self, params: dict[str, Any]) -> dict[str, Any]:
        """Those of the next request: what is left of the budget, and randomness of its own (a repeated seed would repeat the draws)."""
        if self.sample is None:
            return params
        done = len(self.sample.ids)
        seed = None if params.get("seed") is None else part_seed(params["seed"], done)
        self.parts.append((done, seed))
        further = {**params, "seed": seed} if seed is not None else dict(params)
        if params.get("max_tokens") is not None:
            further["max_tokens"] = params["max_tokens"] - done
        return further

    def exhausted(self, params: dict[str, Any]) -> Sample | None:
        """The whole answer, where the abort came right after the last id that the budget allows."""
        limit = params.get("max_tokens")
        if self.sample is None or limit is None or len(self.sample.ids) < limit:
            return None
        return replace(self.sample, finish_reason="length", stop_reason=None)


def part_seed(seed: int, start: int) -> int:
    """63 bits for the part of a call that begins at output id `start`."""
    return int.from_bytes(hashlib.blake2b(f"{seed}+{start}".encode(), digest_size=8).digest()) >> 1


def joined_sample(first: Sample, more: Sample) -> Sample:
    """`first` and what was sampled after it, as one sample; its problem is that of `more`, which then has no logprobs for the whole."""
    ids = np.concatenate([first.ids, more.ids])
    logps: Logps = np.concatenate([first.logps, more.logps]) if more.problem is None else np.empty(0, np.float32)
    adapters = tuple(dict.fromkeys([*first.adapters, *more.adapters]))
    versions = _joined_versions(first, more)
    return replace(more, ids=ids, logps=logps, versions=versions, cached_tokens=first.cached_tokens, adapters=adapters)


def _joined_versions(first: Sample, more: Sample) -> tuple[tuple[str, int, int], ...] | None:
    if first.versions is None or more.versions is None:
        return None
    spans = list(first.versions)
    for version, start, end in more.versions:
        start, end = start + len(first.ids), end + len(first.ids)
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1], end)
        elif end > start:
            spans.append((version, start, end))
    return tuple(spans)


async def cut_at_stop(sample: Sample, seams: Sequence[int], stops: Sequence[str], decode: Callable[[Ids], Awaitable[str]]) -> Sample:
    """`sample` up to the id that completes a stop text which lies over one of the `seams` (ids at which a request began).

    The engine looks for stop texts in what one request sampled, so those that begin in one and end in the next are left to us.
    """
    longest = max(map(len, stops), default=0)
    for seam in seams if longest > 1 else ():
        start = max(0, seam - longest - _DECODE_BACK)
        last = min(len(sample.ids), seam + longest + _DECODE_BACK)
        if _first(stops, await decode(sample.ids[start:last])) is None:
            continue
        for end in range(seam + 1, last + 1):
            if (found := _first(stops, await decode(sample.ids[start:end]))) is not None:
                return _cut(sample, end, found)
    return sample


def _first(stops: Sequence[str], text: str) -> str | None:
    return min((stop for stop in stops if stop in text), key=text.index, default=None)


def _cut(sample: Sample, end: int, stop: str) -> Sample:
    versions = None if sample.versions is None else tuple((v, a, min(b, end)) for v, a, b in sample.versions if a < end)
    logps = sample.logps[:end]
    return replace(sample, ids=sample.ids[:end], logps=logps, versions=versions, finish_reason="stop", stop_reason=stop)
