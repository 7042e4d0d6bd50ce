"""Where a launched engine and the learner meet: with one GPU for both, they share it as TRL's `vllm_mode = "colocate"` means.

Control has no torch, so GPUs are counted by their device files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHARED_FRACTION = 0.3
"""Of the GPU's memory for the engine, where nothing else is said: TRL's `vllm_gpu_memory_utilization`."""


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that processes started here may use."""
    found = sum(file.name.removeprefix("nvidia").isdigit() for file in devices.glob("nvidia*"))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return found
    return min(found, sum(name.strip() not in ("", "-1") for name in chosen.split(",")))


def shares_gpu(sections: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether engine and learner have one GPU between them; not where the user's sections place them, or push adapters."""
    engine, learner, sync = (sections.get(name, {}) for name in ("engine", "learner", "sync"))
    placed = engine.get("gpus") or learner.get("gpus") or learner.get("processes", 1) > 1 or sync.get("lora") == "adapter"
    on_cpu = "cpu" in (engine.get("device"), learner.get("device"))
    return not (placed or on_cpu) and visible_gpus() == 1
