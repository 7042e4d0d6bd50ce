"""Weights over NCCL, for engines on GPUs of their own: the learner is rank 0, the workers of all servers the rest.

Buckets are packed by vLLM's rule, so that its own `nccl` backend takes them; two buffers, so that the next bucket is gathered while one is
sent. Everything waits by polling, so that a worker that died ends the push at the deadline and not in the driver.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from harness_rl.sync.buckets import Plan, Weights, just_over
from harness_rl.sync.client import EngineClient, StepLate, SyncFailed
from harness_rl.sync.everywhere import GRACE_S, Calls
from harness_rl.sync.gloo import rank_offsets
from harness_rl.sync.nccl_library import Communicator, load_library

BUCKET_BYTES = 256 << 20
BUFFERS = 2
POLL_S = 0.001


class Device(Protocol):
    """What the sender asks of CUDA."""

    where: torch.device

    def use(self) -> Any:
        """A context that makes it the thread's device."""

    def stream(self) -> Any:
        """A new one, with `cuda_stream` (its handle)."""

    def on(self, stream: Any) -> Any:
        """A context in which torch works on `stream`, after all that was asked of the GPU before."""

    def mark(self, stream: Any) -> Any:
        """An event after what `stream` has to do now, with `query()`."""


class Cuda:
    def __init__(self) -> None:
        self.where = torch.device("cuda", torch.cuda.current_device())

    def use(self) -> Any:
        return torch.cuda.device(self.where)

    def stream(self) -> Any:
        return torch.cuda.Stream()

    def on(self, stream: Any) -> Any:
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def mark(self, stream: Any) -> Any:
        event = torch.cuda.Event()
        event.record(stream)
        return event


class NcclSender:
    def __init__(
        self, weights: Weights, dtype: torch.dtype, timeout_s: float, *, library: Any = None, device: Device | None = None
    ) -> None:
        self._weights, self._dtype, self._timeout = weights, dtype, timeout_s
        self._library, self._device = library, device
        self._group: Communicator | None = None
        self._streams: list[Any] = []

    def connect(self, engines: Sequence[EngineClient]) -> None:
        device = self._device = self._device or Cuda()
        deadline = time.monotonic() + self._timeout + GRACE_S
        offsets, world = rank_offsets(Calls("connect", engines, lambda engine: engine.world_size()).start().wait(deadline))
        group = self._group = Communicator(self._library or load_library(), world)
        info = {
            "nccl_unique_id_b64": base64.b64encode(group.unique_id).decode(),
            "world_size": world,
            "packed": True,
            "packed_buffer_size_bytes": BUCKET_BYTES,
            "packed_num_buffers": BUFFERS,
        }
        ranks = dict(zip(engines, offsets, strict=True))
        joins = Calls("connect", engines, lambda engine: engine.init_transfer({**info, "rank_offset": ranks[engine]})).start()
        try:
            group.join(device.use, self._timeout)
        except SyncFailed:
            joins.check(GRACE_S)  # an engine's own words say more
            raise
        self._streams = [device.stream() for _ in range(BUFFERS)]
        one = torch.zeros(1, device=device.where)
        group.all_reduce(one.data_ptr(), 1, self._streams[0].cuda_stream)
        self._await(device.mark(self._streams[0]), joins, deadline, "connect")
        joins.wait(deadline)

    def push(self, engines: Sequence[EngineClient]) -> None:
        device, group = self._device, self._group
        if device is None or group is None:
            raise SyncFailed("sync step 'update': the nccl sender is not connected")
        deadline = time.monotonic() + self._timeout
        plan = Plan.of(self._weights, self._dtype)
        buckets = just_over([size * self._dtype.itemsize for size in plan.sizes], BUCKET_BYTES)
        updates = Calls("update", engines, lambda engine: engine.update(plan.metadata)).start()
        flats = plan.flat(buckets, device.where)
        sent: list[tuple[Any, torch.Tensor]] = []
        """(event, buffer) of what is on its way: the buffer must live as long."""
        for number in range(len(buckets)):
            if len(sent) == BUFFERS:
                self._await(sent.pop(0)[0], updates, deadline, "update")
            stream = self._streams[number % BUFFERS]
            with device.on(stream):
                flat = next(flats)
                group.broadcast(flat.data_ptr(), flat.numel() * flat.element_size(), stream.cuda_stream)
            sent.append((device.mark(stream), flat))
        for event, _ in sent:
            self._await(event, updates, deadline, "update")
        updates.wait(deadline + GRACE_S)

    def _await(self, event: Any, calls: Calls[None], deadline: float, step: str) -> None:
        while not event.query():
            calls.check()
            if time.monotonic() > deadline:
                raise StepLate(f"sync step {step!r}: a worker did not take its part in {self._timeout:g} s")
            time.sleep(POLL_S)

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None
