"""Weights over NCCL, for engines on GPUs of their own: every weight in every push.

Buckets are packed by vLLM's rule, so that its own `nccl` backend takes them; two buffers, so that the next bucket is gathered while one is
sent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from harness_rl.sync.buckets import Plan, Weights, just_over
from harness_rl.sync.client import EngineClient
from harness_rl.sync.everywhere import GRACE_S, Calls
from harness_rl.sync.nccl_group import STREAMS, Device, NcclGroup

BUCKET_BYTES = 256 << 20


class NcclSender:
    def __init__(
        self, weights: Weights, dtype: torch.dtype, timeout_s: float, *, library: Any = None, device: Device | None = None
    ) -> None:
        self._weights, self._dtype, self._timeout = weights, dtype, timeout_s
        self._group = NcclGroup(timeout_s, library, device)

    def connect(self, engines: Sequence[EngineClient]) -> None:
        self._group.connect(engines, packed=True, packed_buffer_size_bytes=BUCKET_BYTES, packed_num_buffers=STREAMS)

    def push(self, engines: Sequence[EngineClient]) -> dict[str, float]:
        group, device = self._group, self._group.device
        deadline = time.monotonic() + self._timeout
        plan = Plan.of(self._weights, self._dtype)
        buckets = just_over([size * self._dtype.itemsize for size in plan.sizes], BUCKET_BYTES)
        updates = Calls("update", engines, lambda engine: engine.update(plan.metadata)).start()
        flats = plan.flat(buckets, device.where)
        sent: list[tuple[Any, torch.Tensor]] = []
        """(event, buffer) of what is on its way: the buffer must live as long."""
        for number in range(len(buckets)):
            if len(sent) == STREAMS:
                group.wait(sent.pop(0)[0], updates, deadline, "update")
            stream = group.streams[number % STREAMS]
            with device.on(stream):
                flat = next(flats).view(torch.uint8)
                group.send(flat, stream)
            sent.append((device.mark(stream), flat))
        for event, _ in sent:
            group.wait(event, updates, deadline, "update")
        updates.wait(deadline + GRACE_S)
        return {}

    def close(self) -> None:
        self._group.close()
