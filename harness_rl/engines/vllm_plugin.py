"""Loaded inside vLLM: the `gloo` weight-transfer backend, and repairs of its CPU build (a stale output head, waits, scores under LoRA).

vLLM's own backends need CUDA; this one speaks the same HTTP routes with the same life cycle, so that the CPU path is the GPU path with
another backend string. On CPU vLLM packs each linear layer into a private copy. A reload re-packs the layers it loads, but with tied
embeddings nothing loads `lm_head`: its packed copy keeps the old weights for ever, silently. `repair_tied_lm_head` packs it again.

Registration is by the `vllm.general_plugins` entry point, or without an installed distribution by
`--worker-extension-cls harness_rl.engines.vllm_plugin.WorkerExtension`. No vLLM or torch is imported before `register` runs; on a GPU
build it adds one unused name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

BACKEND = "gloo"
STORE_PREFIX = "harness-rl-weights"
DTYPES = ("float32", "bfloat16", "float16")
WAKE_MS = 2


def check_plan(names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], buckets: Sequence[int]) -> None:
    """The announced plan of one update; both sides check it before the first byte moves. Raises ValueError.

    `names`, `dtype_names` and `shapes` describe the tensors in the order they are sent; `buckets` says how many of them, one after the
    other, travel in each flat buffer. All tensors of a bucket have one dtype.
    """
    if not (len(names) == len(dtype_names) == len(shapes) == sum(buckets)) or not names:
        raise ValueError(f"weight plan: {len(names)} names, {len(dtype_names)} dtypes, {len(shapes)} shapes, {sum(buckets)} in buckets")
    if len(set(names)) != len(names):
        raise ValueError("weight plan: a name appears twice")
    for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
        if dtype not in DTYPES:
            raise ValueError(f"weight plan: {name} has dtype {dtype!r}; {', '.join(DTYPES)} are known")
        if any(not isinstance(n, int) or n < 0 for n in shape):
            raise ValueError(f"weight plan: {name} has shape {shape!r}")
    at = 0
    for count in buckets:
        if count < 1 or len(set(dtype_names[at : at + count])) != 1:
            raise ValueError("weight plan: a bucket is empty or mixes dtypes")
        at += count


def open_group(host: str, port: int, rank: int, world_size: int, timeout_s: float) -> tuple[Any, Any]:
    """(process group, store) of a bare gloo group: neither vLLM's nor the learner's default group is touched. Rank 0 holds the store."""
    from datetime import timedelta

    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    return dist.ProcessGroupGloo(dist.PrefixStore(STORE_PREFIX, store), rank, world_size, timeout), store


def repair_tied_lm_head(model: Any) -> bool:
    """Pack the output head again from the weight it shares with the embedding; True when there was a packed copy to repair."""
    head = getattr(model, "lm_head", None)
    if head is None or not hasattr(head, "cpu_linear") or not head.weight.numel():
        return False
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    return True


def wait_without_spinning() -> bool:
    """On CPU, let vLLM's engine process sleep while its worker computes; True where that was done now.

    It waits for each forward pass in a loop of `sched_yield` for up to a second, which on two cores takes a core from the worker and the
    learner (measured: 60 % of one). Its queue also wakes readers by a socket, but may lose a wake-up, so they look again every `WAKE_MS`.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or SpinCondition.__init__.__defaults__ != (1,):
        return False
    SpinCondition.__init__.__defaults__ = (0,)
    wait = SpinCondition.wait

    def wait_briefly(self: Any, timeout_ms: int | None = None) -> None:
        wait(self, WAKE_MS if timeout_ms is None else min(timeout_ms, WAKE_MS))

    SpinCondition.wait = wait_briefly
    return True


