"""How each published agent is pointed at an endpoint, which of its tools runs a command, and which side calls it makes.

Invariant: the programs are unmodified and at pinned versions; all that is ours is their configuration and their environment.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness_rl.selftest import programs

TASK = "Create hello.txt with the text Hello."
MODEL = "m"


@dataclass(frozen=True)
class Start:
    """A command line and what it needs besides."""

    argv: list[str]
    env: dict[str, str]


@dataclass(frozen=True)
class Client:
    name: str
    version: str
    dialect: str
    prepare: Callable[[str, str, Path, Path], Start]
    """(root URL, key, home, working folder) -> how to start it; may write its configuration."""
    tool: str
    command: str
    """The argument of `tool` that holds the command."""
    more: dict[str, Any]
    """Its other required arguments."""
    side_rules: tuple[str, ...] = ()
    """The rules that its side calls in a short run match."""
    submit: str | None = None
    """The command that ends its run, where a plain answer does not."""

    def call(self, command: str) -> str:
        """A tool call as the model writes it, with spacing that no client keeps."""
        return f'<tool_call>\n{{"name":  "{self.tool}", "arguments": {json.dumps({self.command: command, **self.more})}}}\n</tool_call>'


def _codex(url: str, key: str, home: Path, work: Path) -> Start:
    _write(
        home / ".codex/config.toml",
        f"""
model = "{MODEL}"
model_provider = "p"
approval_policy = "never"
sandbox_mode = "danger-full-access"
model_context_window = 100000
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.p]
name = "p"
base_url = "{url}/v1"
env_key = "KEY"
wire_api = "responses"
""",
    )
    quiet = ["--disable", "apps", "--disable", "plugins"]
    return _npm("codex", ["codex", "exec", "--json", "--dangerously-bypass-approvals-and-sandbox", *quiet, TASK], {"KEY": key})


def _claude(url: str, key: str, home: Path, work: Path) -> Start:
    quiet = (
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
        "DISABLE_TELEMETRY",
        "DISABLE_ERROR_REPORTING",
        "DISABLE_AUTOUPDATER",
        "IS_SANDBOX",
    )
    env = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "ANTHROPIC_MODEL": MODEL, **dict.fromkeys(quiet, "1")}
    return _npm("claude-code", ["claude", "-p", TASK, "--dangerously-skip-permissions", "--output-format", "json"], env)


def _gemini(url: str, key: str, home: Path, work: Path) -> Start:
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": False}}
    _write(home / ".gemini/settings.json", json.dumps(settings))
    env = {"GEMINI_API_KEY": key, "GOOGLE_GEMINI_BASE_URL": url, "GEMINI_MODEL": "gemini-2.5-pro", "GEMINI_CLI_TRUST_WORKSPACE": "true"}
    return _npm("gemini-cli", ["gemini", "-p", TASK, "--yolo"], env)


def _pi(url: str, key: str, home: Path, work: Path) -> Start:
    model = {"id": MODEL, "contextWindow": 100000, "maxTokens": 4096}
    provider = {"baseUrl": url + "/v1", "apiKey": key, "api": "openai-completions", "models": [model]}
    _write(home / ".pi/agent/models.json", json.dumps({"providers": {"mock": provider}}))
    return _npm("pi", ["pi", "-p", "--provider", "mock", "--model", MODEL, TASK], {})


def _opencode(url: str, key: str, home: Path, work: Path) -> Start:
    options = {"baseURL": url + "/v1", "apiKey": key}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {MODEL: {"limit": {"context": 100000, "output": 4096}}}}
    config = {"provider": {"mock": provider}, "model": f"mock/{MODEL}", "permission": {"edit": "allow", "bash": "allow"}}
    _write(work / "opencode.json", json.dumps({**config, "autoupdate": False, "share": "disabled"}))
    off = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD", "SHARE")
    return _npm("opencode", ["opencode", "run", TASK], {f"OPENCODE_DISABLE_{name}": "1" for name in off})


def _qwen(url: str, key: str, home: Path, work: Path) -> Start:
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
        "memory": {"enableManagedAutoMemory": False},
    }
    _write(home / ".qwen/settings.json", json.dumps(settings))
    env = {"OPENAI_API_KEY": key, "OPENAI_BASE_URL": url + "/v1", "OPENAI_MODEL": MODEL}
    return _npm("qwen-code", ["qwen", "-p", TASK, "--yolo", "--auth-type", "openai"], env)


def _mini(variant: str, url: str, key: str, home: Path, work: Path) -> Start:
    """From its layer, under the Python that the layer was built for."""
    from harness_rl.agents.mini_swe_agent import SPEC, MiniSweAgent
    from harness_rl.sandboxes.layers import ensure_layer
    from harness_rl.sandboxes.rootfs import ensure_rootfs

    layer, rootfs = asyncio.run(ensure_layer(SPEC.recipe(variant))), ensure_rootfs(lambda _line: None)
    config = MiniSweAgent(home, model_name=MODEL, model_class=variant).configuration(TASK)
    _write(home / "mini.yaml", json.dumps(config))
    system = ["--ro-bind", f"{rootfs}/usr", "/usr", "--ro-bind", f"{rootfs}/etc", "/etc"]
    links = [part for name in ("bin", "lib", "lib64") for part in ("--symlink", f"usr/{name}", f"/{name}")]
    folders = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--bind", str(home), str(home), "--bind", str(work), str(work)]
    program = ["--ro-bind", f"{layer}/opt/agents", "/opt/agents", "--chdir", str(work), "/opt/agents/mini-swe-agent/bin/mini-swe-agent"]
    options = [
        "-c",
        "mini",
        "-c",
        str(home / "mini.yaml"),
        "--yolo",
        "--exit-immediately",
        "--cost-limit",
        "0",
        "--output",
        str(home / "t.json"),
    ]
    env = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return Start(["bwrap", *system, *links, *folders, *program, *options], {**env, "OPENAI_BASE_URL": url + "/v1", "OPENAI_API_KEY": key})


def _npm(name: str, argv: list[str], env: dict[str, str]) -> Start:
    return Start(argv, {**env, "PATH": f"{programs.packages(name)}/.bin:{programs.node()}/bin:{os.environ['PATH']}"})


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CLIENTS = (
    Client("claude-code", "2.1.332", "anthropic", _claude, "Bash", "command", {"description": "d"}),
    Client("codex", "0.171.0", "responses", _codex, "exec_command", "cmd", {}),
    Client("gemini-cli", "0.61.0", "gemini", _gemini, "run_shell_command", "command", {"description": "d"}),
    Client("opencode", "1.18.33", "chat", _opencode, "bash", "command", {"description": "d"}, ("opencode_title",)),
    Client("mini-swe-agent", "2.4.6", "chat", partial(_mini, "light"), "bash", "command", {}, submit=_SUBMIT),
    Client("mini-swe-agent-litellm", "2.4.6", "chat", partial(_mini, "litellm"), "bash", "command", {}, submit=_SUBMIT),
    Client("pi", "0.73.1", "chat", _pi, "bash", "command", {}),
    Client("qwen-code", "0.24.4", "chat", _qwen, "run_shell_command", "command", {"description": "d", "is_background": False}),
)
