"""Exact attention over a prefix tree: every row attends to itself alone, causally, however much of it other rows share.

Registered with transformers as one more attention implementation. It runs one SDPA call per segment of the tree, whose keys are the segment
and all that comes before it on its rows' paths, so no mask over the whole pack exists (a pack of T tokens would need T x T), and on CPU and
GPU the same fused kernels serve it. Models whose attention needs more than this (soft-capping) are refused by name rather than computed
wrongly.
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
    masks: dict[tuple[int, int, int | None, bool], torch.Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: PrefixTree, device: torch.device | str = "cpu") -> Branches:
        lengths = [segment.end - segment.start for segment in tree.segments]
        keys = [np.concatenate([tree.context(s), np.arange(seg.start, seg.end)]) for s, seg in enumerate(tree.segments)]
        return cls(lengths, torch.from_numpy(np.concatenate(keys)).to(device), [len(k) for k in keys])

    def mask(self, segment: int, window: int | None, sink: bool = False) -> torch.Tensor | None:
        """None where plain causal attention is the same; else [L, keys], true where attended: at most the last `window` tokens up to and
        with itself. With a `sink` [L, 1 + keys]: the first key is seen by all."""
        length, keys = self.lengths[segment], self.key_lengths[segment]
        shape = (length, keys, None if window is None or keys <= window else window, sink)
        if shape not in self.masks:
            self.masks[shape] = _causal(*shape, self.key_index.device)
        return self.masks[shape]


def _causal(length: int, keys: int, window: int | None, sink: bool, device: torch.device) -> torch.Tensor | None:
    if length == keys and window is None and not sink:
        return None
    distance = torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return torch.cat([seen.new_ones(length, 1), seen], dim=1) if sink else seen


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
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]. `branches` is a keyword of the model's call.

    `s_aux` [H] are attention sinks: one more score in every softmax, of a key without a value (arXiv 2508.10925, section 2.2).
    """
    if branches is None:
        raise ValueError(f"{IMPLEMENTATION} needs branches in the model's call")
    if softcap is not None or dropout:
        raise UnsupportedModel(f"{type(module).__name__}: attention with soft-capping or dropout is not supported")
    width, sink = query.shape[-1], None
    if s_aux is not None:
        scaling = width**-0.5 if scaling is None else scaling
        query, key, value, sink = _with_sink(query, key, value, s_aux, scaling)
    # One gather and one split: slices of the whole would each get a gradient of its full size.
    key, value = (t.index_select(2, branches.key_index) for t in (key, value))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # faster than enable_gqa, which on CPU leaves the fused kernel
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    pieces = []
    parts = zip(query.split(branches.lengths, 2), key.split(branches.key_lengths, 2), value.split(branches.key_lengths, 2), strict=True)
    for segment, (q, k, v) in enumerate(parts):
        mask = branches.mask(segment, sliding_window, sink is not None)
        if sink is not None:
            k, v = torch.cat([sink, k], dim=2), torch.cat([torch.zeros_like(sink), v], dim=2)
        pieces.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling))
    return torch.cat(pieces, dim=2)[..., :width].transpose(1, 2).contiguous(), None


_SINK_WIDTH = 8  # fused kernels want head widths that are multiples of 8


def _with_sink(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, s_aux: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All three widened, and the sink as a key [1, H, 1, D + 8]: a query's score with it is the head's `s_aux`, with others unchanged.

    A softmax over scores and sink is what the fused kernels compute when the sink is a key; and its gradient comes with it.
    """
    wide = torch.nn.functional.pad(query, (0, _SINK_WIDTH))
    wide[..., query.shape[-1]] = 1.0
    sink = torch.nn.functional.pad((s_aux.to(query.dtype) / scaling)[None, :, None, None], (query.shape[-1], _SINK_WIDTH - 1))
    return wide, *(torch.nn.functional.pad(t, (0, _SINK_WIDTH)) for t in (key, value)), sink
