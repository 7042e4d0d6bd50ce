"""One step's loss from its parts: an objective, the corrections of its tokens, and the distance to a reference.

loss = (product of the corrections' factors) * objective + kl_beta * KL(pi || pi_ref)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from harness_rl.errors import UserError
from harness_rl.learner.corrections import Correction
from harness_rl.learner.objectives.base import Objective, Terms, TokenLoss
from harness_rl.learner.objectives.kl import kl_to_reference


@dataclass(frozen=True)
class Composed:
    objective: Objective
    ratio: Literal["proximal", "behaviour"] = "proximal"
    """What the objective's ratio is against: the policy at the start of the batch, so that its trust region is about *this* step and the
    engine's difference is corrected apart (decoupled); or the engine, one ratio for both, as in TRL's asynchronous trainer."""
    corrections: tuple[Correction, ...] = ()
    kl_beta: float = 0.0

    @property
    def uses_advantage(self) -> bool:
        """A row of advantage 0 still has a distance to the reference."""
        return self.objective.uses_advantage and not self.kl_beta

    @property
    def needs_reference(self) -> bool:
        return bool(self.kl_beta)

    def __call__(self, terms: Terms) -> TokenLoss:
        result = self.objective(terms if self.ratio == "proximal" else replace(terms, old=terms.behaviour))
        loss, flags, values = result.loss, dict(result.flags), dict(result.values)
        for correction in self.corrections:
            factor, touched = correction.factor(terms)
            loss = factor * loss
            name = "capped" if correction.form == "truncate" else "masked"
            flags[name] = flags[name] | touched if name in flags else touched
        if self.kl_beta:
            distance = kl_to_reference(terms)
            values["kl_reference"] = distance
            loss = loss + self.kl_beta * distance
        return TokenLoss(loss, flags, values)


@dataclass(frozen=True)
class Custom:
    """A user's own objective: a function of `Terms`, or a class that is called without arguments and gives one."""

    name: str
    function: Any

    @property
    def uses_advantage(self) -> bool:
        return bool(getattr(self.function, "uses_advantage", True))

    def __call__(self, terms: Terms) -> TokenLoss:
        result = self.function(terms)
        if not isinstance(result, TokenLoss) or result.loss.shape != terms.logprobs.shape:
            shape = list(result.loss.shape) if isinstance(result, TokenLoss) else type(result).__name__
            raise UserError(f"objective {self.name} gave {shape}; return a TokenLoss whose loss is [{len(terms.logprobs)}]")
        if not isinstance(result.loss, torch.Tensor) or not result.loss.requires_grad:
            raise UserError(f"objective {self.name} gave a loss without gradient; it must come from terms.logprobs")
        return result
