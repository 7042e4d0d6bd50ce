"""Which models and servers can take patches of their weights (`sync.backend = "sparse_nccl"`), told before anything is started.

vLLM writes a patch into a parameter as the checkpoint lays it out, and nothing that was made from that parameter is made again. Where it
computes with a parameter in another form, a patch would land in the wrong place or leave a stale copy, and vLLM does not say so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness_rl.config import RunConfig
from harness_rl.errors import UserError

_FLAGS = {"--quantization": "quantised weights", "-q": "quantised weights", "--enable-lora": "LoRA adapters in the engine"}
_STATE_SIZES = ("mamba_d_state", "ssm_state_size", "state_size")


def check_patchable(config: RunConfig, model: Path) -> None:
    """`model`: the folder. Raises UserError; always passes for other backends."""
    if config.sync.backend != "sparse_nccl":
        return
    try:
        settings = json.loads((model / "config.json").read_text())
    except ValueError as error:
        raise UserError(f"model.name: {model}/config.json is not JSON: {error}") from None
    reason = _of_model(settings)
    if not config.engine.urls:  # a running server was not started with our arguments
        reason = reason or _of_arguments(config.engine.extra_args)
    if reason:
        raise UserError(f"sync.backend = sparse_nccl: vLLM cannot patch {reason}; use sync.backend = nccl")


def _of_model(settings: dict[str, Any]) -> str | None:
    """Why not, of a model's config.json."""
    text = settings.get("text_config")
    settings = settings | (text if isinstance(text, dict) else {})
    if settings.get("quantization_config"):
        return "quantised weights"
    if settings.get("kv_lora_rank"):
        return "a model with multi-head latent attention (kv_lora_rank), which computes with parts of a weight that it copied out"
    for key, value in settings.items():
        if "experts" in key and isinstance(value, int) and value > 1:
            return f"a mixture of experts ({key}), whose kernels may keep the weights in an order of their own"
        if key in _STATE_SIZES and value:
            return f"a model with state-space layers ({key}), which keep a function of a weight in its place"
    return None


def _of_arguments(arguments: Sequence[str]) -> str | None:
    for argument in arguments:
        flag = argument.split("=")[0].replace("_", "-")
        if flag in _FLAGS:
            return f"{_FLAGS[flag]} (engine.extra_args has {flag})"
    return None
