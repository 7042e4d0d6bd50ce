"""The objectives by name, each with the settings of its paper. Imports no torch: control resolves a config with it.

A setting that the user gives wins; one that is left out is the recipe's. So `objective = "gspo"` alone is the algorithm of that name, and a
resolved config shows every number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Recipe = dict[str, dict[str, Any]]
"""Config section -> its settings."""

RECIPES: dict[str, Recipe] = {
    "grpo": {},
    "dapo": {"learner": {"epsilon_low": 0.2, "epsilon_high": 0.28, "loss_normalisation": "token"}},
    "dr_grpo": {
        "learner": {"epsilon_low": 0.2, "epsilon_high": 0.2, "loss_normalisation": "constant"},
        "rollout": {"normalise_advantage": "none"},
    },
    "cispo": {"learner": {"epsilon_low": 1.0, "epsilon_high": 4.0, "loss_normalisation": "token"}},
    "gspo": {"learner": {"epsilon_low": 3e-4, "epsilon_high": 4e-4, "loss_normalisation": "rollout"}},
    "dppo_tv": {"learner": {"epsilon_low": 0.2, "epsilon_high": 0.2, "ratio": "behaviour", "ratio_max": 20.0}},
    "dppo_kl": {"learner": {"epsilon_low": 0.05, "epsilon_high": 0.05, "ratio": "behaviour", "ratio_max": 20.0}},
}


def check_objective(name: str) -> None:
    """Raises ValueError for a name that is neither of these nor a path `module:name` or `file.py:name`."""
    if name not in RECIPES and ":" not in name:
        raise ValueError(f"objective {name!r}: use one of {', '.join(RECIPES)}, or module:name or file.py:name for your own")


def from_trl(arguments: Mapping[str, Any]) -> Recipe:
    """Settings of TRL's loss arguments (GRPOConfig and AsyncGRPOConfig) among `arguments`, the others left alone. Raises ValueError.

    `epsilon_high` is `epsilon` unless given; for CISPO it is the weight's whole bound there and what exceeds 1 here.
    """
    learner: dict[str, Any] = {}
    rollout: dict[str, Any] = {}
    loss = arguments.get("loss_type")
    if loss is not None:
        if loss not in _TRL_LOSSES:
            raise ValueError(f"loss_type {loss!r}: use one of {', '.join(_TRL_LOSSES)}, or learner={{'objective': ...}}")
        learner |= _TRL_LOSSES[loss]
    match arguments.get("importance_sampling_level", "token"):
        case "sequence":
            learner["objective"] = "gspo"
        case "token":
            pass
        case level:
            raise ValueError(f"importance_sampling_level {level!r}: use token or sequence")
    if "epsilon" in arguments:
        learner["epsilon_low"] = arguments["epsilon"]
    if arguments.get("epsilon_high", arguments.get("epsilon")) is not None:
        learner["epsilon_high"] = arguments.get("epsilon_high", arguments.get("epsilon")) - (
            1 if learner.get("objective") == "cispo" else 0
        )
    if arguments.get("delta") is not None:
        learner["ratio_max"] = arguments["delta"]
    if arguments.get("beta") is not None:
        learner["kl_beta"] = arguments["beta"]
    match arguments.get("scale_rewards"):
        case None:
            pass
        case True | "group":
            rollout["normalise_advantage"] = "std"
        case False | "none":
            rollout["normalise_advantage"] = "none"
        case other:
            raise ValueError(f"scale_rewards {other!r}: use 'group' or 'none'; a spread over the whole batch is not offered")
    mode, high = arguments.get("vllm_importance_sampling_mode"), arguments.get("vllm_importance_sampling_clip_max")
    if arguments.get("vllm_importance_sampling_correction") is False:
        learner["corrections"] = []
    elif mode is not None or high is not None:
        mode, high = mode or "sequence_mask", 3.0 if high is None else high  # TRL's defaults
        low = f"{arguments.get('vllm_importance_sampling_clip_min') or 0.0}:" if mode.endswith("_mask") else ""
        learner["corrections"] = [f"{mode}:{low}{high}"]
    return {name: settings for name, settings in (("learner", learner), ("rollout", rollout)) if settings}


_TRL_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"objective": "grpo", "loss_normalisation": "rollout"},
    "bnpo": {"objective": "grpo", "loss_normalisation": "token"},
    "dapo": {"objective": "dapo"},
    "dr_grpo": {"objective": "dr_grpo"},
    "cispo": {"objective": "cispo"},
}

TRL_LOSS_ARGUMENTS = frozenset(
    (
        *("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "beta", "scale_rewards"),
        *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
        *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
    )
)
"""What `from_trl` reads."""
