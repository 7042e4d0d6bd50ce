"""TRL's `peft_config`: a peft LoraConfig in the learner's words.

Invariant: what the config asks for and the learner does not do is refused by name, or said in one line where it changes nothing that is
learned. peft itself is not imported: the script has made the object.
"""

from __future__ import annotations

from typing import Any

from harness_rl.errors import UserError

_USED = ("r", "lora_alpha", "target_modules")
_SILENT = (
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "inference_mode",
    "revision",
    "auto_mapping",
    "runtime_config",
    "peft_version",
)
"""They say nothing about what is trained."""


def from_peft(config: Any) -> tuple[dict[str, Any], list[str]]:
    """(settings of `[learner]`, one line for each value that has no effect). Raises UserError."""
    try:
        given, default = config.to_dict(), type(config)().to_dict()
    except (AttributeError, TypeError):
        raise UserError(f"peft_config is a {type(config).__name__}; give a peft.LoraConfig") from None
    kind = str(getattr(given.get("peft_type"), "value", given.get("peft_type")))
    if kind != "LORA":
        raise UserError(f"peft_config: {kind} is not trained here; give a peft.LoraConfig")
    targets = given["target_modules"]
    if targets is None or (isinstance(targets, str) and targets != "all-linear"):
        raise UserError(f"peft_config: target_modules = {targets!r}: name the layers in a list (['q_proj', 'v_proj']), or 'all-linear'")
    other = [name for name in given if name not in (*_USED, *_SILENT, "lora_dropout") and given[name] != default.get(name)]
    if other:
        raise UserError(f"peft_config: {other[0]} = {given[other[0]]!r:.80} is not supported; leave it out (used are {', '.join(_USED)})")
    notes = []
    if given.get("lora_dropout"):
        notes.append(f"peft_config: lora_dropout = {given['lora_dropout']} has no effect: the policy that samples has none")
    learner = {
        "lora_rank": int(given["r"]),
        "lora_alpha": float(given["lora_alpha"]),
        "lora_targets": [] if isinstance(targets, str) else sorted(targets),
    }
    return learner, notes
