"""Dr. GRPO: GRPO without the two divisions that bias it."""

from __future__ import annotations

from harness_rl.learner.objectives.grpo import GRPO


class DrGRPO(GRPO):
    """GRPO's surrogate (arXiv 2503.20783, section 3.2); what the paper takes away are factors outside it.

    A rollout's length (1 / |o_i| favours long failures) gives way to a constant: `loss_normalisation = "constant"`; the group's spread
    (1 / std favours questions that are almost always or almost never solved) to 1: `normalise_advantage = "none"`.
    """
