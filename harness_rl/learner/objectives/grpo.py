"""GRPO's clipped policy gradient, with separate bounds and an upper one for the ratio where it is pushed down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from harness_rl.learner.objectives.base import Terms, TokenLoss, ratio_of


@dataclass(frozen=True)
class GRPO:
    """Per-token loss with A the group-relative advantage of the rollout (GRPO, arXiv 2402.03300, eq. 3 without its KL term):

        loss = -min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A),    rho = pi / pi_old

    The clipped surrogate is PPO's (arXiv 1707.06347, eq. 7). It leaves rho unbounded where A < 0 and the policy has moved the wrong way;
    `ratio_max` = c > 1 bounds it: loss = -max(min(...), c A) for A < 0 (dual clip, arXiv 1912.09729, eq. 5), which is the same as
    min(rho, c) in the first term (two-sided clipping, INTELLECT-2, arXiv 2505.07291; TRL's `delta`). 0 = no bound.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.28
    ratio_max: float = 0.0
    uses_advantage: ClassVar[bool] = True

    def __call__(self, terms: Terms) -> TokenLoss:
        return self.clipped(ratio_of(terms), terms.advantages)

    def clipped(self, ratio: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
        bounded = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        surrogate = torch.minimum(ratio * advantages, bounded * advantages)
        flags = {
            "clip_low": (ratio < 1 - self.epsilon_low) & (advantages < 0),
            "clip_high": (ratio > 1 + self.epsilon_high) & (advantages > 0),
        }
        if self.ratio_max:
            surrogate = torch.where(advantages < 0, torch.maximum(surrogate, self.ratio_max * advantages), surrogate)
            flags["clip_dual"] = (ratio > self.ratio_max) & (advantages < 0)
        return TokenLoss(-surrogate, flags)
