"""Context parallelism: a row that is longer than one rank may hold is split along the sequence over the ranks of its context group.

Each rank has its own tokens of the row in every layer, 1/N of them, and its activations; only attention sees the others', whose keys and
values go round the group in a ring (Liu et al., arXiv 2310.01889), and their gradients after them. Attention is causal, so a rank takes a
piece from the head of the row and the matching one from its tail, which makes the work of all alike. The loss is the whole row's on every
rank: logprobs are joined over the group before the objective sees them, and each rank back-propagates those of its own tokens.

The ring is torch's own, by names that torch calls private. They are in `ring_of_torch` and nowhere else, and another torch is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from harness_rl.errors import UserError
from harness_rl.learner.attention import UnsupportedModel
from harness_rl.learner.packing import Pack
from harness_rl.learner.recurrent import has_state

TESTED = ("2.13",)
"""Versions of torch whose ring has been seen to give one rank's numbers."""


@dataclass(frozen=True)
class TorchRing:
    forward: Callable[..., tuple[Any, ...]]
    """(group, seq_dim, op, query, key, value, is_causal, **of_op) -> (out, log-sum-exp, what else the op's last call gave)."""
    backward: Callable[..., tuple[Any, ...]]
    """(group, seq_dim, op, grad_out, name of it, query, key, value, out, log-sum-exp, is_causal, **of_op) -> the three gradients."""
    options: Any

    def set_for(self, dtype: torch.dtype) -> None:
        """torch has these once for the whole process. Sums are float32, for a float64 model float64; each rank holds the keys of one other
        at a time, not of all."""
        self.options.enable_load_balance = True
        self.options.convert_to_f32 = dtype != torch.float64
        self.options.rotate_method = type(self.options.rotate_method).ALL_TO_ALL


_FORWARD = ("group", "seq_dim", "op", "query", "key", "value", "is_causal", "kwargs")
_BACKWARD = ("group", "seq_dim", "op", "grad_out", "grad_out_name", "query", "key", "value", "out", "logsumexp", "is_causal", "kwargs")
_OPTIONS = ("enable_load_balance", "convert_to_f32", "rotate_method")


def ring_of_torch() -> TorchRing:
    """Raises UserError where this torch has no ring as it is used here."""
    try:
        found = import_module("torch.distributed.tensor.experimental._context_parallel._attention")
        ring = TorchRing(found._templated_ring_attention, found._templated_ring_attention_backward, found._cp_options)
        known = (
            (tuple(inspect.signature(ring.forward).parameters), _FORWARD),
            (tuple(inspect.signature(ring.backward).parameters), _BACKWARD),
            (tuple(name for name in _OPTIONS if hasattr(ring.options, name)), _OPTIONS),
            (hasattr(found._RotateMethod, "ALL_TO_ALL"), True),
        )
    except (ImportError, AttributeError) as error:
        raise _other_torch(str(error)) from None
    for there, expected in known:
        if there != expected:
            raise _other_torch(f"{expected} is now {there}")
    return ring


def _other_torch(difference: str) -> UserError:
    return UserError(
        f"learner: context_parallel uses the ring attention of torch {', '.join(TESTED)}, which torch {torch.__version__} has not "
        f"({difference}); install that one, or set learner.context_parallel = 1"
    )


