"""The processes of one learner: rank 0 decides, all do the same work on their parts, in the same order.

A collective that one rank enters and another does not would hang both, so nothing is decided twice: rank 0 alone talks to control and to
the engines, and it gives the others an `order` before each thing that all do together. Between orders they wait for nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from harness_rl.errors import LearnerError, UserError
from harness_rl.learner.context import ring_of_torch
from harness_rl.learner.spec import LearnerSpec


@dataclass(frozen=True)
class Ranks:
    """This process's place. Without a process group it is alone, and every method works on its value only."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    talk: Any = None
    """The gloo group of the orders and of what comes back; None when alone."""
    files: Any = None
    """Another one, of what is saved while the ranks go on."""
    context_size: int = 1
    """Ranks of a context group, side by side: they share a row that is longer than one of them may hold (see context.py)."""
    context: Any = None
    """This rank's group of them; None where `context_size` is 1."""

    @classmethod
    def join(cls, spec: LearnerSpec, env: Mapping[str, str] = os.environ) -> Ranks:
        """By torchrun's environment variables, which control sets too. Raises UserError when they do not fit the spec."""
        size = int(env.get("WORLD_SIZE", "1"))
        if size != spec.processes:
            raise UserError(
                f"learner: {size} processes were started and learner.processes is {spec.processes}; "
                f"start it with torchrun --nproc-per-node={spec.processes}"
            )
        cuda = spec.device == "cuda" or (spec.device == "auto" and torch.cuda.is_available())
        device = torch.device("cuda", int(env.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        if size == 1:
            if spec.offload_optimizer:  # torch shards over one rank too, but not without a group
                dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
            return cls(device=device)
        # Rank 0 waits for control, and has the others wait anew at each sign of its life; deadlines of steps and updates are control's.
        timeout = timedelta(seconds=spec.batch_timeout_s + spec.link_timeout_s)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
        talk, files = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
        context = None
        if spec.context_parallel > 1:
            ring_of_torch()
            shape = (size // spec.context_parallel, spec.context_parallel)
            context = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context")).get_group("context")
        return cls(dist.get_rank(), size, device, talk, files, spec.context_parallel, context)

    @property
    def context_rank(self) -> int:
        return self.rank % self.context_size

    def order(self, name: str, *arguments: Any) -> None:
        """Rank 0: what all do next."""
        if self.size > 1:
            self._share([name, arguments])

    def next_order(self) -> tuple[str, tuple[Any, ...]]:
        """The others: wait for it. Raises LearnerError when rank 0 has gone."""
        name, arguments = self._share([None, None])
        return name, arguments

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        return self._share([value])[0] if self.size > 1 else value

    def _share(self, values: list[Any]) -> list[Any]:
        try:
            dist.broadcast_object_list(values, src=0, group=self.talk)
        except RuntimeError as error:
            raise LearnerError(f"learner rank {self.rank}: another rank is gone: {error}") from None
        return values

    def gather(self, value: Any) -> list[Any]:
        """Rank 0: the values of all, by rank; the others: nothing."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found, dst=0, group=self.talk)
        return found or []

    def sum(self, value: float) -> float:
        """Over all ranks, in float64; the same number on each."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self.talk)
        return float(total)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


ALONE = Ranks()
