"""One objective a file; `build` puts the loss together that a spec names."""

from __future__ import annotations

import inspect

from harness_rl.errors import UserError
from harness_rl.imports import load_object
from harness_rl.learner.corrections import parse_corrections
from harness_rl.learner.objectives.base import Objective
from harness_rl.learner.objectives.cispo import CISPO
from harness_rl.learner.objectives.composed import Composed, Custom
from harness_rl.learner.objectives.dapo import DAPO
from harness_rl.learner.objectives.dppo import DPPO
from harness_rl.learner.objectives.dr_grpo import DrGRPO
from harness_rl.learner.objectives.grpo import GRPO
from harness_rl.learner.objectives.gspo import GSPO
from harness_rl.learner.objectives.sft import SFT
from harness_rl.learner.spec import LearnerSpec


def build(spec: LearnerSpec) -> Composed:
    """Raises UserError for a name, a correction or a path that is none."""
    try:
        corrections = tuple(parse_corrections(spec.corrections or [], spec.truncation, spec.ratio))
    except ValueError as error:
        raise UserError(f"learner: {error}") from None
    return Composed(_objective(spec), spec.ratio, corrections, spec.kl_beta)


def _objective(spec: LearnerSpec) -> Objective:
    low, high, bound = spec.epsilon_low, spec.epsilon_high, spec.ratio_max
    match spec.objective:
        case "sft":
            return SFT()
        case "grpo":
            return GRPO(low, high, bound)
        case "dapo":
            return DAPO(low, high, bound)
        case "dr_grpo":
            return DrGRPO(low, high, bound)
        case "cispo":
            return CISPO(low, high)
        case "gspo":
            return GSPO(low, high)
        case "dppo_tv":
            return DPPO("tv", low, high, bound)
        case "dppo_kl":
            return DPPO("kl", low, high, bound)
        case path:
            found = load_object(path, "learner.objective")
            return Custom(path, found() if inspect.isclass(found) else found)
