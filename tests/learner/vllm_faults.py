"""A vLLM worker extension for tests: the project's plugin, plus faults that can be switched on in the worker."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from harness_rl.engines import vllm_plugin

vllm_plugin.register()
_REPAIR = vllm_plugin.repair_tied_lm_head


class FaultExtension:
    model_runner: Any

    def hrl_repair(self, enabled: bool) -> bool:
        vllm_plugin.repair_tied_lm_head = _REPAIR if enabled else (lambda model: False)
        return enabled

    def hrl_in_update(self, fault: str) -> str:
        """What the next update meets: `stall` (10 s), `die`, or `none`."""
        receiver = vllm_plugin.GlooWeightTransferEngine
        receive = getattr(receiver, "receive_whole", receiver.receive_weights)
        receiver.receive_whole = receive

        def broken(engine: Any, info: Any) -> None:
            receiver.receive_weights = receive
            if fault == "die":
                os._exit(9)
            time.sleep(10.0)
            receive(engine, info)

        receiver.receive_weights = receive if fault == "none" else broken
        return fault

    def hrl_scale_norm(self, factor: float) -> float:
        """Perturb weights behind the learner's back (the final norm is not packed, so it is in use at once)."""
        weight = self.model_runner.model.model.norm.weight
        with torch.no_grad():
            weight.mul_(factor)
        return float(weight.float().mean())
