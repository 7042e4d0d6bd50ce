"""Weights over gloo, for engines on CPU: the learner is rank 0 of a bare process group, vLLM's workers the rest (`engines.vllm_plugin`).

Tensors travel in flat buckets in the order of `named_parameters`, cast to the engine's dtype here. The plan (names, dtypes, shapes,
buckets) is made from the very tensors that are sent, goes ahead of them, and both sides check it before the first byte.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from harness_rl.engines.vllm_plugin import check_plan, open_group
from harness_rl.sync.base import EngineClient, SyncFailed, rank_offsets

BUCKET_BYTES = 32 << 20
Weights = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Gives the named parameters of the moment, each exactly once (a tied head is not a second parameter)."""


class GlooSender:
    def __init__(self, weights: Weights, dtype: torch.dtype, timeout_s: float, host: str = "127.0.0.1") -> None:
        self._weights, self._dtype, self._timeout, self._host = weights, dtype, timeout_s, host
        self._group: Any = None
        self._store: Any = None

    def connect(self, engines: Sequence[EngineClient]) -> None:
        offsets, world = rank_offsets(engine.world_size() for engine in engines)
        port = _free_port(self._host)
        info = {"master_address": self._host, "master_port": port, "world_size": world, "timeout_s": self._timeout}
        with ThreadPoolExecutor(len(engines)) as pool:  # both sides rendezvous at once
            joins = [pool.submit(e.init_transfer, {**info, "rank_offset": o}) for e, o in zip(engines, offsets, strict=True)]
            try:
                self._group, self._store = open_group(self._host, port, 0, world, self._timeout)
            except (RuntimeError, dist.DistError) as error:
                raise SyncFailed(_first_failure(joins) or f"gloo rendezvous on {self._host}:{port} failed: {error}") from error
            for join in joins:
                join.result()

    def push(self, engines: Sequence[EngineClient]) -> None:
        tensors = [(name, parameter.detach()) for name, parameter in self._weights()]
        buckets = _buckets([tensor.numel() for _, tensor in tensors], BUCKET_BYTES // self._dtype.itemsize)
        plan: dict[str, Any] = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(self._dtype).removeprefix("torch.")] * len(tensors),
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "buckets": buckets,
        }
        check_plan(**plan)
        pool = ThreadPoolExecutor(len(engines))
        try:
            updates = [pool.submit(engine.update, plan) for engine in engines]
            at = 0
            for count in buckets:
                members = [tensor for _, tensor in tensors[at : at + count]]
                at += count
                flat = torch.cat([tensor.reshape(-1).to(device="cpu", dtype=self._dtype) for tensor in members])
                self._broadcast(flat, updates)
            for update in updates:
                update.result()
        finally:
            pool.shutdown(wait=False)  # a receiver that hangs must not hang the sender; its call has its own deadline

    def _broadcast(self, flat: torch.Tensor, updates: Sequence[Future[None]]) -> None:
        """Send one bucket, but give up as soon as a receiver has refused: it would never take the rest."""
        try:
            work = self._group.broadcast([flat], dist.BroadcastOptions())
            deadline = time.monotonic() + self._timeout
            while not work.is_completed():
                failure = _first_failure(updates)
                if failure:
                    raise SyncFailed(f"sync step 'update': {failure}")
                if time.monotonic() > deadline:
                    raise SyncFailed(f"sync step 'update': a bucket was not taken in {self._timeout:.0f} s")
                time.sleep(0.0005)
            work.wait()
        except RuntimeError as error:
            raise SyncFailed(f"sync step 'update': {_first_failure(updates) or error}") from error

    def close(self) -> None:
        """Returns at once. A group with a broadcast that nobody took holds whoever destroys it until the deadline, so a thread that may be
        left behind does."""
        held, self._group, self._store = [self._group, self._store], None, None
        threading.Thread(target=held.clear, daemon=True).start()


def _buckets(sizes: Sequence[int], limit: int) -> list[int]:
    """How many tensors, in order, go into each bucket of at most `limit` elements (a larger tensor has its own)."""
    buckets: list[int] = []
    filled = limit
    for size in sizes:
        if filled + size > limit:
            buckets.append(0)
            filled = 0
        buckets[-1] += 1
        filled += size
    return buckets


def _first_failure(futures: Sequence[Future[None]]) -> str | None:
    for future in futures:
        if future.done() and future.exception() is not None:
            return str(future.exception())
    return None


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
