"""vLLM's own receiver of patches, on a CPU: its classes, checks and loading. NCCL and CUDA, between it and a sender, are stand-ins."""

from __future__ import annotations

import ctypes
import json
import queue
import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_transports import Engine, Event, FakeDevice, FakeNccl, Stream
from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLWeightTransferEngine
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from harness_rl.sync.client import SyncFailed

Line = queue.SimpleQueue[tuple[int, bytes] | None]
LOADING = threading.Lock()
"""vLLM replaces `Tensor.copy_` of the whole process while it loads."""


def use_cpu(patch: pytest.MonkeyPatch) -> None:
    """For as long as `patch` lasts vLLM's receiver finds a stream."""
    patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())


class LateNccl(FakeNccl):
    """Reads a sender's memory as late as NCCL may: when the event after the broadcast comes."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[int, int, int]] = []
        self.lines: list[Line] = []

    def ncclBroadcast(self, a: int, b: int, count: int, dtype: int, root: int, comm: Any, stream: int) -> int:
        assert (a, root, comm.value, stream) == (b, 0, 4242, 17) and count > 0
        self.pending.append((a, count, dtype))
        return 0

    def deliver(self) -> None:
        for address, count, dtype in self.pending:
            size = {ncclDataTypeEnum.ncclInt32: 4, ncclDataTypeEnum.ncclFloat32: 4}.get(dtype, 2)
            for line in self.lines:
                line.put((dtype, ctypes.string_at(address, count * size)))
        self.pending.clear()

    def new_line(self) -> Line:
        self.lines.append(queue.SimpleQueue())
        return self.lines[-1]


class LateEvent(Event):
    def query(self) -> bool:
        came = super().query()
        if came:
            self.device.nccl.deliver()
        return came


class LateDevice(FakeDevice):
    def __init__(self, nccl: LateNccl) -> None:
        self.nccl = nccl

    def mark(self, stream: Stream) -> Event:
        return LateEvent(self)


class Group:
    """One worker's end of the NCCL group."""

    device = torch.device("cpu")

    def __init__(self, nccl: LateNccl) -> None:
        self.line = nccl.new_line()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Stream) -> None:
        found = self.line.get(timeout=60)
        if found is None:
            raise SyncFailed("the NCCL group was aborted")
        kind, data = found
        if (kind, len(data), src) != (ncclDataTypeEnum.from_torch(tensor.dtype), tensor.nbytes, 0):
            raise SyncFailed(f"a broadcast of {len(data)} bytes of kind {kind} where the worker takes {tensor.nbytes} of {tensor.dtype}")
        ctypes.memmove(tensor.data_ptr(), data, len(data))


class Receiver:
    """vLLM's, of a model with `load_weights`."""

    def __init__(self, nccl: LateNccl, model: Any) -> None:
        nothing = SimpleNamespace(parallel_config=None, model_config=None)
        self.engine = SparseNCCLWeightTransferEngine(nothing, nothing, torch.device("cpu"), model)
        self.engine.model_update_group = Group(nccl)

    def update(self, info: dict[str, Any]) -> None:
        with LOADING:
            self.engine.receive_weights(self.engine.parse_update_info(json.loads(json.dumps(info))))


class Packed(torch.nn.Module):
    """As vLLM keeps a model: query, key and value in one parameter, the head tied to the embedding."""

    def __init__(self, sizes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        parts = [sizes[name] for name in ("q", "k", "v")]
        self.starts = {name: sum(part[0] for part in parts[:n]) for n, name in enumerate(("q", "k", "v"))}
        self.qkv = torch.nn.Parameter(torch.randn(sum(part[0] for part in parts), parts[0][1]).to(dtype))
        self.embed = torch.nn.Parameter(torch.randn(sizes["embed"]).to(dtype))
        self.norm = torch.nn.Parameter(torch.randn(sizes["norm"]).to(dtype))
        self.head = self.embed

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            target = self.qkv.data.narrow(0, self.starts[name], len(tensor)) if name in self.starts else getattr(self, name)
            default_weight_loader(target, tensor)
            loaded.add(name)
        return loaded

    def of(self, name: str, rows: int) -> torch.Tensor:
        return (self.qkv.narrow(0, self.starts[name], rows) if name in self.starts else getattr(self, name)).detach()


class Patched(Engine):
    """A server with one such worker, reached without HTTP."""

    def __init__(self, url: str, nccl: LateNccl, model: Any) -> None:
        super().__init__(url)
        self.model, self.receiver, self.running = model, Receiver(nccl, model), 0

    def update(self, info: dict[str, Any]) -> None:
        super().update(info)
        if self.running:
            raise SyncFailed("an update was announced before the one before was taken")
        self.running += 1
        try:
            self.receiver.update(info)
        finally:
            self.running -= 1


def regroup(nccl: LateNccl, engines: list[Patched]) -> None:
    """What a new connection does to the workers: what was under way ends, and nothing of it comes any more."""
    nccl.pending.clear()
    for line in nccl.lines:
        line.put(None)
    nccl.lines.clear()
    deadline = time.monotonic() + 30
    while any(engine.running for engine in engines):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for engine in engines:
        engine.receiver.engine.model_update_group = Group(nccl)
