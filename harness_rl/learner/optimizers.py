"""The optimizer that a spec names: AdamW, with weight decay on matrices only, its state in float32 or in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness_rl.errors import UserError
from harness_rl.learner.spec import LearnerSpec


def build_optimizer(parameters: Sequence[torch.nn.Parameter], spec: LearnerSpec) -> torch.optim.Optimizer:
    """Raises UserError for an optimizer whose package is not installed."""
    decay = [p for p in parameters if p.ndim >= 2]
    rest = [p for p in parameters if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": spec.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    betas = (spec.adam_beta1, spec.adam_beta2)
    if spec.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=spec.learning_rate, betas=betas, eps=spec.adam_epsilon, fused=True)
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise UserError("learner.optimizer = adamw_8bit needs torchao, which is not installed; pip install torchao, or use adamw") from None
    return AdamW8bit(groups, lr=spec.learning_rate, betas=betas, eps=spec.adam_epsilon)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Learning rate of the next step; in place where the optimizer keeps it as a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
