"""Reinforcement learning of language models inside real, unmodified coding agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness_rl.sessions.base import HarnessRolloutOutcome, VerifyResult
    from harness_rl.sessions.harbor import HarborSessionFactory
    from harness_rl.sessions.harbor_environment import HarborEnvironment
    from harness_rl.sessions.openenv_servers import openenv_server
    from harness_rl.trainer import AsyncGRPOTrainer, GRPOTrainer, HarnessAsyncGRPOTrainer
    from harness_rl.trl.config import AsyncGRPOConfig, GRPOConfig

__all__ = [
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "HarborEnvironment",
    "HarborSessionFactory",
    "HarnessAsyncGRPOTrainer",
    "HarnessRolloutOutcome",
    "VerifyResult",
    "openenv_server",
]

_HOMES = {
    "AsyncGRPOConfig": "harness_rl.trl.config",
    "AsyncGRPOTrainer": "harness_rl.trainer",
    "GRPOConfig": "harness_rl.trl.config",
    "GRPOTrainer": "harness_rl.trainer",
    "HarborEnvironment": "harness_rl.sessions.harbor_environment",
    "HarborSessionFactory": "harness_rl.sessions.harbor",
    "HarnessAsyncGRPOTrainer": "harness_rl.trainer",
    "HarnessRolloutOutcome": "harness_rl.sessions.base",
    "VerifyResult": "harness_rl.sessions.base",
    "openenv_server": "harness_rl.sessions.openenv_servers",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: the learner and the engine plugin import this package where Harbor is not installed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
