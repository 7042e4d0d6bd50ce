"""Exact attention over a pack: every row attends to itself alone, causally.

Registered with transformers as one more attention implementation. It runs one SDPA call per row of the pack, so no mask over the whole pack
exists (a pack of T tokens would need T x T), and on CPU and GPU the same fused kernels serve it. Models whose attention needs more than
this (sinks, soft-capping) are refused by name rather than computed wrongly.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

IMPLEMENTATION = "harness_rl_rows"


class UnsupportedModel(ValueError):
    """The model has a part that packed rows would compute wrongly."""


def register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, rows_attention)


def rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    row_bounds: list[int] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]. `row_bounds` (R + 1 indices) is a keyword of the model's call."""
    if row_bounds is None:
        raise ValueError(f"{IMPLEMENTATION} needs row_bounds in the model's call")
    if softcap is not None or s_aux is not None or dropout:
        raise UnsupportedModel(f"{type(module).__name__}: attention with soft-capping, sinks or dropout is not supported")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # faster than enable_gqa, which on CPU leaves the fused kernel
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    pieces = []
    for start, end in pairwise(row_bounds):
        q, k, v = (t[:, :, start:end] for t in (query, key, value))
        window = _window_mask(end - start, sliding_window, query.device)
        pieces.append(scaled_dot_product_attention(q, k, v, attn_mask=window, is_causal=window is None, scale=scaling))
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """None where plain causal attention is the same; else [L, L] true where attended: the last `window` tokens up to and with itself."""
    if window is None or length <= window:
        return None
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    return (distance >= 0) & (distance < window)
