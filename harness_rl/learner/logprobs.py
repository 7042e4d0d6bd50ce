"""Logprob and entropy of the trained tokens from the last hidden states, without ever holding N x vocabulary logits.

The LM head runs over `chunk` hidden states at a time, once for all tokens that one of them predicts; backward computes each chunk's logits
again instead of keeping them. Logits, softmax and their sums are float32 whatever the model's dtype (float64 for a float64 model, which
tests use); the temperature is that of the sampling, so that a logprob here is comparable with the engine's processed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class _ChunkedLogprobs(torch.autograd.Function):
    """Over H hidden states, each at one temperature; term n is `targets[n]` after hidden state `owner[n]`, and `owner` never falls."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        temperatures: torch.Tensor,
        owner: torch.Tensor,
        targets: torch.Tensor,
        chunk: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(len(targets), dtype=_sums(dtype), device=hidden.device)
        entropies = torch.empty_like(logprobs)
        log_norms = torch.empty(len(hidden), dtype=_sums(dtype), device=hidden.device)
        head = _rounded(weight, dtype)
        room, more_room = (head.new_empty(min(chunk, len(hidden)), len(head)) for _ in range(2))
        for states, terms in _chunks(owner, len(hidden), chunk):
            logits = _logits(hidden[states], head, temperatures[states], dtype, room)
            log_norms[states] = log_norm = torch.logsumexp(logits, dim=-1)
            local = owner[terms] - states.start
            logits.sub_(log_norm[:, None])
            logprobs[terms] = logits[local, targets[terms]]
            entropies[terms] = -torch.exp(logits, out=more_room[: len(logits)]).mul_(logits).sum(dim=-1)[local]
        ctx.save_for_backward(hidden, weight, temperatures, owner, targets, log_norms)
        ctx.chunk, ctx.dtype = chunk, dtype
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, temperatures, owner, targets, log_norms = ctx.saved_tensors
        head = _rounded(weight, ctx.dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=_sums(ctx.dtype), device=weight.device) if ctx.needs_input_grad[1] else None
        # d logprob / d logits = onehot(target) - softmax(logits), each term scaled by what comes from above
        scale = grad.to(_sums(ctx.dtype)) / temperatures[owner]
        scales = torch.zeros_like(log_norms).index_add_(0, owner, scale)
        room = head.new_empty(min(ctx.chunk, len(hidden)), len(head))
        for states, terms in _chunks(owner, len(hidden), ctx.chunk):
            logits = _logits(hidden[states], head, temperatures[states], ctx.dtype, room)
            grad_logits = logits.sub_(log_norms[states, None]).exp_().mul_(-scales[states, None])
            grad_logits.index_put_((owner[terms] - states.start, targets[terms]), scale[terms], accumulate=True)
            if grad_hidden is not None:
                grad_hidden[states] = (grad_logits @ head).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, _rounded(hidden[states], ctx.dtype))
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None


def _chunks(owner: torch.Tensor, states: int, chunk: int) -> Iterator[tuple[slice, slice]]:
    """(hidden states, their terms) of each chunk."""
    starts = list(range(0, states, chunk))
    bounds = torch.searchsorted(owner, torch.tensor([*starts, states], device=owner.device)).tolist()
    for n, start in enumerate(starts):
        yield slice(start, min(start + chunk, states)), slice(bounds[n], bounds[n + 1])


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the dtype of the sums, but with the values the engine has: rounded to the forward pass's dtype."""
    return tensor.to(dtype).to(_sums(dtype))


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logits(hidden: torch.Tensor, head: torch.Tensor, temperatures: torch.Tensor, dtype: torch.dtype, room: torch.Tensor) -> torch.Tensor:
    """In `room` [chunk, V], which every chunk writes over: fresh memory for each would cost more than the product."""
    return torch.mm(_rounded(hidden, dtype), head.T, out=room[: len(hidden)]).div_(temperatures[:, None])


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    predicts: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    chunk: int = 256,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropies), float32 [N], of `targets` [N] under softmax(hidden[predicts] [N, D] @ weight [V, D]^T / temperatures [N]).

    `hidden` is [T, D]; a state that predicts several tokens at one temperature goes through the head once. Differentiable in `hidden` and
    `weight` through the logprobs; entropies carry no gradient. `dtype` is the forward pass's.
    """
    pairs, owner = torch.unique(torch.stack([predicts.double(), temperatures.double()]), dim=1, return_inverse=True)
    order = torch.argsort(owner, stable=True)
    states = hidden.index_select(0, pairs[0].long())
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropies = _ChunkedLogprobs.apply(states, weight, pairs[1].to(_sums(dtype)), owner[order], targets[order], chunk, dtype)
    back = torch.argsort(order)
    return logprobs[back], entropies[back]
