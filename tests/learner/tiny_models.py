"""Tiny random models of every kind the learner meets: windows, sinks, experts, layers with a state."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers as t
from learner_helpers import VOCABULARY

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def made(kind: str, **more: Any) -> Any:
    """A random model of one of `WINDOWS`, `SINKS` or `STATES`, float32."""
    torch.manual_seed(0)
    config = CONFIGS[kind](more)
    model = t.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_(0, 1.0)
    return model


def in_float64(model: Any) -> Any:
    """The model in float64, its norms too: transformers takes those in float32 whatever the model's dtype."""

    def norm(module: Any) -> Any:
        weight = module.weight.double()
        scale = 1 + weight if type(module).__name__.startswith("Gemma3") else weight
        epsilon = getattr(module, "variance_epsilon", None) or module.eps
        return lambda x: scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)

    model = model.double()
    if getattr(model.config, "num_local_experts", 0):
        model.set_experts_implementation("eager")  # the grouped product knows no float64
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(lambda m, x: norm(m)(x), module)
    return model


def _plain(name: str, **fields: Any) -> Any:
    return lambda more: getattr(t, name)(**(_COMMON | fields | more))


CONFIGS: dict[str, Any] = {
    "llama": _plain("LlamaConfig", tie_word_embeddings=True),
    "llama_untied": _plain("LlamaConfig", tie_word_embeddings=False),
    "qwen3": _plain("Qwen3Config", tie_word_embeddings=True),
    "mistral_window": _plain("MistralConfig", sliding_window=4),
    "qwen3_window": _plain("Qwen3Config", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "gemma3": _plain("Gemma3TextConfig", sliding_window=4, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": _plain("GptOssConfig", **_EXPERTS, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "qwen3_next": _plain(
        "Qwen3NextConfig",
        **_EXPERTS,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "qwen3_5": _plain(
        "Qwen3_5TextConfig",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "mamba": _plain("MambaConfig", state_size=8),
    "mamba2": _plain("Mamba2Config", state_size=8, num_heads=8, n_groups=1, chunk_size=8),
    "falcon_h1": _plain("FalconH1Config", mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8),
    "jamba": _plain("JambaConfig", **_EXPERTS, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    "bamba": _plain("BambaConfig", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8),
    "lfm2": _plain("Lfm2Config", layer_types=["conv", "full_attention"], block_ff_dim=48, block_auto_adjust_ff_dim=False),
    "olmo_hybrid": _plain(
        "OlmoHybridConfig",
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
}
WINDOWS = ("mistral_window", "qwen3_window", "gemma3")
SINKS = ("gpt_oss",)
STATES = ("qwen3_next", "qwen3_5", "mamba", "mamba2", "falcon_h1", "jamba", "bamba", "lfm2", "olmo_hybrid")
