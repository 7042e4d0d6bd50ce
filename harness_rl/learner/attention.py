"""Exact attention over a prefix tree: every row attends to itself alone, causally, however much of it other rows share.

Registered with transformers as one more attention implementation. It runs one SDPA call per segment of the tree, whose keys are the segment
and all that comes before it on its rows' paths, so no mask over the whole pack exists (a pack of T tokens would need T x T), and on CPU and
GPU the same fused kernels serve it. Models whose attention needs more than this (sinks, soft-capping) are refused by name rather than
computed wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from harness_rl.learner.prefixtree import PrefixTree

IMPLEMENTATION = "harness_rl_tree"


class UnsupportedModel(ValueError):
    """The model has a part that packed rows would compute wrongly."""


def register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, tree_attention)


@dataclass(frozen=True, eq=False)
class Branches:
    """Who attends to whom in a tree of T tokens and S segments; made once per pack, used by every layer."""

    lengths: list[int]
    """[S] tokens of each segment; they sum to T."""
    key_index: torch.Tensor
    """[K] for each segment in turn: the tokens before it on its path, then its own."""
    key_lengths: list[int]
    """[S]"""
    masks: dict[tuple[int, int, int | None], torch.Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: PrefixTree, device: torch.device | str = "cpu") -> Branches:
        lengths = [segment.end - segment.start for segment in tree.segments]
        keys = [np.concatenate([tree.context(s), np.arange(seg.start, seg.end)]) for s, seg in enumerate(tree.segments)]
        return cls(lengths, torch.from_numpy(np.concatenate(keys)).to(device), [len(k) for k in keys])

    def mask(self, segment: int, window: int | None) -> torch.Tensor | None:
        """None where plain causal attention is the same; else [L, keys], true where attended: at most the last `window` tokens up to and
        with itself."""
        length, keys = self.lengths[segment], self.key_lengths[segment]
        shape = (length, keys, None if window is None or keys <= window else window)
        if shape not in self.masks:
            self.masks[shape] = _causal(*shape, self.key_index.device)
        return self.masks[shape]


def _causal(length: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    if length == keys and window is None:
        return None
    distance = torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    branches: Branches | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]. `branches` is a keyword of the model's call."""
    if branches is None:
        raise ValueError(f"{IMPLEMENTATION} needs branches in the model's call")
    if softcap is not None or s_aux is not None or dropout:
        raise UnsupportedModel(f"{type(module).__name__}: attention with soft-capping, sinks or dropout is not supported")
    # One gather and one split: slices of the whole would each get a gradient of its full size.
    key, value = (t.index_select(2, branches.key_index) for t in (key, value))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # faster than enable_gqa, which on CPU leaves the fused kernel
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    pieces = []
    parts = zip(query.split(branches.lengths, 2), key.split(branches.key_lengths, 2), value.split(branches.key_lengths, 2), strict=True)
    for segment, (q, k, v) in enumerate(parts):
        mask = branches.mask(segment, sliding_window)
        pieces.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling))
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None
