"""What an objective is: a pure function from per-token quantities to per-token losses.

Masks, normalisation and the correction of the engine's own probabilities are not its business: every term it gets is trained, `old` is the
policy that its ratio is taken against, and the caller corrects, weighs and sums over the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class Terms:
    """Everything about N trained tokens of R rows, all [N] float32 unless said otherwise. Only `logprobs` carries gradient."""

    logprobs: torch.Tensor
    """Of the policy in training (pi)."""
    old: torch.Tensor
    """Of the policy that the ratio is against (pi_old): at the start of the batch, or the engine's where `ratio = "behaviour"`."""
    behaviour: torch.Tensor
    """As the engine reported it when it sampled the token (mu)."""
    advantages: torch.Tensor
    sequence: torch.Tensor
    """[N] int64, 0 .. R - 1: the row of each token. A row is one sequence: all its tokens were sampled in one growing context, and it is
    never cut, so that all of them are here."""
    reference: torch.Tensor | None = None
    """Of the reference policy (pi_ref); None where no KL term is asked for."""

    def mean_of_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """[N] -> [N]: the mean of `values` over the tokens of each token's own row."""
        return self.sum_of_sequence(values) / self.sum_of_sequence(torch.ones_like(values))

    def sum_of_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """[N] -> [N]"""
        rows = int(self.sequence.max()) + 1 if len(self.sequence) else 0
        return values.new_zeros(rows).index_add(0, self.sequence, values)[self.sequence]


@dataclass(frozen=True)
class TokenLoss:
    loss: torch.Tensor
    """[N]"""
    flags: dict[str, torch.Tensor] = field(default_factory=dict)
    """[N] booleans, e.g. which tokens were clipped; their shares become the metrics `<name>_ratio`."""
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """[N] numbers; their means over the step become metrics."""


class Objective(Protocol):
    @property
    def uses_advantage(self) -> bool:
        """False: rows train whatever their advantage, even 0."""

    def __call__(self, terms: Terms) -> TokenLoss: ...


def ratio_of(terms: Terms) -> torch.Tensor:
    """rho = pi / pi_old, [N]."""
    return torch.exp(terms.logprobs - terms.old)
