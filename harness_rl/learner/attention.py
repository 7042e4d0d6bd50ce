"""Exact attention over a prefix tree: every row attends to itself alone, causally, however much of it other rows share.

Registered with transformers as one more attention implementation. It runs one attention call per segment of the tree, whose keys are the
segment and all that comes before it on its rows' paths, so no mask over the whole pack exists (a pack of T tokens would need T x T), and on
CPU and GPU the same fused kernels serve it. The keys of a path are gathered for one segment at a time, and in backward again: what is kept
grows with the tokens of the tree, not with how often its paths repeat them. Models whose attention needs more than this (soft-capping) are
refused by name rather than computed wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class Attends(Protocol):
    """What the model's call is given as `branches`: a tree's (here), or the ring of a row that lies on several ranks (context.py)."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False)
class Branches:
    """Who attends to whom in a tree of T tokens and S segments; made once per pack, used by every layer."""

    lengths: list[int]
    """[S] tokens of each segment; they sum to T."""
    key_index: torch.Tensor
    """[K] for each segment in turn: the tokens before it on its path, then its own."""
    key_lengths: list[int]
    """[S]"""
    masks: dict[tuple[int, int, int | None, bool, torch.dtype | None], torch.Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: PrefixTree, device: torch.device | str = "cpu") -> Branches:
        lengths = [segment.end - segment.start for segment in tree.segments]
        keys = [np.concatenate([tree.context(s), np.arange(seg.start, seg.end)]) for s, seg in enumerate(tree.segments)]
        return cls(lengths, torch.from_numpy(np.concatenate(keys)).to(device), [len(k) for k in keys])

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[1, H, T, D] from query [1, H, T, D], key and value [1, H_kv, T, D]; `sinks` [H]."""
        width, sink = query.shape[-1], None
        if sinks is not None:
            scaling = width**-0.5 if scaling is None else scaling
            query, key, value, sink = _with_sink(query, key, value, sinks, scaling)
        out: torch.Tensor = _SegmentBySegment.apply(query, key, value, sink, self, window, scaling)
        return out[..., :width]

    def mask(self, segment: int, window: int | None, sink: bool, dtype: torch.dtype | None) -> torch.Tensor | None:
        """None where plain causal attention is the same; else [L, keys], true where attended: at most the last `window` tokens up to and
        with itself. With a `sink` [L, 1 + keys]: the first key is seen by all. With a `dtype` 0 where true and -inf elsewhere."""
        length, keys = self.lengths[segment], self.key_lengths[segment]
        shape = (length, keys, None if window is None or keys <= window else window, sink, dtype)
        if shape not in self.masks:
            seen = _causal(*shape[:4], self.key_index.device)
            if seen is not None and dtype is not None:
                seen = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
            self.masks[shape] = seen
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
    branches: Attends | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]. `branches` is a keyword of the model's call: who attends to whom.

    `s_aux` [H] are attention sinks: one more score in every softmax, of a key without a value (arXiv 2508.10925, section 2.2).
    """
    if branches is None:
        raise ValueError(f"{IMPLEMENTATION} needs branches in the model's call")
    if softcap is not None or dropout:
        raise UnsupportedModel(f"{type(module).__name__}: attention with soft-capping or dropout is not supported")
    if torch.is_autocast_enabled(query.device.type):
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(lower) for tensor in (query, key, value))
    return branches.attend(query, key, value, sliding_window, scaling, s_aux).transpose(1, 2).contiguous(), None


class _SegmentBySegment(torch.autograd.Function):
    """[1, H, T, D] from queries [1, H, T, D], keys and values [1, H_kv, T, D], and a key [1, H, 1, D] without a value, or None."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sink: torch.Tensor | None,
        branches: Branches,
        window: int | None,
        scaling: float | None,
    ) -> torch.Tensor:
        ctx.settings = branches, window, scaling
        ctx.fused = _fused(query, value)
        pieces, sums = [], []
        for segment, (q, index) in enumerate(_segments(branches, query)):
            k, v = _of_path(key, value, sink, index, query.shape[1])
            if ctx.fused:
                mask = branches.mask(segment, window, sink is not None, q.dtype)
                piece, log_sum = _CPU_FORWARD(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scaling)
                sums.append(log_sum)
            else:
                mask = branches.mask(segment, window, sink is not None, None)
                piece = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
            pieces.append(piece)
        out = torch.cat(pieces, dim=2)
        ctx.save_for_backward(query, key, value, sink, *([out, *sums] if ctx.fused else []))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sink, *kept = ctx.saved_tensors
        branches, window, scaling = ctx.settings
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        grad_sink = None if sink is None else torch.zeros_like(sink)
        parts = zip(_segments(branches, query), grad.split(branches.lengths, 2), grad_query.split(branches.lengths, 2), strict=True)
        outs = kept[0].split(branches.lengths, 2) if ctx.fused else ()
        for segment, ((q, index), above, into) in enumerate(parts):
            k, v = _of_path(key, value, sink, index, query.shape[1])
            if ctx.fused:
                mask = branches.mask(segment, window, sink is not None, q.dtype)
                found = _CPU_BACKWARD(above, q, k, v, outs[segment], kept[1 + segment], 0.0, mask is None, attn_mask=mask, scale=scaling)
            else:
                mask = branches.mask(segment, window, sink is not None, None)
                with torch.enable_grad():
                    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
                    piece = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
                found = torch.autograd.grad(piece, (q, k, v), above)
            into.copy_(found[0])
            of_keys, of_values = found[1], found[2]
            if grad_sink is not None:
                grad_sink += of_keys[:, :, :1]
                of_keys, of_values = of_keys[:, :, 1:], of_values[:, :, 1:]
            for into_all, one in ((grad_key, of_keys), (grad_value, of_values)):
                heads = into_all.shape[1]
                into_all.index_add_(2, index, one.unflatten(1, (heads, one.shape[1] // heads)).sum(2) if one.shape[1] > heads else one)
        return grad_query, grad_key, grad_value, grad_sink, None, None, None


def _fused(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Where attention's forward and backward are known apart; elsewhere backward computes the segment's attention again."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


_CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""What `scaled_dot_product_attention` is on a CPU; its own backward would keep the gathered keys."""


def _segments(branches: Branches, query: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(queries, indices of the keys) of each segment."""
    return zip(query.split(branches.lengths, 2), branches.key_index.split(branches.key_lengths), strict=True)


def _of_path(
    key: torch.Tensor, value: torch.Tensor, sink: torch.Tensor | None, index: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [1, heads, K, D] of a segment's path, the sink's first."""
    groups = heads // key.shape[1]
    k, v = (tensor.index_select(2, index) for tensor in (key, value))
    if groups > 1:  # faster than enable_gqa, which on CPU leaves the fused kernel
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    if sink is not None:
        k, v = torch.cat([sink, k], dim=2), torch.cat([torch.zeros_like(sink), v], dim=2)
    return k, v


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
