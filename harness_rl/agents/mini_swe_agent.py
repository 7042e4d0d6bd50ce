"""mini-swe-agent 2.4.6: pinned version, layers, command line. Invariant: the program runs unmodified in its default tool-call mode; what
a user may change (prompts, limits, model options) goes through its own configuration file.

Two layers: `light` without litellm (mini_swe_agent_light.py) starts in a tenth of the time and is the default; `litellm` is the program's
own default model class."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

import yaml
from harbor.agents.installed.base import (
    ApiError,
    BaseInstalledAgent,
    ContextWindowExceededError,
    NetworkConnectionError,
    NonZeroAgentExitCodeError,
    with_prompt_template,
)
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from harness_rl.agents.base import AgentSpec
from harness_rl.sandboxes.errors import SandboxBuildFailedError
from harness_rl.sandboxes.layers import LayerFile, LayerRecipe

NAME = "mini-swe-agent"
VERSION = "2.4.6"
LIGHT, LITELLM = "light", "litellm"
_HOME = f"/opt/agents/{NAME}"
_PROGRAM = f"{_HOME}/bin/{NAME}"
_CONFIG = "/installed-agent/mini-swe-agent.yaml"
_LOGS = "/logs/agent"
_TRAJECTORY = "mini-swe-agent.trajectory.json"
_MODEL_CLASSES = {LIGHT: "mini_swe_agent_light.LightModel", LITELLM: "litellm"}
_MODEL_TIMEOUT_S = 600

_LAUNCHER = f"""#!/usr/bin/python3 -IS
import sys

sys.path.append("{_HOME}/lib")
from minisweagent.run.mini import app

app()
"""
_VERSION_PROBE = f"""#!/bin/sh
# Harbor asks `uv tool list` for the version; everything else goes to a real uv if there is one.
if [ "$1 $2" = "tool list" ]; then echo "{NAME} v{VERSION}"; exit 0; fi
PATH=$(printf %s "$PATH" | tr : '\\n' | grep -vx "$(dirname "$0")" | paste -sd:) exec uv "$@"
"""
# What is exported to the program reaches the agent's own commands too; nothing here is secret.
_ENVIRONMENT = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TYPER_STANDARD_TRACEBACK": "1",
    "_TYPER_STANDARD_TRACEBACK": "1",
}
_FAILURES: dict[str, type[NonZeroAgentExitCodeError]] = {
    "EndpointUnreachable": NetworkConnectionError,
    "EndpointError": ApiError,
    "ContextWindowExceeded": ContextWindowExceededError,
    "ContextWindowExceededError": ContextWindowExceededError,
    "APIConnectionError": NetworkConnectionError,
    "InternalServerError": ApiError,
    "RateLimitError": ApiError,
    "ServiceUnavailableError": ApiError,
    "Timeout": ApiError,
}
"""Exception that ended the program -> how Harbor sorts it. Everything else is the agent's own failure."""


def recipe(variant: str) -> LayerRecipe:
    # Every package with its version, so that a layer built tomorrow is the one that was tested.
    packages = Path(__file__).with_name(f"mini_swe_agent_{variant}.lock").read_text(encoding="utf-8").split()
    light_model = Path(__file__).with_name("mini_swe_agent_light.py").read_text(encoding="utf-8")
    return LayerRecipe(
        NAME,
        variant,
        installs=(("--no-deps", *packages),),
        files={
            _PROGRAM: LayerFile(_LAUNCHER, executable=True),
            f"{_HOME}/lib/mini_swe_agent_light.py": LayerFile(light_model),
            f"/root/.local/bin/{NAME}": LayerFile(f'#!/bin/sh\nexec {_PROGRAM} "$@"\n', executable=True),
            "/root/.local/bin/uv": LayerFile(_VERSION_PROBE, executable=True),
        },
    )


SPEC = AgentSpec(NAME, VERSION, "harness_rl.agents.mini_swe_agent:MiniSweAgent", (LIGHT, LITELLM), recipe)


