"""GSPO: one importance ratio for a whole sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness_rl.learner.objectives.base import Terms, TokenLoss
from harness_rl.learner.objectives.grpo import GRPO


@dataclass(frozen=True)
class GSPO:
    """GSPO-token, arXiv 2507.18071, eq. 13 and 14, with s_i the geometric mean of the ratios of sequence i's tokens (eq. 7):

        loss_t = -min(s_t A_t, clip(s_t, 1 - epsilon_low, 1 + epsilon_high) A_t),    s_t = stopgrad[s_i] pi_t / stopgrad[pi_t]

    Where all tokens of a sequence have one advantage, this has the value and the gradient of GSPO's own loss (eq. 5); where they do not,
    each keeps its own. A sequence is a row: all tokens of a rollout that were sampled in one growing context.
    """

    epsilon_low: float = 3e-4
    epsilon_high: float = 4e-4
    uses_advantage: ClassVar[bool] = True

    def __call__(self, terms: Terms) -> TokenLoss:
        log_ratio = terms.mean_of_sequence((terms.logprobs - terms.old).detach())
        ratio = (log_ratio + terms.logprobs - terms.logprobs.detach()).exp()
        return GRPO(self.epsilon_low, self.epsilon_high).clipped(ratio, terms.advantages)
