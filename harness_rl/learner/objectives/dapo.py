"""DAPO: GRPO with a wider upper bound, normalised per token of the step."""

from __future__ import annotations

from harness_rl.learner.objectives.grpo import GRPO


class DAPO(GRPO):
    """GRPO's surrogate with epsilon_high > epsilon_low ("clip-higher", arXiv 2503.14476, eq. 8 and 10), so that unlikely tokens can grow.

    The rest of the paper is where it belongs: the token mean over the step is `loss_normalisation = "token"`, groups without signal are
    replaced by the assembler (its dynamic sampling), and the soft penalty for long answers is a reward function.
    """
