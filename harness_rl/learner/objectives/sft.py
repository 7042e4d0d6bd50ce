"""Supervised training on demonstrations: the mean negative logprob of their tokens (maximum likelihood, behaviour cloning)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness_rl.learner.objectives.base import Terms, TokenLoss


@dataclass(frozen=True)
class SFT:
    """loss = -log pi; the advantage is ignored."""

    uses_advantage: ClassVar[bool] = False

    def __call__(self, terms: Terms) -> TokenLoss:
        return TokenLoss(-terms.logprobs)
