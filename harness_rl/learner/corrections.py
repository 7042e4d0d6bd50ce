"""Off-policy corrections by name: factors on a token's loss from how far the learner's probability lies from the engine's.

The tokens were sampled by the engine (mu): perhaps by an older policy, always with other numerics. With w = pi_old / mu, where pi_old is
the policy at the start of the batch (its ratio to the policy in training is the objective's business: decoupled PPO, arXiv 2110.00641 and
AReaL, arXiv 2505.24298), the exact correction is the factor w; its variance grows without bound, so each form bounds it in its own way.
All factors are detached. They compose by multiplication: at most one weight, any number of rejections. Imports no torch, so that control
can read the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

if TYPE_CHECKING:
    import torch

    from harness_rl.learner.objectives.base import Terms

Level = Literal["token", "sequence", "geometric"]
Form = Literal["truncate", "mask", "reject"]

_BANDS: dict[str, tuple[float, float]] = {"token": (0.5, 5.0), "sequence": (0.0, 3.0), "geometric": (0.99, 1.01)}


@dataclass(frozen=True)
class Correction:
    """`<level>_<form>`, with its bounds: `token_truncate`, `token_truncate:2`, `token_mask:0.5:5`, `geometric_reject:0.99:1.01`.

    Levels of w: `token`, each token's own; `sequence`, the product over the tokens of a row; `geometric`, their geometric mean, which does
    not grow with length.

    - `truncate` (TIS): min(w, high). Truncated importance sampling (Ionides 2008); per token as in V-trace (IMPALA, arXiv 1802.01561).
    - `mask` (MIS): w where low <= w <= high, else 0. Per token it is IcePop (arXiv 2510.18855, alpha = 0.5, beta = 5).
    - `reject`: 1 where low <= w <= high, else 0; composes with a weight of another level.

    `token_*` and `sequence_*` weights are TRL's `vllm_importance_sampling_mode` of the same names.
    """

    level: Level
    form: Form
    low: float
    high: float

    @property
    def weighs(self) -> bool:
        """True where the factor is an importance weight, not a yes or no."""
        return self.form != "reject"

    @classmethod
    def parse(cls, text: str, truncation: float) -> Correction:
        """`truncation` is the bound of a `truncate` that gives none. Raises ValueError."""
        name, *bounds = text.split(":")
        level, _, form = name.partition("_")
        if level not in get_args(Level) or form not in get_args(Form):
            raise ValueError(f"correction {text!r}: write {'|'.join(get_args(Level))}_{'|'.join(get_args(Form))}, with :bounds if you like")
        try:
            numbers = [float(bound) for bound in bounds]
        except ValueError:
            raise ValueError(f"correction {text!r}: its bounds are not numbers") from None
        usage = "1 bound, high" if form == "truncate" else "2 bounds, low:high"
        if numbers and len(numbers) != int(usage[0]):
            raise ValueError(f"correction {text!r}: {form} takes {usage}")
        low, high = (0.0, *(numbers or [truncation])) if form == "truncate" else (numbers or _BANDS[level])
        if not 0 <= low < high:
            raise ValueError(f"correction {text!r}: bounds must be 0 <= low < high")
        return cls(cast(Level, level), cast(Form, form), low, high)

    def factor(self, terms: Terms) -> tuple[torch.Tensor, torch.Tensor]:
        """(factor, which tokens were touched), both [N]; the factor is finite whatever the logprobs are."""
        log_ratio = (terms.old - terms.behaviour).detach()
        if self.level == "sequence":
            log_ratio = terms.sum_of_sequence(log_ratio)
        elif self.level == "geometric":
            log_ratio = terms.mean_of_sequence(log_ratio)
        weight = log_ratio.exp()
        if self.form == "truncate":
            return weight.clamp(max=self.high), weight > self.high
        inside = (weight >= self.low) & (weight <= self.high)
        kept = weight if self.form == "mask" else weight.new_ones(weight.shape)
        return kept.where(inside, weight.new_zeros(())), ~inside


def parse_corrections(names: Sequence[str], truncation: float, ratio: str) -> list[Correction]:
    """Raises ValueError for a name that is none, two weights, or a weight where the objective's own ratio is already pi / mu."""
    found = [Correction.parse(name, truncation) for name in names]
    weights = [name for name, correction in zip(names, found, strict=True) if correction.weighs]
    if len(weights) > 1:
        raise ValueError(f"corrections {' and '.join(weights)} are both weights; use one of them, or a reject")
    if weights and ratio == "behaviour":
        raise ValueError(
            f'correction {weights[0]}: with ratio = "behaviour" the ratio itself corrects; use a reject, or ratio = "proximal"'
        )
    return found


def default_corrections(ratio: str) -> list[str]:
    """Token-level truncation, where the objective's ratio is against pi_old; nothing where it is against mu."""
    return ["token_truncate"] if ratio == "proximal" else []
