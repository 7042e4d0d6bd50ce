"""A shell command in a sandbox, for tests."""

from __future__ import annotations

from typing import Any

from harness_rl.sandboxes.limits import ExecResult
from harness_rl.sandboxes.sandbox import Sandbox


async def sh(sandbox: Sandbox, command: str, **options: Any) -> ExecResult:
    return await sandbox.exec(["/bin/bash", "-c", command], **options)
