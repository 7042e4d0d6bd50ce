"""Weights over NCCL, for engines on GPUs of their own: in each push only the weights whose bits changed (vLLM's `sparse_nccl` backend).

Nothing is sent on a guess of what an engine holds: a connection begins with a push of every weight, and so does what follows a push that
did not end well. Each chunk of patches has an update call of its own, between one `start` and one `finish`; the next chunk's differences
are looked for while one is on its way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from harness_rl.sync.buckets import Plan, Weights
from harness_rl.sync.client import EngineClient
from harness_rl.sync.differences import Held, Patch, check_addressable, differences, in_chunks, width
from harness_rl.sync.everywhere import GRACE_S, Calls
from harness_rl.sync.nccl_group import Device, NcclGroup

CHUNK_BYTES = 256 << 20


class SparseNcclSender:
    """Holds a copy of all weights in host memory, in `dtype`."""

    def __init__(
        self, weights: Weights, dtype: torch.dtype, timeout_s: float, *, library: Any = None, device: Device | None = None
    ) -> None:
        self._weights, self._dtype, self._timeout = weights, dtype, timeout_s
        self._group = NcclGroup(timeout_s, library, device)
        self._held: Held = {}
        """What every engine was last brought to; empty while that is not known."""

    def connect(self, engines: Sequence[EngineClient]) -> None:
        self._held = {}
        self._group.connect(engines)

    def push(self, engines: Sequence[EngineClient]) -> dict[str, float]:
        """Counts `changed_share`: of all weights, those that were sent. Where none changed, there is no update call."""
        group, device = self._group, self._group.device
        deadline = time.monotonic() + self._timeout
        plan = Plan.of(self._weights, self._dtype)
        check_addressable(plan)
        held, self._held = self._held, {}
        piece = max(1, CHUNK_BYTES // width(self._dtype))
        chunks = in_chunks(differences(plan, held, device.where, piece), CHUNK_BYTES)
        sent = 0
        chunk = next(chunks, None)
        while chunk is not None:
            updates = Calls("update", engines, partial(_announce, info=_metadata(chunk))).start()
            stream = group.streams[0]
            with device.on(stream):
                for patch in chunk:
                    group.send(patch.indices, stream)
                    group.send(patch.values, stream)
            event = device.mark(stream)
            following = next(chunks, None)
            group.wait(event, updates, deadline, "update")
            updates.wait(deadline + GRACE_S)
            sent += sum(len(patch.indices) for patch in chunk)
            chunk = following
        self._held = held
        return {"changed_share": sent / max(1, sum(plan.sizes))}

    def close(self) -> None:
        self._group.close()


def _announce(engine: EngineClient, info: dict[str, Any]) -> None:
    engine.update(info)


def _metadata(chunk: Sequence[Patch]) -> dict[str, Any]:
    """In the words of vLLM's backend."""
    return {
        "names": [patch.name for patch in chunk],
        "dtype_names": [str(patch.values.dtype).removeprefix("torch.") for patch in chunk],
        "shapes": [patch.shape for patch in chunk],
        "num_updates_list": [len(patch.indices) for patch in chunk],
    }