class MiniSweAgent(BaseInstalledAgent):
    """Harbor agent. `model_class`: "light" or "litellm"; `config`: merged over mini.yaml by the program itself (`agent.system_template`,
    `agent.step_limit`, `model.model_kwargs`, ...). The endpoint and its key come through `agent.env` (OPENAI_BASE_URL, OPENAI_API_KEY)."""

    def __init__(self, logs_dir: Path, *args: Any, model_class: str = LIGHT, config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        SPEC.layers(model_class)
        if config is not None and not isinstance(config, dict):
            raise ValueError(f"mini-swe-agent: config must be a mapping, is {type(config).__name__}")
        kwargs.setdefault("version", VERSION)
        # Resolving a provider from the model's name would import litellm: six CPU seconds in the event loop, for a name that is ours.
        kwargs["skip_model_parsing"] = True
        super().__init__(logs_dir, *args, **kwargs)
        self._model_class = model_class
        self._mini_config = config or {}

    @staticmethod
    def name() -> str:
        return NAME

    async def install(self, environment: BaseEnvironment) -> None:
        result = await environment.exec(f"test -x {_PROGRAM}")
        if result.return_code != 0:
            raise SandboxBuildFailedError(f"the sandbox has no {_PROGRAM}: mount the layer that `harness-rl agents build {NAME}` makes")

    def configuration(self, instruction: str) -> dict[str, Any]:
        """The program's configuration for one run: the user's, then what this adapter decides."""
        model_name = (self.model_name or "policy").removeprefix("openai/")
        config = json.loads(json.dumps(self._mini_config))
        model = config.setdefault("model", {})
        model["model_class"] = _MODEL_CLASSES[self._model_class]
        model["model_name"] = model_name if self._model_class == LIGHT else f"openai/{model_name}"
        if self._model_class == LITELLM:
            model.setdefault("model_kwargs", {}).setdefault("timeout", _MODEL_TIMEOUT_S)
        config.setdefault("run", {})["task"] = instruction
        return config

    @with_prompt_template
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
            yaml.safe_dump(self.configuration(instruction), file, sort_keys=False)
            file.flush()
            await environment.upload_file(file.name, _CONFIG)
        log = f"{_LOGS}/{NAME}.txt"
        arguments = ["-c", "mini", "-c", _CONFIG, "--yolo", "--exit-immediately", "--cost-limit", "0", "--output", f"{_LOGS}/{_TRAJECTORY}"]
        command = f"{_PROGRAM} {shlex.join(arguments)} </dev/null >{log} 2>&1 || {{ code=$?; tail -n 1 {log} >&2; exit $code; }}"
        result = await environment.exec(command, env=dict(_ENVIRONMENT))
        if result.return_code != 0:
            raise _failure(result.return_code, result.stderr or "")

    def populate_context_post_run(self, context: AgentContext) -> None:
        """Token counts from the program's own trajectory. No ATIF copy is made: Harbor's converter imports litellm, six CPU seconds in
        the event loop."""
        path = self.logs_dir / _TRAJECTORY
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
            usage = [((message.get("extra") or {}).get("response") or {}).get("usage") or {} for message in messages]
            context.n_input_tokens = sum(int(entry.get("prompt_tokens") or 0) for entry in usage)
            context.n_output_tokens = sum(int(entry.get("completion_tokens") or 0) for entry in usage)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            # The file is the agent's to spoil; what is trained comes from the capture, not from here.
            self.logger.debug("no usable trajectory at %s: %s", path, error)


def _failure(code: int, last_line: str) -> NonZeroAgentExitCodeError:
    """The error for a run that ended with `code`, whose log ends in `last_line` (the last line of a traceback names the exception)."""
    kind = last_line.partition(":")[0].strip().rpartition(".")[2]
    return _FAILURES.get(kind, NonZeroAgentExitCodeError)(f"{NAME} ended with {code}: {last_line.strip()[-500:]}")
