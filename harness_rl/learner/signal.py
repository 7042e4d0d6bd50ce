"""How much of the gradient is signal: |E g|² / E|g|², estimated without bias from the gradients of successive updates.

Gradients of different batches share their expectation and nothing else, so the mean of their inner products estimates |E g|². Each pair
(i, j) counts as Adam's first moment weighs it, which makes the whole estimate three scalars and one inner product per update. The best
learning rate at a batch size is the noiseless one times this share: 1 / (1 + B_noise / B) in McCandlish et al., arXiv 1812.06162.
"""

from __future__ import annotations

from collections.abc import Mapping


class SignalShare:
    def __init__(self, beta: float) -> None:
        self._beta = beta
        self._updates = 0
        self._pairs = 0.0
        """Sum over i < j of weight(i) weight(j) <g_i, g_j>."""
        self._pair_weight = 0.0
        self._squares = 0.0
        """Sum of weight(i) |g_i|²."""

    def observe(self, along: float, square: float) -> None:
        """`along`: <m, g> of Adam's first moment before this update (not bias-corrected) and its gradient; `square`: |g|²."""
        keep, add = self._beta, 1 - self._beta
        self._pairs = keep * keep * self._pairs + keep * add * along
        self._pair_weight = keep * keep * self._pair_weight + keep * add * (1 - keep**self._updates)
        self._squares = keep * self._squares + add * square
        self._updates += 1

    @property
    def value(self) -> float:
        """Between 0 and 1; 0 where nothing is known yet, as after one update."""
        if not self._pair_weight or not self._squares:
            return 0.0
        squares = self._squares / (1 - self._beta**self._updates)
        return min(1.0, max(0.0, self._pairs / self._pair_weight / squares))

    def state(self) -> dict[str, float]:
        return {"updates": self._updates, "pairs": self._pairs, "pair_weight": self._pair_weight, "squares": self._squares}

    def restore(self, state: Mapping[str, float]) -> None:
        self._updates, self._pairs = int(state["updates"]), state["pairs"]
        self._pair_weight, self._squares = state["pair_weight"], state["squares"]
