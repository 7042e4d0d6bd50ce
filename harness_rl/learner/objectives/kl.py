"""The distance to a reference policy, added to any objective."""

from __future__ import annotations

import torch

from harness_rl.learner.objectives.base import Terms


def kl_to_reference(terms: Terms) -> torch.Tensor:
    """[N] k3 estimate of KL(pi || pi_ref) at each sampled token: r - 1 - log r with r = pi_ref / pi (GRPO, arXiv 2402.03300, eq. 4).

    Unbiased for tokens sampled by pi, never negative; with its own gradient, 1 - r per unit of log pi.
    """
    if terms.reference is None:
        raise ValueError("a KL term needs the reference policy's logprobs")
    log_ratio = terms.reference - terms.logprobs
    return torch.expm1(log_ratio) - log_ratio
