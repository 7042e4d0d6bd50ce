"""The clipped policy-gradient objective, with truncated importance sampling between the engine and the learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from harness_rl.learner.objectives.base import Terms, TokenLoss


@dataclass(frozen=True)
class GRPO:
    """Per-token loss, with A the group-relative advantage of the rollout (GRPO, arXiv 2402.03300).

    `ratio="proximal"`: with rho = pi / pi_old and mu the engine's probability,

        loss = -stopgrad[min(pi_old / mu, C)] * min(rho * A, clip(rho, 1 - eps_low, 1 + eps_high) * A)

    The clipped surrogate is PPO's (arXiv 1707.06347, eq. 7), with the two bounds of DAPO's clip-higher (arXiv 2503.14476, eq. 10). pi_old
    is the policy at the start of the batch, so the trust region is about *this* step; what the tokens' own policy was (an older version, or
    the engine's other numerics) is corrected by the detached first factor, truncated at C as in V-trace (IMPALA, arXiv 1802.01561).

    `ratio="behaviour"`: rho = pi / mu and no first factor: one ratio for both purposes, as in TRL's asynchronous trainer.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.28
    truncation: float = 2.0
    """C."""
    ratio: Literal["proximal", "behaviour"] = "proximal"
    uses_advantage: ClassVar[bool] = True

    def __call__(self, terms: Terms) -> TokenLoss:
        proximal = self.ratio == "proximal"
        ratio = torch.exp(terms.logprobs - (terms.old if proximal else terms.behaviour))
        clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        surrogate = torch.minimum(ratio * terms.advantages, clipped * terms.advantages)
        flags = {
            "clip_low": (ratio < 1 - self.epsilon_low) & (terms.advantages < 0),
            "clip_high": (ratio > 1 + self.epsilon_high) & (terms.advantages > 0),
        }
        if not proximal:
            return TokenLoss(-surrogate, flags)
        importance = torch.exp(terms.old - terms.behaviour).detach()
        flags["capped"] = importance > self.truncation
        return TokenLoss(-importance.clamp(max=self.truncation) * surrogate, flags)
