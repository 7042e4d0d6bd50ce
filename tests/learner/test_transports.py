"""The GPU transports at their border: what engines are told, what goes to NCCL and into shared memory, and what a worker reads from it.

No GPU is here: NCCL, CUDA streams and shared memory are stand-ins. That the real ones take it is shown on hardware only.
"""

from __future__ import annotations

import base64
import ctypes
import pickle
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

from harness_rl.sync import ipc, nccl
from harness_rl.sync.buckets import Plan, just_over, up_to
from harness_rl.sync.client import StepLate, SyncFailed
from harness_rl.sync.ipc import IpcSender
from harness_rl.sync.nccl import NcclSender
from harness_rl.sync.nccl_library import Communicator, load_library

pytestmark = pytest.mark.filterwarnings("ignore:Tensor")  # of vLLM: one that is larger than its bucket
TENSORS = [(f"layer.{n}.weight", torch.randn(n + 1, 3)) for n in range(7)] + [("norm", torch.randn(5))]


def weights() -> list[tuple[str, torch.Tensor]]:
    return TENSORS


class Engine:
    """The client of one server, without the server."""

    timeout_s = 2.0

    def __init__(self, url: str, workers: int = 1) -> None:
        self.url, self.workers = url, workers
        self.init: dict[str, Any] = {}
        self.updates: list[dict[str, Any]] = []
        self.refuse = self.hang = False
        self.taken = threading.Event()

    def world_size(self) -> int:
        return self.workers

    def init_transfer(self, info: dict[str, Any]) -> None:
        self.init = info

    def update(self, info: dict[str, Any]) -> None:
        if self.refuse:
            raise SyncFailed(f"engine {self.url}/update_weights: HTTP 500: out of memory")
        self.updates.append(info)
        if self.hang:
            self.taken.wait(30)


class Stream:
    cuda_stream = 17


class Event:
    def __init__(self, device: FakeDevice) -> None:
        self.device, self.age = device, 0

    def query(self) -> bool:
        self.age += 1
        return not self.device.stuck and self.age > 2


class FakeDevice:
    where = torch.device("cpu")
    stuck = False

    def use(self) -> Any:
        return nullcontext()

    def stream(self) -> Stream:
        return Stream()

    def on(self, stream: Stream) -> Any:
        return nullcontext()

    def mark(self, stream: Stream) -> Event:
        return Event(self)


class FakeNccl:
    """Reads the bytes that a broadcast would send at the moment it is asked for."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.world = self.aborted = 0
        self.reduced: list[float] = []
        self.absent = False
        self.code = 0

    def ncclGetUniqueId(self, out: Any) -> int:
        ctypes.memmove(ctypes.addressof(out._obj), bytes(range(128)), 128)
        return 0

    def ncclCommInitRank(self, comm: Any, world: int, unique_id: Any, rank: int) -> int:
        assert bytes(unique_id) == bytes(range(128)) and rank == 0
        if self.absent:
            time.sleep(30)
        comm._obj.value, self.world = 4242, world
        return self.code

    def ncclAllReduce(self, a: int, b: int, count: int, dtype: int, op: int, comm: Any, stream: int) -> int:
        assert (a, dtype, op, comm.value, stream) == (b, 7, 0, 4242, 17)
        self.reduced += list((ctypes.c_float * count).from_address(a))
        return 0

    def ncclBroadcast(self, a: int, b: int, count: int, dtype: int, root: int, comm: Any, stream: int) -> int:
        assert (a, dtype, root, comm.value, stream) == (b, 1, 0, 4242, 17)
        self.sent.append(ctypes.string_at(a, count))
        return 0

    def ncclCommAbort(self, comm: Any) -> int:
        self.aborted = comm.value
        return 0


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "BUCKET_BYTES", 60)
    monkeypatch.setattr(ipc, "BUCKET_BYTES", 60)


def unpacked(chunks: list[bytes], info: dict[str, Any], buckets: list[int]) -> dict[str, torch.Tensor]:
    """What vLLM's worker reads from the buckets."""
    found, at = {}, 0
    for data, count in zip(chunks, buckets, strict=True):
        part = slice(at, at + count)
        at += count
        dtypes = [getattr(torch, name) for name in info["dtype_names"][part]]
        sizes = [int(torch.Size(shape).numel()) * dtype.itemsize for shape, dtype in zip(info["shapes"][part], dtypes, strict=True)]
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found.update(unpack_tensor(flat, info["names"][part], info["shapes"][part], dtypes, sizes))
    return found


def as_vllm_packs(limit: int, dtype: torch.dtype) -> list[int]:
    """How many tensors vLLM's producer, and so its consumer, puts into each bucket."""
    counts, tensors = [], iter((name, tensor.to(dtype)) for name, tensor in TENSORS)
    while (chunk := pack_tensors(tensors, lambda item: item[1], limit)) is not None:
        counts.append(len(chunk.names))
    return counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("limit", [1, 12, 59, 60, 61, 10_000])
def test_e17_buckets_are_those_that_vllm_makes(limit: int, dtype: torch.dtype) -> None:
    assert just_over([tensor.numel() * dtype.itemsize for _, tensor in TENSORS], limit) == as_vllm_packs(limit, dtype)


def test_buckets_of_at_most() -> None:
    assert up_to([3, 3, 3, 20, 1], 7) == [2, 1, 1, 1] and up_to([], 7) == [] and just_over([3, 5, 1], 7) == [2, 1]


