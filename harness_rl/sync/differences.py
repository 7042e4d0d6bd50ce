"""Which weights differ from what the engines hold: told apart by their bits, so that what is applied there is exactly what is here.

What is held is known from what was sent before and from nothing else. It lies in host memory, in the dtype that is sent: 2 bytes for each
weight in bfloat16. A tensor that is not held is named whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from harness_rl.errors import LearnerError, UserError
from harness_rl.sync.buckets import Plan, whole

ADDRESSABLE = 1 << 31
"""Elements of one tensor that a flat int32 index reaches."""
_BITS = {2: torch.int16, 4: torch.int32}

Held = dict[str, torch.Tensor]
"""Name -> [elements] of the dtype that is sent, on the host."""


@dataclass(frozen=True)
class Patch:
    """New values of some elements of one tensor."""

    name: str
    shape: list[int]
    indices: torch.Tensor
    """[n] int32, flat, ascending."""
    values: torch.Tensor
    """[n] of the dtype that is sent."""

    @property
    def nbytes(self) -> int:
        return len(self.indices) * width(self.values.dtype)


def width(dtype: torch.dtype) -> int:
    """Bytes that one changed weight takes on its way."""
    return torch.int32.itemsize + dtype.itemsize


def check_addressable(plan: Plan) -> None:
    """Raises UserError for a tensor that is too large."""
    for name, size in zip(plan.names, plan.sizes, strict=True):
        if size > ADDRESSABLE:
            raise UserError(
                f"sync.backend = sparse_nccl: {name} has {size} elements, and a patch names elements by int32 (at most {ADDRESSABLE}); "
                "use sync.backend = nccl"
            )


def differences(plan: Plan, held: Held, device: torch.device, piece: int) -> Iterator[Patch]:
    """Patches on `device` of at most `piece` elements, tensor by tensor, each ascending; none is empty. `held` follows what was given out,
    so it is true again only when all of them are.

    Raises LearnerError for a weight that is not a number: a patch cannot carry it, because NaN stands for `as it was` there.
    """
    for name, shape, parameter in zip(plan.names, plan.shapes, plan.parameters, strict=True):
        flat = whole(parameter).reshape(-1)
        known = name in held
        if not known:
            held[name] = torch.empty(len(flat), dtype=plan.dtype)
        for start in range(0, len(flat), piece):
            new = flat[start : start + piece].to(device=device, dtype=plan.dtype)
            old = held[name][start : start + piece]
            if known:
                at = (_bits(new) != _bits(old.to(device))).nonzero().squeeze(1)
                if not len(at):
                    continue
                values = new[at]
                old[at.cpu()] = values.cpu()
            else:
                at, values = torch.arange(len(new), device=device), new
                old[:] = values
            if torch.isnan(values).any():
                raise LearnerError(f"learner: {name} holds a weight that is not a number; go on from an earlier checkpoint")
            yield Patch(name, shape, (at + start).to(torch.int32), values)


def in_chunks(patches: Iterable[Patch], limit: int) -> Iterator[list[Patch]]:
    """In order, at most `limit` bytes together (a larger patch alone); what is of one tensor in a chunk is one patch."""
    chunk: list[Patch] = []
    filled = 0
    for patch in patches:
        if chunk and filled + patch.nbytes > limit:
            yield _joined(chunk)
            chunk, filled = [], 0
        chunk.append(patch)
        filled += patch.nbytes
    if chunk:
        yield _joined(chunk)


def _joined(chunk: list[Patch]) -> list[Patch]:
    joined: list[Patch] = []
    for name, group in groupby(chunk, lambda patch: patch.name):
        parts = list(group)
        if len(parts) == 1:
            joined += parts
            continue
        indices, values = torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
        joined.append(Patch(name, parts[0].shape, indices, values))
    return joined


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.dtype.itemsize])
