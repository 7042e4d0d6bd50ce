"""opencode 1.18: pinned version, layer, command line. Invariant: the published program runs unmodified and offline; what a user may change
(prompts, tools, permissions) goes through its own configuration, over which only the endpoint and the model's name are written.

The title call, which says nothing about the task, is switched off unless the user's configuration says otherwise."""

from __future__ import annotations

import json
import platform
import tempfile
from pathlib import Path
from typing import Any

from harbor.agents.installed.base import BaseInstalledAgent, NonZeroAgentExitCodeError, with_prompt_template
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from harness_rl.agents.base import AgentSpec
from harness_rl.sandboxes.errors import SandboxBuildFailedError
from harness_rl.sandboxes.layers import LayerFile, LayerRecipe

NAME = "opencode"
VERSION = "1.18.33"
_HOME = f"/opt/agents/{NAME}"
_PROGRAM = f"{_HOME}/bin/{NAME}"
_CONFIG = "/installed-agent/opencode.json"
_INSTRUCTION = "/installed-agent/instruction.txt"
_PLUGINS = "/installed-agent/plugins"
_LOG = "/logs/agent/opencode.jsonl"
_PROVIDER = "capture"
_LIMITS = {"context": 32768, "output": 4096}
"""What the program is told of the model where the user does not say; the proxy knows the true window."""
_NO_PACKAGES = {"npm_config_offline": "true"}
"""Where there is a plugin the program first asks for a package of types, for 70 s where nobody answers."""
_OFFLINE = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD", "SHARE")


def package() -> str:
    """The npm package that holds the program for this machine."""
    if platform.machine() in ("aarch64", "arm64"):
        return f"opencode-linux-arm64@{VERSION}"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].partition("\n")[0].split()
    return f"opencode-linux-x64{'' if 'avx2' in flags else '-baseline'}@{VERSION}"


def recipe(variant: str) -> LayerRecipe:
    name = package()
    program = f"{_HOME}/npm/node_modules/{name.rpartition('@')[0]}/bin/{NAME}"
    launcher = LayerFile(f'#!/bin/sh\nexec {program} "$@"\n', executable=True)
    return LayerRecipe(NAME, variant, installs=(), npm=(name,), files={_PROGRAM: launcher, f"/root/.local/bin/{NAME}": launcher})


SPEC = AgentSpec(NAME, VERSION, "harness_rl.agents.opencode:Opencode", ("default",), recipe)


class Opencode(BaseInstalledAgent):
    """Harbor agent. `config`: merged into opencode.json (`agent.build.prompt`, `tools`, `permission`, ...); an entry of `plugin` that is a
    path (it starts with `/` or `.`) names a file here, which goes into the sandbox. The endpoint and its key come through `agent.env`
    (OPENAI_BASE_URL, OPENAI_API_KEY)."""

    def __init__(
        self, logs_dir: Path, *args: Any, model_class: str = "default", config: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        SPEC.layers(model_class)
        if config is not None and not isinstance(config, dict):
            raise ValueError(f"opencode: config must be a mapping, is {type(config).__name__}")
        kwargs.setdefault("version", VERSION)
        kwargs["skip_model_parsing"] = True  # a provider looked up by the model's name would import litellm
        super().__init__(logs_dir, *args, **kwargs)
        self._user_config, self._plugins = _with_plugins(config or {})

    @staticmethod
    def name() -> str:
        return NAME

    async def install(self, environment: BaseEnvironment) -> None:
        result = await environment.exec(f"test -x {_PROGRAM}")
        if result.return_code != 0:
            raise SandboxBuildFailedError(f"the sandbox has no {_PROGRAM}: mount the layer that `harness-rl agents build {NAME}` makes")

    def configuration(self) -> dict[str, Any]:
        """opencode.json for one run: defaults that suit a sandbox, the user's over them, the endpoint over both."""
        model = (self.model_name or "policy").removeprefix("openai/")
        allowed = {"edit": "allow", "bash": "allow", "webfetch": "deny"}
        defaults = {"permission": allowed, "agent": {"title": {"disable": True}}, "autoupdate": False, "share": "disabled"}
        options = {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}
        user = self._user_config.get("provider", {}).get(_PROVIDER, {})
        models = {model: _merged({"limit": _LIMITS}, user.get("models", {}).get(model, {}))}
        endpoint = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
        fixed = {"provider": {_PROVIDER: endpoint}, "model": f"{_PROVIDER}/{model}"}
        return _merged(_merged(defaults, self._user_config), fixed)

    @with_prompt_template
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        # By standard input: of an argument with spaces the program makes a quoted string.
        for target, text in ((_CONFIG, json.dumps(self.configuration())), (_INSTRUCTION, instruction)):
            with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                await environment.upload_file(file.name, target)
        for place, source in self._plugins.items():
            await environment.upload_file(source, place)
        command = f"{_PROGRAM} run --format json <{_INSTRUCTION} >{_LOG} 2>&1 || {{ code=$?; tail -n 1 {_LOG} >&2; exit $code; }}"
        env = {"OPENCODE_CONFIG": _CONFIG, **{f"OPENCODE_DISABLE_{name}": "1" for name in _OFFLINE}, **_NO_PACKAGES}
        result = await environment.exec(command, env=env)
        if result.return_code != 0:
            raise NonZeroAgentExitCodeError(f"{NAME} ended with {result.return_code}: {(result.stderr or '').strip()[-500:]}")

    def populate_context_post_run(self, context: AgentContext) -> None:
        """Token counts from the program's own events; lines that are none are passed over, for the file is the agent's to spoil."""
        path = self.logs_dir / Path(_LOG).name
        counts = [0, 0]
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            self.logger.debug("no events at %s: %s", path, error)
            return
        for line in lines:
            try:
                tokens = json.loads(line)["part"]["tokens"]
                counts = [counts[0] + int(tokens["input"]), counts[1] + int(tokens["output"])]
            except (ValueError, KeyError, TypeError):
                continue
        context.n_input_tokens, context.n_output_tokens = counts


def _with_plugins(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """`config` with its local plugins under their names in the sandbox, and where these come from. Raises ValueError for a missing file."""
    entries, places = [], {}
    for number, entry in enumerate(config.get("plugin", [])):
        if isinstance(entry, str) and entry.startswith(("/", ".")):
            source = Path(entry).resolve()
            if not source.is_file():
                raise ValueError(f"opencode: plugin {entry} is not a file (looked for {source})")
            place = f"{_PLUGINS}/{number}-{source.name}"
            places[place], entry = source, f"file://{place}"
        entries.append(entry)
    return ({**config, "plugin": entries} if entries else config), places


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid over it, table by table."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
