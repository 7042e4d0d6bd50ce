"""The harnesses that can be trained, by name. Invariant: every name here has a layer recipe, a Harbor agent and a test."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from harness_rl.agents.base import AgentSpec
from harness_rl.errors import UserError
from harness_rl.sandboxes.layers import ensure_layer
from harness_rl.sandboxes.rootfs import Log

_MODULES = {"mini-swe-agent": "harness_rl.agents.mini_swe_agent"}


def names() -> list[str]:
    return sorted(_MODULES)


def check_name(name: str) -> None:
    """Raises UserError for an unknown harness."""
    if name not in _MODULES:
        raise UserError(f"unknown harness {name!r}; known: {', '.join(names())}")


def get(name: str) -> AgentSpec:
    """Raises UserError for an unknown harness."""
    check_name(name)
    spec: AgentSpec = import_module(_MODULES[name]).SPEC
    return spec


async def build_agent(name: str, log: Log = lambda _line: None, model_class: str | None = None) -> list[Path]:
    """Build (or find) a harness's layers: those of one `model_class`, or of all; returns their folders, each variant's topmost first."""
    spec = get(name)
    recipes = [recipe for variant in ([model_class] if model_class else spec.variants) for recipe in spec.layers(variant)]
    return [await ensure_layer(recipe, log) for recipe in recipes]
