"""Sandboxes for tests: the real root file system, a ledger of the test's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from harness_rl.sandboxes.limits import SandboxLimits
from harness_rl.sandboxes.reaper import audit
from harness_rl.sandboxes.rootfs import ensure_rootfs
from harness_rl.sandboxes.sandbox import Sandbox, SandboxSpec

StartSandbox = Callable[..., Awaitable[Sandbox]]


@pytest.fixture(scope="session")
def rootfs() -> Path:
    if os.geteuid() != 0 or shutil.which("bwrap") is None:
        pytest.skip("needs root and bubblewrap")
    return ensure_rootfs()


@pytest.fixture
async def start_sandbox(rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StartSandbox]:
    """Starts sandboxes, stops them at the end, and demands that nothing of them is left."""
    monkeypatch.setenv("HARNESS_RL_CACHE", str(tmp_path / "cache"))
    started: list[Sandbox] = []

    async def start(*, on_listener: Any = None, limits: dict[str, Any] | None = None, **spec: Any) -> Sandbox:
        chosen = SandboxLimits(**{"memory_mb": 512, "storage_mb": 128, "pids": 128, **(limits or {})})
        sandbox = await Sandbox.start(SandboxSpec(lowers=(rootfs,), limits=chosen, **spec), on_listener=on_listener)
        started.append(sandbox)
        return sandbox

    yield start
    for sandbox in started:
        await sandbox.stop()
    assert audit().total == 0, str(audit())
