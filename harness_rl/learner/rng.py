"""The states of every random number generator of a process, as plain values and tensors that a checkpoint can hold.

The learner itself draws nothing after its start; a user's objective may, and then a resumed run must go on with the same draws.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def states() -> dict[str, Any]:
    _, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": {"keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)), "rest": [int(position), int(has_gauss), float(gauss)]},
        "python": [version, list(internal), gauss_next],
    }


def restore(saved: Mapping[str, Any]) -> None:
    """GPUs' generators are set where there are as many as were saved."""
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and torch.cuda.is_available() and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])
    position, has_gauss, gauss = saved["numpy"]["rest"]
    np.random.set_state(("MT19937", saved["numpy"]["keys"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = saved["python"]
    random.setstate((version, tuple(internal), gauss_next))
