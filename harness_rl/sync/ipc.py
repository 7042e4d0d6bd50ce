"""Weights over CUDA IPC, for an engine that shares the learner's GPU: buckets go through one buffer that the engine maps.

vLLM's `ipc` backend takes the buffer's handle as a pickle, so the server must run with VLLM_ALLOW_INSECURE_SERIALIZATION=1, and its weight
routes must be reachable from the learner alone. The buffer is filled anew only when the engine has answered for the bucket before.
"""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from harness_rl.sync.buckets import Plan, Weights, up_to
from harness_rl.sync.client import EngineClient, SyncFailed
from harness_rl.sync.everywhere import GRACE_S, Calls

BUCKET_BYTES = 256 << 20


class SharedMemory(Protocol):
    """The GPU memory that both processes see."""

    def buffer(self, size: int) -> torch.Tensor:
        """[size] uint8."""

    def handle(self, buffer: torch.Tensor) -> dict[str, Any]:
        """What a receiver maps it by: {UUID of the GPU: arguments}."""

    def settle(self) -> None:
        """Returns when all that was written is there."""

    def release(self) -> None:
        """Give back what receivers have unmapped."""


class CudaMemory:
    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def handle(self, buffer: torch.Tensor) -> dict[str, Any]:
        from torch.multiprocessing.reductions import reduce_tensor

        uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
        return {uuid: reduce_tensor(buffer)[1]}

    def settle(self) -> None:
        torch.cuda.current_stream().synchronize()

    def release(self) -> None:
        torch.cuda.ipc_collect()


class IpcSender:
    def __init__(self, weights: Weights, dtype: torch.dtype, timeout_s: float, *, memory: SharedMemory | None = None) -> None:
        self._weights, self._dtype, self._timeout = weights, dtype, timeout_s
        self._memory = memory or CudaMemory()

    def connect(self, engines: Sequence[EngineClient]) -> None:
        deadline = time.monotonic() + self._timeout + GRACE_S
        worlds = Calls("connect", engines, lambda engine: engine.world_size()).start().wait(deadline)
        if sum(worlds) != 1:
            raise SyncFailed(
                f"sync backend ipc: the engines have {sum(worlds)} workers, the learner shares its GPU with one; "
                "use sync.backend = nccl where engines have GPUs of their own"
            )
        Calls("connect", engines, lambda engine: engine.init_transfer({"packed": True})).start().wait(deadline)

    def push(self, engines: Sequence[EngineClient]) -> dict[str, float]:
        self._memory.release()  # the last push's buffer
        deadline = time.monotonic() + self._timeout
        plan = Plan.of(self._weights, self._dtype)
        width = self._dtype.itemsize
        buckets = up_to(plan.sizes, BUCKET_BYTES // width)
        ends = [sum(buckets[: number + 1]) for number in range(len(buckets))]
        largest = max(sum(plan.sizes[end - count : end]) for end, count in zip(ends, buckets, strict=True)) * width
        buffer = self._memory.buffer(largest)
        handle = base64.b64encode(pickle.dumps(self._memory.handle(buffer))).decode()
        metadata = plan.metadata
        for end, count, flat in zip(ends, buckets, plan.flat(buckets, buffer.device), strict=True):
            part = slice(end - count, end)
            buffer[: flat.numel() * width].copy_(flat.view(torch.uint8))
            self._memory.settle()
            info = {key: value[part] for key, value in metadata.items()}
            info |= {"ipc_handles_pickled": handle, "tensor_sizes": [size * width for size in plan.sizes[part]]}
            Calls("update", engines, lambda engine, info=info: engine.update(info)).start().wait(deadline)  # type: ignore[misc]
        return {}

    def close(self) -> None:
        """The engine unmaps the buffer when an update is finished."""
        self._memory.release()
