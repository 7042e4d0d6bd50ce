"""Patches of weights: whatever changes, and whatever fails, vLLM's own receiver ends with the learner's bits.

No GPU is here: NCCL and CUDA streams are stand-ins, everything else of the receiver is vLLM's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine, serve
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_helpers import VOCABULARY, tiny_llama, tiny_policy
from patched_engine import LateDevice, LateNccl, Packed, Patched, Receiver, regroup, use_cpu
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLWeightTransferUpdateInfo
from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch, load_checkpoint_weight_patches
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from harness_rl.errors import LearnerError, UserError
from harness_rl.learner.main import Learner
from harness_rl.learner.policy import Policy
from harness_rl.learner.spec import LearnerSpec
from harness_rl.sync import sparse_nccl
from harness_rl.sync.base import WeightSync
from harness_rl.sync.buckets import Plan
from harness_rl.sync.client import EngineClient, StepLate, SyncFailed
from harness_rl.sync.differences import ADDRESSABLE, check_addressable
from harness_rl.sync.sparse_nccl import SparseNcclSender
from harness_rl.sync.verify import LogprobProbe

SIZES = {"embed": (5, 4), "q": (4, 4), "k": (2, 4), "v": (2, 4), "norm": (4,)}
COUNT = sum(math.prod(shape) for shape in SIZES.values())
BF16_WIDTH = 6


class Rig:
    """A learner's float32 weights, a sender and two servers that start with other weights."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, timeout_s: float = 30.0, servers: int = 2) -> None:
        self.weights = {name: torch.randn(shape) for name, shape in SIZES.items()}
        self.dtype, self.nccl = dtype, LateNccl()
        self.device = LateDevice(self.nccl)
        self.engines: list[Any] = [Patched(f"http://{n}", self.nccl, Packed(SIZES, dtype)) for n in range(servers)]
        self.sender = SparseNcclSender(lambda: self.weights.items(), dtype, timeout_s, library=self.nccl, device=self.device)
        self.sender.connect(self.engines)

    def push(self) -> float:
        """The share of the weights that was sent."""
        return self.sender.push(self.engines)["changed_share"]

    def sent(self) -> dict[str, bytes]:
        return {name: bits(tensor.to(self.dtype)) for name, tensor in self.weights.items()}

    def check(self) -> None:
        for engine in self.engines:
            for name, wanted in self.sent().items():
                assert bits(engine.model.of(name, len(self.weights[name]))) == wanted, name
            assert engine.model.head is engine.model.embed

    def announced(self) -> list[dict[str, int]]:
        """Name -> weights, of each update call of the first server, which are then forgotten."""
        calls = [dict(zip(info["names"], info["num_updates_list"], strict=True)) for info in self.engines[0].updates]
        assert all(len(info["names"]) == len(call) for info, call in zip(self.engines[0].updates, calls, strict=True))
        for engine in self.engines:
            engine.updates.clear()
        return calls


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def elements(data: dict[str, bytes], width: int) -> list[bytes]:
    whole = b"".join(data.values())
    return [whole[at : at + width] for at in range(0, len(whole), width)]


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch)


ODD = [0.0, -0.0, 1.0, float("inf"), -float("inf"), 1e-40, 65504.0, 1.0 + 2**-9, 3.389e38]
CHANGE = st.tuples(st.sampled_from(list(SIZES)), st.integers(0, 19), st.sampled_from(ODD) | st.floats(-2, 2, width=32))


