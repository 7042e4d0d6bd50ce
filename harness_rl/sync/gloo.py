"""Weights over gloo, for engines on CPU: the learner is rank 0 of a bare process group, vLLM's workers the rest (`engines.vllm_plugin`).

Tensors travel in flat buckets in the order of `named_parameters`, cast to the engine's dtype here; the next bucket is made while one is on
its way. Both sides check the plan before the first byte.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from harness_rl.engines.vllm_plugin import check_plan, open_group
from harness_rl.sync.buckets import Plan, Weights, up_to
from harness_rl.sync.client import EngineClient, StepLate, SyncFailed
from harness_rl.sync.everywhere import GRACE_S, Calls

BUCKET_BYTES = 32 << 20
POLL_S = 0.0005


class GlooSender:
    def __init__(self, weights: Weights, dtype: torch.dtype, timeout_s: float, host: str = "127.0.0.1") -> None:
        self._weights, self._dtype, self._timeout, self._host = weights, dtype, timeout_s, host
        self._group: Any = None
        self._store: Any = None

    def connect(self, engines: Sequence[EngineClient]) -> None:
        deadline = time.monotonic() + self._timeout + GRACE_S
        worlds = Calls("connect", engines, lambda engine: engine.world_size()).start().wait(deadline)
        offsets, world = rank_offsets(worlds)
        port = free_port(self._host)
        info = {"master_address": self._host, "master_port": port, "world_size": world, "timeout_s": self._timeout}
        ranks = dict(zip(engines, offsets, strict=True))
        joins = Calls("connect", engines, lambda engine: engine.init_transfer({**info, "rank_offset": ranks[engine]})).start()
        try:  # both sides rendezvous at once
            self._group, self._store = open_group(self._host, port, 0, world, self._timeout)
        except (RuntimeError, dist.DistError) as error:
            joins.check(GRACE_S)
            raise SyncFailed(f"sync step 'connect': gloo rendezvous on {self._host}:{port} failed: {error}") from error
        joins.wait(deadline)

    def push(self, engines: Sequence[EngineClient]) -> dict[str, float]:
        deadline = time.monotonic() + self._timeout
        plan = Plan.of(self._weights, self._dtype)
        buckets = up_to(plan.sizes, BUCKET_BYTES // self._dtype.itemsize)
        info = {**plan.metadata, "buckets": buckets}
        check_plan(**info)
        updates = Calls("update", engines, lambda engine: engine.update(info)).start()
        moving: tuple[torch.Tensor, Any] | None = None
        try:
            for flat in plan.flat(buckets, "cpu"):
                if moving is not None:
                    self._await(moving[1], updates, deadline)
                moving = flat, self._group.broadcast([flat], dist.BroadcastOptions())
            if moving is not None:
                self._await(moving[1], updates, deadline)
        except RuntimeError as error:
            updates.check(GRACE_S)
            raise SyncFailed(f"sync step 'update': {error}") from error
        updates.wait(deadline + GRACE_S)
        return {}

    def _await(self, work: Any, updates: Calls[None], deadline: float) -> None:
        """One bucket's way; given up as soon as a receiver has refused, which would never take the rest."""
        while not work.is_completed():
            updates.check()
            if time.monotonic() > deadline:
                raise StepLate(f"sync step 'update': the weights were not taken in {self._timeout:g} s")
            time.sleep(POLL_S)
        work.wait()

    def close(self) -> None:
        """Returns at once. A group with a broadcast that nobody took holds whoever destroys it until the deadline, so a thread that may be
        left behind does."""
        held, self._group, self._store = [self._group, self._store], None, None
        threading.Thread(target=held.clear, daemon=True).start()


def rank_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """(first rank of each engine's workers, size of the whole group); the learner is rank 0."""
    offsets, at = [], 1
    for size in sizes:
        offsets.append(at)
        at += size
    return offsets, at


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
