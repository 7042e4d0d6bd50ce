"""DPPO: a trust region measured by the divergence of the two policies, not by the ratio of one token's probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from harness_rl.learner.objectives.base import Terms, TokenLoss, ratio_of


@dataclass(frozen=True)
class DPPO:
    """Divergence PPO, arXiv 2602.04879, with its binary approximations: only "this token" and "any other" are told apart.

        loss = -M stopgrad[min(rho, ratio_max)] A log pi,    rho = pi / pi_old

    M = 0 where the push leads further out of a region that is already left: rho > 1 with A > 0, or rho < 1 with A < 0, and D > epsilon
    (`epsilon_high` and `epsilon_low`); else 1. D is the binary total variation |pi - pi_old|, or the binary KL divergence
    pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi)). A ratio mask silences unlikely tokens, whose ratio is large after
    a change that is nothing; and lets likely ones run. The paper takes the region around the policy that sampled (`ratio = "behaviour"`).
    """

    divergence: Literal["tv", "kl"] = "tv"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    ratio_max: float = 20.0
    """0 = no bound."""
    uses_advantage: ClassVar[bool] = True

    def __call__(self, terms: Terms) -> TokenLoss:
        ratio = ratio_of(terms).detach()
        found = self.distance(terms.logprobs.detach(), terms.old)
        flags = {
            "clip_low": (terms.advantages < 0) & (ratio < 1) & (found > self.epsilon_low),
            "clip_high": (terms.advantages > 0) & (ratio > 1) & (found > self.epsilon_high),
        }
        weight = ratio.clamp(max=self.ratio_max) if self.ratio_max else ratio
        weight = torch.where(flags["clip_low"] | flags["clip_high"], 0.0, weight)
        return TokenLoss(-weight * terms.advantages * terms.logprobs, flags)

    def distance(self, logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """[N] the divergence of the two-valued distributions (p, 1 - p)."""
        if self.divergence == "tv":
            return (logprobs.exp() - old.exp()).abs()
        rest, old_rest = (-torch.expm1(x) for x in (logprobs, old))
        other = torch.where(old_rest > 0, old_rest * (old_rest / rest).log(), torch.zeros_like(old_rest))  # 0 log 0 = 0
        return old.exp() * (old - logprobs) + other