def score_prompts_beside_adapters() -> bool:
    """On CPU, let a server with LoRA score prompts, which the proof of a sync does; True where that was done now.

    vLLM applies the output head's part of the adapters to as many rows as it samples tokens, and its engine ends when a prompt has more.
    Where no adapter has such a part (ours never do) there is nothing to apply, and it is left out.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.platforms import current_platform

    apply = PunicaWrapperCPU.add_lora_logits
    if not current_platform.is_cpu() or apply.__module__ == __name__:
        return False

    def add_lora_logits(self: Any, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: Any, **kwargs: Any) -> None:
        if len(x.view(-1, x.shape[-1])) == len(self.sampler_indices) or lora_b_stacked.any():
            apply(self, y, x, lora_a_stacked, lora_b_stacked, scale, **kwargs)

    PunicaWrapperCPU.add_lora_logits = add_lora_logits
    return True


def register() -> None:
    """Add the backend to vLLM's registry. Called again in the same process (vLLM loads its plugins more than once) it does nothing."""
    wait_without_spinning()
    score_prompts_beside_adapters()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with suppress(ValueError):  # already registered
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "GlooWeightTransferEngine")


@cache
def _engine_class() -> Any:
    """The engine class; built on first use because its bases are vLLM's."""
    from dataclasses import dataclass

    import torch
    from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class GlooInitInfo(WeightTransferInitInfo):
        master_address: str
        master_port: int
        world_size: int
        rank_offset: int = 1
        timeout_s: float = 300.0
        """Of the rendezvous and of each broadcast."""

    @dataclass
    class GlooUpdateInfo(WeightTransferUpdateInfo):
        names: list[str]
        dtype_names: list[str]
        shapes: list[list[int]]
        buckets: list[int]

        def __post_init__(self) -> None:
            check_plan(self.names, self.dtype_names, self.shapes, self.buckets)

    class GlooWeightTransferEngine(WeightTransferEngine):
        init_info_cls = GlooInitInfo
        update_info_cls = GlooUpdateInfo
        group: Any = None
        store: Any = None

        def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
            self.shutdown()  # a restarted learner opens a new group
            parallel = self.parallel_config
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
            self.group, self.store = open_group(
                init_info.master_address, init_info.master_port, rank, init_info.world_size, init_info.timeout_s
            )

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))  # the base method would synchronise an accelerator

        def receive_weights(self, update_info: GlooUpdateInfo) -> None:
            if self.group is None:
                raise RuntimeError("gloo weight transfer: /init_weight_transfer_engine was not called")
            tensors = list(zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True))
            plan, at = [], 0
            for count in update_info.buckets:
                plan.append(tensors[at : at + count])
                at += count
            pending = self._receive(plan[0])
            for bucket, following in zip(plan, [*plan[1:], None], strict=True):
                flat, work = pending
                work.wait()
                if following is not None:
                    pending = self._receive(following)  # moves while this bucket is loaded
                sizes = [math.prod(shape) for _, _, shape in bucket]
                parts = zip(bucket, flat.split(sizes), strict=True)
                self.model.load_weights([(name, part.view(shape)) for (name, _, shape), part in parts])

        def _receive(self, bucket: list[tuple[str, str, list[int]]]) -> tuple[Any, Any]:
            """A fresh buffer each time: vLLM keeps views of it until the layer is whole."""
            numel = sum(math.prod(shape) for _, _, shape in bucket)
            flat = torch.empty(numel, dtype=getattr(torch, bucket[0][1]))
            return flat, self.group.broadcast([flat], torch.distributed.BroadcastOptions())

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            repair_tied_lm_head(self.model)

        def shutdown(self) -> None:
            self.group = self.store = None

    return GlooWeightTransferEngine


class _WorkerExtension:
    """Mixed into vLLM's worker class; adds nothing to it."""


def __getattr__(name: str) -> Any:
    """What vLLM resolves by name in its worker. Asking for `WorkerExtension` registers the backend; importing this module does not."""
    if name == "GlooWeightTransferEngine":
        return _engine_class()
    if name == "WorkerExtension":
        register()
        return _WorkerExtension
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
