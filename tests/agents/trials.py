"""A real Harbor trial of an agent in the local sandbox, whose only port is served by the test."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("HARBOR_TELEMETRY", "off")

from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial

from harness_rl.agents.base import AgentSpec
from harness_rl.sandboxes.hooks import sandbox_hooks

TOML = """
version = "1.0"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 60.0
[environment]
docker_image = "debian:bookworm-slim"
workdir = "/app"
cpus = 1
memory_mb = 1024
storage_mb = 128
network_mode = "no-network"
"""


def write_task(root: Path) -> Path:
    """A task whose instruction no shell may touch; it wants `hello` in /app/hello.txt."""
    content = {
        "task.toml": TOML,
        "instruction.md": "Write hello into hello.txt; mind 'quotes', $HOME and \U0001f44b.\n",
        "tests/test.sh": '#!/bin/bash\n[ "$(cat /app/hello.txt)" = hello ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n',
        "environment/README": "none\n",
    }
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


async def run_trial(
    spec: AgentSpec,
    task: Path,
    layers: list[Path],
    serve: Callable[[socket.socket], Awaitable[None]],
    key: str = "hrl-secret",
    **agent: Any,
) -> tuple[TrialResult, Path]:
    """The trial's result and its folder."""
    config = TrialConfig(
        task=TaskConfig(path=task),
        trials_dir=task.parent / "trials",
        agent=AgentConfig(
            import_path=spec.import_path,
            model_name="openai/policy",
            kwargs=agent,
            env={"OPENAI_BASE_URL": "http://127.0.0.1:18080/v1", "OPENAI_API_KEY": key},
        ),
        environment=EnvironmentConfig(
            import_path="harness_rl.sandboxes.bubblewrap:BubblewrapEnvironment", kwargs={"layers": [str(layer) for layer in layers]}
        ),
    )
    with sandbox_hooks(on_listener=serve):
        running = await Trial.create(config)
    return await running.run(), running.paths.trial_dir
