"""CISPO: clip the importance weight, never the gradient of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness_rl.learner.objectives.base import Terms, TokenLoss, ratio_of


@dataclass(frozen=True)
class CISPO:
    """MiniMax-M1, arXiv 2506.13585, eq. 4 and 5:

        loss = -stopgrad[clip(rho, 1 - epsilon_low, 1 + epsilon_high)] A log pi,    rho = pi / pi_old

    Every token keeps a gradient, also the rare one at a fork of the reasoning that a clipped surrogate would drop. The paper sets no lower
    bound (`epsilon_low = 1`). TRL's `epsilon_high` for this loss is the bound itself: 1 + ours.
    """

    epsilon_low: float = 1.0
    epsilon_high: float = 4.0
    uses_advantage: ClassVar[bool] = True

    def __call__(self, terms: Terms) -> TokenLoss:
        ratio = ratio_of(terms).detach()
        weight = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        flags = {"clip_low": ratio < 1 - self.epsilon_low, "clip_high": ratio > 1 + self.epsilon_high}
        return TokenLoss(-weight * terms.advantages * terms.logprobs, flags)
