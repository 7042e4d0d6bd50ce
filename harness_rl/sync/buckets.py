"""Parameters in flat buckets: what is sent in which order, and the next bucket made ready while one is on its way.

The plan is made from the very tensors that are sent, and goes ahead of them. Sizes are of the dtype that is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Weights = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Gives the named parameters of the moment, each exactly once (a tied head is not a second parameter), on every rank in the same order."""


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """The full tensor of one that is spread over ranks (a collective: every rank asks for it), without its history."""
    full = getattr(parameter, "full_tensor", None)
    return (parameter if full is None else full()).detach()


def follow(weights: Weights) -> None:
    """What every rank but the sender does during a push: its part of each gather."""
    for _, parameter in weights():
        whole(parameter)


@dataclass
class Plan:
    names: list[str]
    shapes: list[list[int]]
    dtype: torch.dtype
    parameters: list[torch.Tensor]
    sizes: list[int]
    """Elements."""

    @classmethod
    def of(cls, weights: Weights, dtype: torch.dtype) -> Plan:
        named = list(weights())
        parameters = [parameter for _, parameter in named]
        return cls([n for n, _ in named], [list(p.shape) for p in parameters], dtype, parameters, [p.numel() for p in parameters])

    @property
    def metadata(self) -> dict[str, Any]:
        """What the receiver is told, in the words of vLLM's transfer engines."""
        name = str(self.dtype).removeprefix("torch.")
        return {"names": self.names, "dtype_names": [name] * len(self.names), "shapes": self.shapes}

    def flat(self, buckets: Sequence[int], device: torch.device | str) -> Iterator[torch.Tensor]:
        """[elements] of each bucket, cast to the dtype that is sent. `buckets`: how many parameters, in order, each holds."""
        at = 0
        for count in buckets:
            members = [whole(parameter) for parameter in self.parameters[at : at + count]]
            at += count
            yield torch.cat([tensor.reshape(-1).to(device=device, dtype=self.dtype) for tensor in members])


def up_to(sizes: Sequence[int], limit: int) -> list[int]:
    """How many tensors, in order, go into each bucket of at most `limit` (a larger tensor has its own)."""
    buckets: list[int] = []
    filled = limit
    for size in sizes:
        if filled + size > limit:
            buckets.append(0)
            filled = 0
        buckets[-1] += 1
        filled += size
    return buckets


def just_over(sizes: Sequence[int], limit: int) -> list[int]:
    """The same by the rule of vLLM's packed broadcast, which both ends must follow: a bucket ends with the tensor that takes it over."""
    buckets: list[int] = []
    filled = limit + 1
    for size in sizes:
        if filled > limit:
            buckets.append(0)
            filled = 0
        buckets[-1] += 1
        filled += size
    return buckets
