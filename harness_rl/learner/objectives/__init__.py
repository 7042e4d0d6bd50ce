"""One objective a file; `build` names them."""

from __future__ import annotations

from harness_rl.learner.objectives.base import Objective
from harness_rl.learner.objectives.grpo import GRPO
from harness_rl.learner.objectives.sft import SFT
from harness_rl.learner.spec import LearnerSpec


def build(spec: LearnerSpec) -> Objective:
    if spec.objective == "sft":
        return SFT()
    return GRPO(epsilon_low=spec.epsilon_low, epsilon_high=spec.epsilon_high, truncation=spec.truncation, ratio=spec.ratio)
