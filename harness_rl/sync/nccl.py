"""Weights over NCCL, for engines on GPUs of their own: vLLM's own trainer end, driven by the same protocol as every transport.

vLLM is imported here and nowhere else in the learner. Its `send_weights` would also start and finish the update; those two calls are ours
(`finish` carries the version), so the client it gets passes on the other two only.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from harness_rl.sync.base import EngineClient, SyncFailed, rank_offsets
from harness_rl.sync.gloo import Weights


class NcclSender:
    def __init__(self, weights: Weights, dtype: torch.dtype, timeout_s: float, host: str = "127.0.0.1") -> None:
        self._weights, self._dtype, self._timeout, self._host = weights, dtype, timeout_s, host
        self._trainer: Any = None

    def connect(self, engines: Sequence[EngineClient]) -> None:
        try:
            from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        except ImportError as error:
            raise SyncFailed("sync backend nccl needs vllm in the learner's environment; install the [vllm] extra") from error
        offsets, world = rank_offsets(engine.world_size() for engine in engines)
        with socket.socket() as probe:
            probe.bind((self._host, 0))
            port = int(probe.getsockname()[1])
        self._trainer = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(rank=0, master_address=self._host, master_port=port, world_size=world),
            client=_FanOut(engines, offsets),
            source=_source(self._weights, self._dtype),
        )

    def push(self, engines: Sequence[EngineClient]) -> None:
        self._trainer.send_weights()
        torch.cuda.synchronize()

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.shutdown()
            self._trainer = None


class _FanOut:
    """vLLM's `VLLMWeightSyncClient`, over several servers."""

    def __init__(self, engines: Sequence[EngineClient], offsets: Sequence[int]) -> None:
        self._engines, self._offsets = engines, offsets

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = [{**init_info, "rank_offset": offset} for offset in self._offsets]
        with ThreadPoolExecutor(len(self._engines)) as pool:
            list(pool.map(lambda engine, info: engine.init_transfer(info), self._engines, infos))

    def update_weights(self, update_info: Any) -> None:
        with ThreadPoolExecutor(len(self._engines)) as pool:
            list(pool.map(lambda engine: engine.update(update_info), self._engines))

    def start_weight_update(self) -> None:
        """Done by `WeightSync`."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Done by `WeightSync`, with the version."""


def _source(weights: Weights, dtype: torch.dtype) -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, dtype, tuple(parameter.shape)) for name, parameter in weights()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, parameter in weights():
                yield name, parameter.detach().to(dtype)

    return Source()
