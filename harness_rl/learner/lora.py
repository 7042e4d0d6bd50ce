"""LoRA (arXiv 2106.09685): the model's own weights stay, and of each linear layer W a difference of low rank is trained.

    W' = W + (alpha / rank) B A

B begins at zero, so that the first policy is the model itself; with the adapter switched off it is that again, a reference
policy that costs no memory. What leaves the learner are the weights W' under the model's own names, for engines and for a model folder that
need not know of adapters, and the adapter in peft's format. The layers are peft's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness_rl.errors import UserError
from harness_rl.learner.spec import LearnerSpec

FOLDER = "adapter"
"""In a checkpoint."""
_WEIGHTS = "adapter_model.safetensors"
_BASE = ".base_layer"


@dataclass(frozen=True)
class Change:
    """Of one weight: scale * b @ a."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


def add(model: Any, spec: LearnerSpec) -> None:
    """Put a new adapter into `model`, which alone is trained from then on. Raises UserError without peft, or for targets that are none."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("learner.lora_rank needs peft, which is not installed; pip install peft, or set lora_rank = 0") from None
    config = LoraConfig(
        r=spec.lora_rank, lora_alpha=spec.lora_alpha or 2 * spec.lora_rank, target_modules=spec.lora_targets or "all-linear", bias="none"
    )
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise UserError(f"learner.lora_targets: {error}") from None
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and module is model.get_output_embeddings():
            raise UserError(f"learner.lora_targets: {name} is the output head, which stays as it is; leave it out")
        if hasattr(module, "lora_A") and not isinstance(module.get_base_layer(), torch.nn.Linear):
            raise UserError(
                f"learner.lora_targets: {name} is a {type(module.get_base_layer()).__name__}; only linear layers can be targets"
            )


def load(model: Any, folder: Path) -> None:
    """The adapter's weights as `export` wrote them. Raises UserError when they are not there, or of another adapter."""
    from safetensors.torch import load_file

    if not (folder / _WEIGHTS).is_file():
        raise UserError(f"learner: {folder} is not there: the run began without LoRA, and cannot go on with it (learner.lora_rank)")
    saved = load_file(folder / _WEIGHTS)
    wanted = {_exported(name): parameter for name, parameter in adapter(model).items()}
    if saved.keys() != wanted.keys() or any(saved[name].shape != parameter.shape for name, parameter in wanted.items()):
        raise UserError(f"learner: the adapter in {folder} has another rank or other targets than learner.lora_rank and lora_targets say")
    for name, parameter in wanted.items():
        parameter.data.copy_(saved[name])


def adapter(model: Any) -> dict[str, torch.Tensor]:
    """Its parameters, by their names in the model; none where there is no adapter."""
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}


def with_changes(model: Any) -> Iterator[tuple[str, torch.Tensor, Change | None]]:
    """(the model's own name of a parameter, the parameter, what the adapter changes it by) of all parameters but the adapter's."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if ".lora_" in name:
            continue
        layer, found, rest = name.rpartition(f"{_BASE}.")
        change = None
        if found and rest == "weight":
            a, b = (parameters[f"{layer}.lora_{part}.default.weight"] for part in "AB")
            change = Change(a, b, float(model.get_submodule(layer).scaling["default"]))
        yield name.replace(f"{_BASE}.", "."), parameter, change


def export(folder: Path, weights: dict[str, torch.Tensor], spec: LearnerSpec) -> None:
    """Write the adapter, with its parameters' values whole in `weights`, as peft's own `from_pretrained` reads it."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({_exported(name): tensor.contiguous() for name, tensor in weights.items()}, folder / _WEIGHTS, metadata={"format": "pt"})
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in weights})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.model,
        "r": spec.lora_rank,
        "lora_alpha": spec.lora_alpha or 2 * spec.lora_rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": spec.lora_targets or targets,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _exported(name: str) -> str:
    return "base_model.model." + name.replace(".default.", ".")


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """In the block the model is what it was before training."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True  # peft's switch also stops their gradients, for good under FSDP
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
