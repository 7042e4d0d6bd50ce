"""Logprob and entropy of the trained tokens from the last hidden states, without ever holding N x vocabulary logits.

The LM head runs over `chunk` positions at a time; backward computes each chunk's logits again instead of keeping them. Logits, softmax and
their sums are float32 whatever the model's dtype; the temperature is that of the sampling, so that a logprob here is comparable with the
engine's processed one.
"""

from __future__ import annotations

from typing import Any

import torch


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        chunk: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n = hidden.shape[0]
        logprobs = torch.empty(n, dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        log_norms = torch.empty_like(logprobs)
        head = _rounded(weight, dtype)
        for start in range(0, n, chunk):
            part = slice(start, min(start + chunk, n))
            logits = _logits(hidden[part], head, temperatures[part], dtype)
            log_norm = torch.logsumexp(logits, dim=-1)
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - log_norm
            log_norms[part] = log_norm
            probabilities = torch.softmax(logits, dim=-1)
            entropies[part] = log_norm - probabilities.mul_(logits).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, targets, temperatures, log_norms)
        ctx.chunk, ctx.dtype = chunk, dtype
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, temperatures, log_norms = ctx.saved_tensors
        head = _rounded(weight, ctx.dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, min(start + ctx.chunk, hidden.shape[0]))
            logits = _logits(hidden[part], head, temperatures[part], ctx.dtype)
            # d logprob / d logits = onehot(target) - softmax(logits), each row scaled by what comes from above
            scale = (grad[part].float() / temperatures[part])[:, None]
            grad_logits = logits.sub_(log_norms[part, None]).exp_().mul_(-scale)
            grad_logits.scatter_add_(-1, targets[part, None], scale)
            if grad_hidden is not None:
                grad_hidden[part] = (grad_logits @ head).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, _rounded(hidden[part], ctx.dtype))
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As float32, but with the values the engine has: rounded to the forward pass's dtype."""
    return tensor if tensor.dtype == dtype == torch.float32 else tensor.to(dtype).float()


def _logits(hidden: torch.Tensor, head: torch.Tensor, temperatures: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (_rounded(hidden, dtype) @ head.T).div_(temperatures[:, None])


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    chunk: int = 256,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropies), float32 [N], of `targets` [N] under softmax(hidden [N, D] @ weight [V, D]^T / temperatures [N]).

    Differentiable in `hidden` and `weight` through the logprobs; entropies carry no gradient. `dtype` is the forward pass's.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropies = _ChunkedLogprobs.apply(hidden, weight, targets, temperatures, chunk, dtype)
    return logprobs, entropies