@pytest.mark.usefixtures("small_buckets")
def test_nccl_sends_what_the_workers_of_all_servers_unpack() -> None:
    library, engines = FakeNccl(), [Engine("http://a", 2), Engine("http://b", 4)]
    sender = NcclSender(weights, torch.bfloat16, 2.0, library=library, device=FakeDevice())
    sender.connect(engines)
    assert [engine.init["rank_offset"] for engine in engines] == [1, 3] and library.world == 7 and library.reduced == [0.0]
    assert all(base64.b64decode(e.init["nccl_unique_id_b64"]) == bytes(range(128)) and "master_address" not in e.init for e in engines)
    assert all(e.init["packed"] and e.init["packed_buffer_size_bytes"] == 60 and e.init["world_size"] == 7 for e in engines)
    sender.push(engines)
    for engine in engines:
        (info,) = engine.updates
        read = unpacked(library.sent, info, as_vllm_packs(60, torch.bfloat16))
        assert list(read) == [name for name, _ in TENSORS]
        assert all(torch.equal(read[name], tensor.to(torch.bfloat16)) for name, tensor in TENSORS)
    sender.close()
    deadline = time.monotonic() + 5
    while not library.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert library.aborted == 4242


def test_what_vllm_takes_is_what_it_is_told() -> None:
    """The payloads build vLLM's own dataclasses."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    library, engine = FakeNccl(), Engine("http://a")
    sender = NcclSender(weights, torch.float32, 2.0, library=library, device=FakeDevice())
    sender.connect([engine])
    assert NCCLWeightTransferInitInfo(**engine.init).nccl_unique_id_bytes == bytes(range(128))
    NCCLWeightTransferUpdateInfo(**Plan.of(weights, torch.float32).metadata)
    IpcSender(weights, torch.float32, 2.0, memory=SharedBytes()).connect([engine])
    assert IPCWeightTransferInitInfo(**engine.init).packed is True


def test_workers_that_do_not_join_end_the_connect_at_its_deadline() -> None:
    library = FakeNccl()
    library.absent = True
    sender = NcclSender(weights, torch.float32, 0.3, library=library, device=FakeDevice())
    with pytest.raises(SyncFailed, match="did not join the NCCL group of 2"):
        sender.connect([Engine("http://a")])


def test_a_worker_that_dies_in_the_push_ends_it_at_its_deadline_or_with_its_own_words() -> None:
    library, device, engine = FakeNccl(), FakeDevice(), Engine("http://a")
    sender = NcclSender(weights, torch.float32, 0.3, library=library, device=device)
    sender.connect([engine])
    device.stuck = engine.hang = True
    with pytest.raises(StepLate, match="sync step 'update': a worker did not take its part"):
        sender.push([engine])
    engine.taken.set()
    engine.refuse = True
    with pytest.raises(SyncFailed, match=r"'update'.*out of memory"):
        sender.push([engine])


def test_nccl_says_what_failed() -> None:
    library = FakeNccl()
    library.code = 5
    with pytest.raises(SyncFailed, match="ncclCommInitRank gave 5"):
        NcclSender(weights, torch.float32, 2.0, library=library, device=FakeDevice()).connect([Engine("http://a")])
    with pytest.raises(SyncFailed, match=r"libnothing\.so cannot be loaded"):
        load_library("libnothing.so")
    assert len(Communicator(FakeNccl(), 2).unique_id) == 128


class SharedBytes:
    """One buffer in host memory."""

    def __init__(self) -> None:
        self.current = torch.empty(0, dtype=torch.uint8)
        self.settled = self.released = 0

    def buffer(self, size: int) -> torch.Tensor:
        self.current = torch.empty(size, dtype=torch.uint8)
        return self.current

    def handle(self, buffer: torch.Tensor) -> dict[str, Any]:
        return {"GPU-0": ("rebuild", buffer.numel())}

    def settle(self) -> None:
        self.settled += 1

    def release(self) -> None:
        self.released += 1


class Mapping(Engine):
    """Reads the shared buffer when it is told to, as vLLM's worker does."""

    def __init__(self, memory: SharedBytes) -> None:
        super().__init__("http://shared")
        self.memory, self.read = memory, {}

    def update(self, info: dict[str, Any]) -> None:
        super().update(info)
        assert list(pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))) == ["GPU-0"]
        content = self.memory.current[: sum(info["tensor_sizes"])]
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        parts = unpack_tensor(content, info["names"], info["shapes"], dtypes, info["tensor_sizes"])
        self.read.update({name: tensor.clone() for name, tensor in parts})


@pytest.mark.usefixtures("small_buckets")
def test_ipc_fills_the_buffer_anew_only_when_the_engine_has_read_it() -> None:
    memory = SharedBytes()
    engine = Mapping(memory)
    sender = IpcSender(weights, torch.bfloat16, 2.0, memory=memory)
    sender.connect([engine])
    sender.push([engine])
    assert len(engine.updates) == memory.settled > 2 and len(memory.current) <= 60
    assert list(engine.read) == [name for name, _ in TENSORS]
    assert all(torch.equal(engine.read[name], tensor.to(torch.bfloat16)) for name, tensor in TENSORS)
    sender.close()
    assert memory.released == 2


def test_ipc_is_for_one_worker_on_one_gpu() -> None:
    with pytest.raises(SyncFailed, match="2 workers, the learner shares its GPU with one"):
        IpcSender(weights, torch.float32, 2.0, memory=SharedBytes()).connect([Engine("http://a", 2)])
