"""The capture proxy as a child of the control process. Its admin key lives in a file that only the owner reads; the store outlives it."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from capture_proxy.client import ProxyClient
from harness_rl.config import ProxySection
from harness_rl.errors import HarnessRLError, UserError
from harness_rl.processes import Child, spawn


@dataclass
class ProxyProcess:
    child: Child
    url: str
    handoff_socket: Path
    client: ProxyClient

    async def stop(self) -> None:
        await self.client.close()
        await self.child.stop(grace_s=6.0)
        shutil.rmtree(self.handoff_socket.parent, ignore_errors=True)


async def start_proxy(section: ProxySection, *, engine_url: str, model: str, run_dir: Path) -> ProxyProcess:
    """Start it and wait for its ready line. Raises UserError for a port in use, HarnessRLError when it dies or is late."""
    key = secrets.token_hex(32)
    key_file = run_dir / "capture" / ".admin-key"
    key_file.parent.mkdir(parents=True, exist_ok=True)
    key_file.unlink(missing_ok=True)
    with os.fdopen(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    # A Unix socket path holds about 100 bytes; run folders may be longer.
    handoff = Path(tempfile.mkdtemp(prefix="hrl-")) / "handoff.sock"
    argv = [sys.executable, "-m", "capture_proxy", "--engine", engine_url, "--model", model]
    argv += ["--store", str(run_dir / "capture"), "--admin-key-file", str(key_file), "--host", section.host, "--port", str(section.port)]
    argv += ["--handoff-socket", str(handoff), "--capture", section.capture, "--durability", section.durability]
    child = await spawn("proxy", argv, log_path=run_dir / "logs" / "proxy.log", stdout=asyncio.subprocess.PIPE)
    assert child.process.stdout is not None
    try:
        line = (await asyncio.wait_for(child.process.stdout.readline(), section.start_timeout_s)).decode().strip()
    except TimeoutError:
        line = ""
    if " on http://" not in line:
        await child.stop()
        words = child.last_words()
        if "in use" in words:
            raise UserError(f"proxy.port {section.port} is in use; choose another or 0 for a free one")
        raise HarnessRLError(f"the capture proxy did not start: {words or 'no output'} (log: {child.log_path})")
    url = line.split(" on ", 1)[1]
    return ProxyProcess(child, url, handoff, ProxyClient(url, key))
