"""What an objective is: a pure function from per-token quantities to per-token losses.

Weights, masks and normalisation are not its business: every term it gets is trained, and the caller takes the weighted sum over the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class Terms:
    """Everything about N trained tokens, all [N] float32. Only `logprobs` carries gradient."""

    logprobs: torch.Tensor
    """Of the policy in training (pi)."""
    old: torch.Tensor
    """Of the policy at the start of the batch (pi_old)."""
    behaviour: torch.Tensor
    """As the engine reported it when it sampled the token (mu)."""
    advantages: torch.Tensor


@dataclass(frozen=True)
class TokenLoss:
    loss: torch.Tensor
    """[N]"""
    flags: dict[str, torch.Tensor] = field(default_factory=dict)
    """[N] booleans, e.g. which tokens were clipped; their shares become metrics."""


class Objective(Protocol):
    @property
    def uses_advantage(self) -> bool:
        """False: rows train whatever their advantage, even 0."""

    def __call__(self, terms: Terms) -> TokenLoss: ...
