"""How each unmodified client is pointed at an endpoint, and which of its tools runs a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    return Start(["codex", "exec", "--json", "--dangerously-bypass-approvals-and-sandbox", *quiet, TASK], {"KEY": key})


def _claude(url: str, key: str, home: Path, work: Path) -> Start:
    quiet = (
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
        "DISABLE_TELEMETRY",
        "DISABLE_ERROR_REPORTING",
        "DISABLE_AUTOUPDATER",
        "IS_SANDBOX",
    )
    env = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "ANTHROPIC_MODEL": MODEL, **dict.fromkeys(quiet, "1")}
    return Start(["claude", "-p", TASK, "--dangerously-skip-permissions", "--output-format", "json"], env)


def _gemini(url: str, key: str, home: Path, work: Path) -> Start:
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": False}}
    _write(home / ".gemini/settings.json", json.dumps(settings))
    env = {"GEMINI_API_KEY": key, "GOOGLE_GEMINI_BASE_URL": url, "GEMINI_MODEL": "gemini-2.5-pro", "GEMINI_CLI_TRUST_WORKSPACE": "true"}
    return Start(["gemini", "-p", TASK, "--yolo"], env)


def _pi(url: str, key: str, home: Path, work: Path) -> Start:
    model = {"id": MODEL, "contextWindow": 100000, "maxTokens": 4096}
    provider = {"baseUrl": url + "/v1", "apiKey": key, "api": "openai-completions", "models": [model]}
    _write(home / ".pi/agent/models.json", json.dumps({"providers": {"mock": provider}}))
    return Start(["pi", "-p", "--provider", "mock", "--model", MODEL, TASK], {})


def _opencode(url: str, key: str, home: Path, work: Path) -> Start:
    options = {"baseURL": url + "/v1", "apiKey": key}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {MODEL: {"limit": {"context": 100000, "output": 4096}}}}
    config = {"provider": {"mock": provider}, "model": f"mock/{MODEL}", "permission": {"edit": "allow", "bash": "allow"}}
    _write(work / "opencode.json", json.dumps({**config, "autoupdate": False, "share": "disabled"}))
    off = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD", "SHARE")
    return Start(["opencode", "run", TASK], {f"OPENCODE_DISABLE_{name}": "1" for name in off})


def _qwen(url: str, key: str, home: Path, work: Path) -> Start:
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
        "memory": {"enableManagedAutoMemory": False},
    }
    _write(home / ".qwen/settings.json", json.dumps(settings))
    env = {"OPENAI_API_KEY": key, "OPENAI_BASE_URL": url + "/v1", "OPENAI_MODEL": MODEL}
    return Start(["qwen", "-p", TASK, "--yolo", "--auth-type", "openai"], env)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


CLIENTS = (
    Client("claude-code", "anthropic", _claude, "Bash", "command", {"description": "d"}),
    Client("codex", "responses", _codex, "exec_command", "cmd", {}),
    Client("gemini-cli", "gemini", _gemini, "run_shell_command", "command", {"description": "d"}),
    Client("opencode", "chat", _opencode, "bash", "command", {"description": "d"}, ("opencode_title",)),
    Client("pi", "chat", _pi, "bash", "command", {}),
    Client("qwen-code", "chat", _qwen, "run_shell_command", "command", {"description": "d", "is_background": False}),
)