@settings(max_examples=15, deadline=None)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    limit=st.sampled_from([29, 60, 100_000]),
    steps=st.lists(st.lists(CHANGE, max_size=8), min_size=1, max_size=4),
)
def test_any_sequence_of_changes_ends_in_the_learners_bits(dtype: torch.dtype, limit: int, steps: list[list[Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_cpu(patch)
        patch.setattr(sparse_nccl, "CHUNK_BYTES", limit)
        rig = Rig(dtype)
        assert rig.push() == 1.0
        rig.check()
        for step in steps:
            before = elements(rig.sent(), dtype.itemsize)
            for name, at, value in step:
                flat = rig.weights[name].view(-1)
                flat[at % len(flat)] = value
            changed = sum(old != new for old, new in zip(before, elements(rig.sent(), dtype.itemsize), strict=True))
            assert rig.push() == changed / COUNT
            rig.check()
        for info in rig.engines[0].updates:
            assert sum(info["num_updates_list"]) * (4 + dtype.itemsize) <= limit


def test_a_zero_that_changes_its_sign_is_a_change_and_a_step_too_small_for_the_dtype_is_none() -> None:
    rig = Rig()
    rig.weights["norm"].fill_(0.0)
    rig.weights["v"].fill_(1.0)
    rig.push()
    rig.weights["norm"][1] = -0.0
    rig.weights["v"] += 2.0**-10  # bfloat16 has 8 bits of precision
    rig.announced()
    assert rig.push() == 1 / COUNT and rig.announced() == [{"norm": 1}]
    rig.check()


def test_chunks_end_at_their_limit_and_name_a_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten weights a chunk. Whole: embed 20 = 10 + 10, q 16 = 10 + 6, k 8 does not fit beside 6, nor v 8 beside 8, nor norm 4 beside 8."""
    monkeypatch.setattr(sparse_nccl, "CHUNK_BYTES", 10 * BF16_WIDTH)
    rig = Rig()
    rig.push()
    assert rig.announced() == [{"embed": 10}, {"embed": 10}, {"q": 10}, {"q": 6}, {"k": 8}, {"v": 8}, {"norm": 4}]
    flat = rig.weights["embed"].view(-1)
    flat[[0, 9, 10, 19]] += 1.0
    rig.weights["q"].view(-1)[:6] += 1.0
    rig.push()
    assert rig.announced() == [{"embed": 4, "q": 6}]
    flat[:] += 1.0
    rig.weights["q"].view(-1)[[9, 15]] += 1.0
    rig.push()
    assert rig.announced() == [{"embed": 10}, {"embed": 10}, {"q": 2}]
    flat[[0, 10]] += 1.0
    rig.weights["q"] += 1.0
    rig.push()
    assert rig.announced() == [{"embed": 2}, {"q": 10}, {"q": 6}]
    rig.check()


def test_where_nothing_changed_nothing_is_announced() -> None:
    """vLLM takes no empty list, and its own trainer sends nothing then."""
    rig = Rig()
    rig.push()
    rig.announced()
    assert rig.push() == 0.0 and rig.announced() == []
    with pytest.raises(ValueError, match="cannot be empty"):
        SparseNCCLWeightTransferUpdateInfo([], [], [], [])


def test_a_new_connection_begins_with_every_weight() -> None:
    rig = Rig()
    rig.push()
    rig.engines[1] = Patched("http://again", rig.nccl, Packed(SIZES, rig.dtype))
    rig.sender.close()
    rig.sender.connect(rig.engines)
    assert rig.push() == 1.0
    rig.check()
    info = NCCLWeightTransferInitInfo(**rig.engines[1].init)
    assert info.nccl_unique_id_bytes == bytes(range(128)) and (info.rank_offset, info.world_size, info.packed) == (2, 3, False)


@pytest.mark.parametrize("call", [0, 1, 2])
def test_what_follows_a_push_that_failed_names_every_weight(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_nccl, "CHUNK_BYTES", 10 * BF16_WIDTH)
    rig = Rig()
    rig.push()
    rig.announced()
    for tensor in rig.weights.values():
        tensor += 1.0
    engine = rig.engines[1]
    take, taken = engine.receiver.update, []

    def refuse(info: dict[str, Any]) -> None:
        if len(taken) == call:
            raise SyncFailed("engine http://1/update_weights: HTTP 500: out of memory")
        taken.append(info)
        take(info)

    monkeypatch.setattr(engine.receiver, "update", refuse)
    with pytest.raises(SyncFailed, match=r"'update'.*out of memory"):
        rig.push()
    monkeypatch.undo()
    use_cpu(monkeypatch)
    regroup(rig.nccl, rig.engines)
    assert rig.push() == 1.0
    rig.check()


def test_a_weight_that_is_not_a_number_is_named_before_vllm_refuses_it() -> None:
    rig = Rig()
    rig.push()
    rig.weights["k"][1, 2] = float("nan")
    with pytest.raises(LearnerError, match="learner: k holds a weight that is not a number"):
        rig.push()
    rig.weights["k"][1, 2] = 0.5
    assert rig.push() == 1.0
    rig.check()
    patch = CheckpointWeightPatch("norm", (4,), rig.dtype, torch.tensor([float("nan")]), torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match="NaN"):
        load_checkpoint_weight_patches(rig.engines[0].model, [patch])


def test_a_tensor_that_int32_does_not_reach_is_refused_by_name() -> None:
    def plan(size: int) -> Plan:
        return Plan.of(lambda: [("small", torch.zeros(3)), ("experts", torch.empty(size, device="meta"))], torch.bfloat16)

    check_addressable(plan(2**31))
    assert np.iinfo(np.int32).max == ADDRESSABLE - 1
    with pytest.raises(UserError, match=r"experts has 2147483649 elements.*use sync\.backend = nccl"):
        check_addressable(plan(2**31 + 1))
    sender = SparseNcclSender(lambda: [("experts", torch.empty(2**31 + 1, device="meta"))], torch.bfloat16, 1.0)
    sender._group = SimpleNamespace(device=None)  # type: ignore[assignment]
    with pytest.raises(UserError, match="experts"):
        sender.push([])


def test_a_worker_that_hangs_ends_the_push_at_its_deadline_and_none_is_sent_without_a_group() -> None:
    rig = Rig(timeout_s=0.3)
    rig.device.stuck = True
    with pytest.raises(StepLate, match=r"sync step 'update': a worker did not take its part in 0\.3 s"):
        rig.push()
    regroup(rig.nccl, rig.engines)
    rig.sender.close()
    with pytest.raises(SyncFailed, match="not connected"):
        rig.push()


class PatchedServer(FakeEngine):
    """The server of the protocol's tests, with vLLM's receiver of patches in it."""

    def __init__(self, nccl: LateNccl) -> None:
        super().__init__(Policy.wrap(tiny_llama(7, tied=True), torch.float32).model)
        self.nccl, self.names = nccl, set[str]()

    def load_weights(self, weights: Any) -> set[str]:
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            default_weight_loader(parameters[name], tensor)
            self.names.add(name)
        return set(self.names)

    def on_init_weight_transfer_engine(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.nccl.lines.clear()
        self.group = Receiver(self.nccl, self)
        return 200, {}

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.group.update(body["update_info"])
        return 200, {}


@pytest.fixture
def protocol() -> Iterator[tuple[WeightSync, PatchedServer, Policy]]:
    nccl, policy = LateNccl(), tiny_policy()
    server = PatchedServer(nccl)
    with serve(server) as url:
        sender = SparseNcclSender(policy.model.named_parameters, torch.float32, 20.0, library=nccl, device=LateDevice(nccl))
        probe = LogprobProbe(exact=True, bound=1e-4, first_bound=0.15, tokens=50)
        sync = WeightSync([EngineClient(url, "policy", 20.0)], sender, probe, policy.score_prompts)
        yield sync, server, policy
        sync.close()


PROMPTS = [np.random.default_rng(0).integers(0, VOCABULARY, 60).astype(np.int32)]


def test_the_protocol_proves_patches_and_starts_whole_when_an_engine_may_have_lost_them(protocol: Any) -> None:
    sync, server, policy = protocol
    parameters = dict(policy.model.named_parameters())
    share = lambda version: sync.sync(version, PROMPTS).counts["changed_share"]  # noqa: E731
    assert share("k-0") == 1.0 and "lm_head.weight" not in server.names
    name, parameter = next(iter(parameters.items()))
    parameter.data.view(-1)[:7] += 0.5
    count = sum(p.numel() for p in parameters.values())
    assert share("k-1") == 7 / count
    assert torch.equal(server.model.get_output_embeddings().weight, policy.model.get_output_embeddings().weight)

    fresh = Policy.wrap(tiny_llama(8, tied=True), torch.float32).model
    server.model, server.head, server.weight_version = fresh, fresh.get_output_embeddings().weight.detach().clone(), "default"
    assert share("k-1") == 1.0

    parameter.data.view(-1)[:7] += 0.5
    server.faults.add("wrong_version")  # the patches arrived, and the update could not be finished
    with pytest.raises(SyncFailed, match="k-2"):
        share("k-2")
    server.faults.clear()
    assert share("k-2") == 1.0
    for name, wanted in parameters.items():
        assert bits(dict(server.model.named_parameters())[name].detach()) == bits(wanted.detach()), name


def test_the_learner_takes_the_sender_that_its_spec_names(tmp_path: Any) -> None:
    learner: Any = Learner.__new__(Learner)
    learner.spec = LearnerSpec(model="-", run_dir=str(tmp_path), lineage="k", sync_backend="sparse_nccl", engines=["http://127.0.0.1:9"])
    learner.policy, learner.probe = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32), None
    assert type(learner._build_sync()._sender) is SparseNcclSender
