"""The NCCL group of the learner (rank 0) and the workers of all servers: joining it, sending into it, and waiting for it by polling, so
that a worker that died ends a step at its deadline and not in the driver.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from harness_rl.sync.client import EngineClient, StepLate, SyncFailed
from harness_rl.sync.everywhere import GRACE_S, Calls
from harness_rl.sync.gloo import rank_offsets
from harness_rl.sync.nccl_library import BFLOAT16, FLOAT16, FLOAT32, INT32, UINT8, Communicator, load_library

STREAMS = 2
POLL_S = 0.001
KINDS = {torch.uint8: UINT8, torch.int32: INT32, torch.float16: FLOAT16, torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


class Device(Protocol):
    """What a sender asks of CUDA."""

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


class NcclGroup:
    """`timeout_s`: of joining; a push has a deadline of its own, which it gives to `wait`."""

    def __init__(self, timeout_s: float, library: Any = None, device: Device | None = None) -> None:
        self._timeout, self._library, self._device = timeout_s, library, device
        self._joined: Communicator | None = None
        self.streams: list[Any] = []
        """`STREAMS` of them, once connected."""

    def connect(self, engines: Sequence[EngineClient], **info: Any) -> None:
        """Join with all their workers, who are told `info` besides. Raises SyncFailed of step `connect`."""
        device = self._device = self._device or Cuda()
        deadline = time.monotonic() + self._timeout + GRACE_S
        offsets, world = rank_offsets(Calls("connect", engines, lambda engine: engine.world_size()).start().wait(deadline))
        joined = self._joined = Communicator(self._library or load_library(), world)
        told = {"nccl_unique_id_b64": base64.b64encode(joined.unique_id).decode(), "world_size": world, **info}
        ranks = dict(zip(engines, offsets, strict=True))
        joins = Calls("connect", engines, lambda engine: engine.init_transfer({**told, "rank_offset": ranks[engine]})).start()
        try:
            joined.join(device.use, self._timeout)
        except SyncFailed:
            joins.check(GRACE_S)  # an engine's own words say more
            raise
        self.streams = [device.stream() for _ in range(STREAMS)]
        one = torch.zeros(1, device=device.where)
        joined.all_reduce(one.data_ptr(), 1, self.streams[0].cuda_stream)
        self.wait(device.mark(self.streams[0]), joins, deadline, "connect")
        joins.wait(deadline)

    @property
    def device(self) -> Device:
        """Raises SyncFailed before `connect` and after `close`."""
        if self._device is None or self._joined is None:
            raise SyncFailed("sync step 'update': the sender is not connected to the engines' NCCL group")
        return self._device

    def send(self, tensor: torch.Tensor, stream: Any) -> None:
        """Only starts it: the tensor (contiguous, of a dtype in `KINDS`) must live until an event after it has come."""
        assert self._joined is not None
        self._joined.broadcast(tensor.data_ptr(), tensor.numel(), KINDS[tensor.dtype], stream.cuda_stream)

    def wait(self, event: Any, calls: Calls[None], deadline: float, step: str) -> None:
        """Until `event` has come. Raises SyncFailed as soon as one of the engines' `calls` failed, StepLate at `deadline` (monotonic)."""
        while not event.query():
            calls.check()
            if time.monotonic() > deadline:
                raise StepLate(f"sync step {step!r}: a worker did not take its part in {self._timeout:g} s")
            time.sleep(POLL_S)

    def close(self) -> None:
        if self._joined is not None:
            self._joined.abort()
            self._joined = None
