"""The proof of a sync (invariant 6): engine and learner must give the same tokens the same logprobs.

A checksum would not do: an engine computes with packed copies of its weights, and it is the copies that go stale. Only its own forward pass
shows them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness_rl.errors import InvariantError
from harness_rl.sync.client import EngineClient, SyncFailed
from harness_rl.sync.everywhere import GRACE_S, Calls, everywhere

Score = Callable[[list[NDArray[np.int32]]], list[NDArray[np.float32]]]
"""Prompts -> logprob of tokens 1 .. L - 1 of each at temperature 1, by the learner."""
SHORTEST = 32
"""A prompt is not cut below this, so that a probe has context to disagree about."""


class WeightProofFailed(InvariantError):
    """The engine does not compute with the weights that it was sent."""


@dataclass(frozen=True)
class Proof:
    tokens: int
    mean_abs: float
    p99_abs: float
    max_abs: float
    bound: float
    """On `mean_abs`."""
    ok: bool
    alarm: bool
    """Inside the bound, but nearer to it than it should be."""


class LogprobProbe:
    """Judges probes one after the other.

    `exact` (float32 on both sides): the bound is `bound`, the alarm half of it. Otherwise rounding differs between the two forward passes
    by an amount only the first sync can tell: it must be under `first_bound`, and later ones under 3 times it, with an alarm at 2 times.
    """

    def __init__(self, *, exact: bool, bound: float, first_bound: float, tokens: int) -> None:
        self.exact, self.bound, self.first_bound, self.tokens = exact, bound, first_bound, tokens
        self._first_gap: float | None = None

    def judge(self, engine: Sequence[NDArray[np.float32]], learner: Sequence[NDArray[np.float32]]) -> Proof:
        gap = np.abs(np.concatenate(list(engine)).astype(np.float64) - np.concatenate(list(learner)))
        if not np.all(np.isfinite(gap)):
            gap = np.full(len(gap), np.inf)
        mean = float(gap.mean()) if len(gap) else float("inf")
        if self.exact:
            bound, alarm_at = self.bound, self.bound / 2
        elif self._first_gap is None:
            bound = alarm_at = self.first_bound
            self._first_gap = mean
        else:
            bound, alarm_at = 3 * self._first_gap, 2 * self._first_gap
        enough = len(gap) >= self.tokens
        return Proof(
            tokens=len(gap),
            mean_abs=mean,
            p99_abs=float(np.quantile(gap, 0.99, method="higher")) if len(gap) else float("inf"),
            max_abs=float(gap.max()) if len(gap) else float("inf"),
            bound=bound,
            ok=enough and mean <= bound,
            alarm=mean > alarm_at,
        )

    def choose(self, rows: Sequence[NDArray[np.int32]], seed: int) -> list[NDArray[np.int32]]:
        """Prompts that score at least `tokens` tokens, from real rows in random order, the last one cut to what is still needed.

        Falls short only when all rows together do; the caller then adds `filler`.
        """
        order = np.random.default_rng(seed).permutation(len(rows))
        prompts: list[NDArray[np.int32]] = []
        needed = self.tokens
        for i in order:
            if needed <= 0:
                break
            if len(rows[i]) < 2:
                continue
            prompts.append(rows[i][: max(needed + 1, SHORTEST)])
            needed -= len(prompts[-1]) - 1
        return prompts

    def filler(self, prompts: list[NDArray[np.int32]], vocabulary: int, text: NDArray[np.int32], seed: int) -> list[NDArray[np.int32]]:
        """`prompts`, and more until they score `tokens` tokens: `text` (may be empty) first, then random ids in pieces of 128."""
        more = list(prompts)
        if self._missing(more) > 0 and len(text) >= 2:
            more.append(text[: max(self._missing(more) // 2 + 1, SHORTEST)])
        random = np.random.default_rng(seed)
        while self._missing(more) > 0:
            more.append(random.integers(0, vocabulary, size=min(128, self._missing(more)) + 1, dtype=np.int32))
        return more

    def _missing(self, prompts: Sequence[NDArray[np.int32]]) -> int:
        return self.tokens - sum(len(prompt) - 1 for prompt in prompts)


def prove(
    engines: Sequence[EngineClient],
    probe: LogprobProbe,
    score: Score,
    version: str,
    prompts: Sequence[NDArray[np.int32]],
    adapter: str | None = None,
) -> Proof:
    """The worst engine's proof; `adapter` is the name to ask for, where it is not the engines' own model.

    Raises WeightProofFailed for the first engine that fails, or else SyncFailed for the first that does not answer.
    """
    limit = min(everywhere("models", engines, lambda engine: engine.max_model_len())) - 1
    prompts = [prompt[:limit] for prompt in prompts]
    with ThreadPoolExecutor(1) as pool:
        learner = pool.submit(score, prompts)  # while the engines score
        calls = Calls("probe", engines, lambda engine: engine.score(prompts, adapter)).start()
        found = calls.settle(time.monotonic() + max(engine.timeout_s for engine in engines) + GRACE_S)
        expected = learner.result()
    proofs = []
    for engine, scores in zip(engines, found, strict=True):
        if isinstance(scores, SyncFailed):
            continue  # of those that answered, one with wrong weights is the worse news
        proofs.append(proof := probe.judge(scores, expected))
        if not proof.ok:
            under, then = ("", "sampling is stopped") if adapter is None else (f" under {adapter}", "no call will ask for it")
            raise WeightProofFailed(
                f"engine {engine.url} does not compute with the weights of {version}{under}: over {proof.tokens} tokens its logprobs "
                f"differ from the learner's by {proof.mean_abs:.3g} in the mean (bound {proof.bound:.3g}), by {proof.max_abs:.3g} at most; "
                f"{then}"
            )
    for scores in found:
        if isinstance(scores, SyncFailed):
            raise scores
    return max(proofs, key=lambda proof: proof.mean_abs)
