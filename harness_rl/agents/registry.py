"""The harnesses that can be trained, by name. Invariant: every name here has a layer recipe, a Harbor agent and a test; what is said here
is known without importing Harbor, so that a wrong name costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from harness_rl.agents.base import AgentSpec
from harness_rl.errors import UserError
from harness_rl.sandboxes.layers import ensure_layer
from harness_rl.sandboxes.rootfs import Log

Script = list[dict[str, Any]]
"""Assistant turns as the capture proxy plays them."""


@dataclass(frozen=True)
class Harness:
    module: str
    model_classes: tuple[str, ...]
    """The first is the default."""
    script: Callable[[str], Script]
    """Shell commands -> the turns of a policy that runs them and says that it is done."""
    step_limit: bool = False
    """Whether the program has a limit of model calls of its own."""


def _mini_swe_agent(commands: str) -> Script:
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    return [{"content": None, "tool_calls": [{"name": "bash", "arguments": {"command": command}}]} for command in (commands, submit)]


def _opencode(commands: str) -> Script:
    call = {"name": "bash", "arguments": {"command": commands}}
    return [{"content": None, "tool_calls": [call]}, {"content": "Done."}]


HARNESSES = {
    "mini-swe-agent": Harness("harness_rl.agents.mini_swe_agent", ("light", "litellm"), _mini_swe_agent, step_limit=True),
    "opencode": Harness("harness_rl.agents.opencode", ("default",), _opencode),
}


def check_name(name: str, model_class: str | None = None) -> Harness:
    """The harness. Raises UserError for an unknown one, or a model class that it does not have."""
    if name not in HARNESSES:
        raise UserError(f"unknown harness {name!r}; known: {', '.join(sorted(HARNESSES))}")
    harness = HARNESSES[name]
    if model_class is not None and model_class not in harness.model_classes:
        raise UserError(f"harness.model_class: {name} has no {model_class!r}; it has: {', '.join(harness.model_classes)}")
    return harness


def get(name: str) -> AgentSpec:
    """Raises UserError for an unknown harness."""
    spec: AgentSpec = import_module(check_name(name).module).SPEC
    return spec


async def build_agent(name: str, log: Log = lambda _line: None, model_class: str | None = None) -> list[Path]:
    """Build (or find) a harness's layers: those of one `model_class`, or of all; returns their folders, each variant's topmost first."""
    spec = get(name)
    recipes = [recipe for variant in ([model_class] if model_class else spec.variants) for recipe in spec.layers(variant)]
    return [await ensure_layer(recipe, log) for recipe in recipes]