def check(model: Any, dtype: torch.dtype, device: torch.device, ranks: int) -> None:
    """Raises UnsupportedModel, by name, for what the ring would compute wrongly or not at all."""
    refused = f"context_parallel = {ranks}: "
    config = model.config.get_text_config()
    if has_state(model):
        raise UnsupportedModel(refused + "layers that carry a state (linear attention, Mamba, convolutions) are not supported")
    types = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in types or (not types and getattr(config, "sliding_window", None)):
        raise UnsupportedModel(refused + "sliding windows are not supported")
    if any(name.split(".")[-1] == "sinks" for name, _ in model.named_parameters()):
        raise UnsupportedModel(refused + "attention sinks are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}  # of all layers, or of each kind of layer
    if by_length := kinds & {"dynamic", "longrope"}:
        raise UnsupportedModel(refused + f"{by_length.pop()} positions depend on a row's length, and each rank has a part; not supported")
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedModel(refused + f"on a GPU flash attention is used, which has no {dtype}; set learner.dtype = bfloat16")


def head_and_tail(tokens: int, rank: int, size: int) -> NDArray[np.int64]:
    """Places in a row of `tokens` that a rank of a group holds: the row is padded to 2 * `size` equal pieces, of which it has one from each
    end. Places from `tokens` on are padding."""
    piece = -(-tokens // (2 * size))
    first, last = rank * piece, (2 * size - 1 - rank) * piece
    return np.concatenate([np.arange(first, first + piece), np.arange(last, last + piece)])


@dataclass(frozen=True, eq=False)
class Piece:
    """What one rank has of a pack of one row: its tokens, and the loss terms that they predict."""

    ids: NDArray[np.int64]
    """[T / size], as each of the others has. Padding comes after the row: nothing of it sees the padding, and no term lies in it."""
    positions: NDArray[np.int64]
    terms: NDArray[np.int64]
    """[n] which of the pack's N terms; each is of exactly one rank."""
    predicts: NDArray[np.int64]
    """[n] index into `ids`."""

    @classmethod
    def of(cls, pack: Pack, rank: int, size: int) -> Piece:
        if len(pack.rows) != 1:
            raise ValueError(f"a pack of {len(pack.rows)} rows is not split over ranks")
        places = head_and_tail(pack.tokens, rank, size)
        inside = np.minimum(places, pack.tokens - 1)
        index = np.full(pack.tokens, -1, dtype=np.int64)
        index[places[places < pack.tokens]] = np.flatnonzero(places < pack.tokens)
        predicts = index[pack.predicts]
        terms = np.flatnonzero(predicts >= 0)
        return cls(np.where(places < pack.tokens, pack.tree.ids[inside], 0), pack.tree.positions[inside], terms, predicts[terms])


@dataclass(frozen=True, eq=False)
class Ring:
    """Attention of a piece to its row, in the place of `attention.Branches`."""

    group: Any
    torchs: TorchRing = field(default_factory=ring_of_torch)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if window is not None or sinks is not None or query.shape[-1] != value.shape[-1]:
            raise UnsupportedModel("context_parallel: windows, sinks and values of another width than the keys are not supported")
        out: torch.Tensor = _RingAttention.apply(query, key, value, self, scaling)
        return out


class _RingAttention(torch.autograd.Function):
    """[1, H, T, D] from queries [1, H, T, D], keys and values [1, H_kv, T, D]: this rank's, of N times T tokens."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring, scaling: float | None) -> torch.Tensor:
        ring.torchs.set_for(query.dtype)
        out, log_sums, *rest = ring.torchs.forward(ring.group, 2, _forward, query, key, value, is_causal=True, scale=scaling)
        ctx.save_for_backward(query, key, value, out, log_sums, *rest)
        ctx.settings = ring, scaling
        found: torch.Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sums, *rest = ctx.saved_tensors
        ring, scaling = ctx.settings
        ring.torchs.set_for(query.dtype)
        of_op: dict[str, Any] = {"scale": scaling, "rest": rest}
        above = (grad.contiguous(), "grad_out")
        found = ring.torchs.backward(ring.group, 2, _backward, *above, query, key, value, out, log_sums, is_causal=True, **of_op)
        return found[0], found[1], found[2], None, None


_CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_FORWARD_OP = torch.ops.aten._scaled_dot_product_flash_attention
_BACKWARD_OP = torch.ops.aten._scaled_dot_product_flash_attention_backward


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, ...]:
    """(out, log-sum-exp, what backward wants besides) of one block of keys. Heads of keys are repeated here, not in the ring's messages."""
    key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    if query.device.type == "cpu":
        out, log_sums = _CPU_FORWARD(query, key, value, 0.0, is_causal, scale=scale)
        return out, log_sums
    out, log_sums, _, _, _, _, seed, offset, _ = _FORWARD_OP(query, key, value, 0.0, is_causal, scale=scale)
    return out, log_sums, seed, offset


def _backward(
    *,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    rest: list[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Gradients of one block. `out` and `logsumexp` are those of all blocks, so that each block's share of the softmax is the right one."""
    heads = key.shape[1]
    key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    if query.device.type == "cpu":
        found = _CPU_BACKWARD(grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale)
    else:
        lengths = (None, None, query.shape[2], key.shape[2])
        found = _BACKWARD_OP(grad_out, query, key, value, out, logsumexp, *lengths, 0.0, is_causal, *rest, scale=scale)
    of_keys, of_values = (grad.unflatten(1, (heads, -1)).sum(2) for grad in found[1:])
    return found[0], of_keys, of_values


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1) if heads > tensor.shape[1] else tensor


def join(values: torch.Tensor, terms: torch.Tensor, count: int, group: Any) -> torch.Tensor:
    """[count] from each rank's [n] at `terms`: the same on all ranks of the group. Differentiable: each gets the gradient of its own."""
    found: torch.Tensor = _Join.apply(values, terms, count, group)
    return found


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, terms: torch.Tensor, count: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(terms)
        ctx.group = group
        joined = values.new_zeros(count).index_copy_(0, terms, values)
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """All take the first rank's: an objective that draws at random would give each rank another."""
        grad = grad.clone()
        dist.broadcast(grad, group=ctx.group, group_src=0)
        return grad[ctx.saved_tensors[0]], None, None, None
