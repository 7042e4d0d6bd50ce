"""The capture proxy as a child of the control process. Its admin key lives in a file that only the owner reads; the store outlives it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from capture_proxy.client import ProxyClient
from harness_rl.config import ProxySection
from harness_rl.errors import HarnessRLError, UserError
from harness_rl.processes import Child, spawn
from harness_rl.sandboxes.scratch import scratch_dir

_MAX_BACKOFF_S = 10.0

log = logging.getLogger(__name__)


@dataclass
class ProxyProcess:
    """A ready proxy. Its address, key, store and handoff socket stay the same over restarts."""

    child: Child
    url: str
    handoff_socket: Path
    client: ProxyClient
    section: ProxySection
    argv: list[str]
    restarts: int = 0

    async def restart(self) -> None:
        """Start a dead proxy again on the same port, after a back-off. It reads its store anew; listeners that it held are gone.

        One that does not come up is started once more. Raises HarnessRLError when it has used up `proxy.max_restarts`.
        """
        argv = [*self.argv, "--port", str(urlsplit(self.url).port)]
        words = f"{self.child.last_words()} (log: {self.child.log_path})"
        while self.restarts < self.section.max_restarts:
            self.restarts += 1
            await self.child.stop()
            await asyncio.sleep(min(0.5 * 2.0 ** (self.restarts - 1), _MAX_BACKOFF_S))
            self.handoff_socket.unlink(missing_ok=True)
            try:
                self.child, _ = await _spawn(argv, self.child.log_path, self.section)
                return
            except HarnessRLError as error:
                log.warning("%s", error)
                words = str(error)
        raise HarnessRLError(f"the capture proxy died {self.restarts + 1} times (proxy.max_restarts): {words}")

    async def stop(self) -> None:
        await self.client.close()
        await self.child.stop(grace_s=6.0)
        shutil.rmtree(self.handoff_socket.parent, ignore_errors=True)


async def start_proxy(
    section: ProxySection,
    *,
    engine_urls: Sequence[str],
    model: str,
    run_dir: Path,
    tokenizer: Path | None = None,
    salt_prefix_cache: bool = False,
    adapters: bool = False,
) -> ProxyProcess:
    """Start it and wait for its ready line. Raises UserError for a port in use, HarnessRLError when it dies or is late."""
    key = secrets.token_hex(32)
    key_file = run_dir / "capture" / ".admin-key"
    key_file.parent.mkdir(parents=True, exist_ok=True)
    key_file.unlink(missing_ok=True)
    with os.fdopen(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    # A Unix socket path holds about 100 bytes; run folders may be longer.
    handoff = scratch_dir() / "handoff.sock"
    argv = [sys.executable, "-m", "capture_proxy", *(flag for url in engine_urls for flag in ("--engine", url)), "--model", model]
    argv += ["--store", str(run_dir / "capture"), "--admin-key-file", str(key_file), "--host", section.host]
    argv += ["--handoff-socket", str(handoff), "--capture", section.capture, "--durability", section.durability]
    if salt_prefix_cache:
        argv.append("--salt-prefix-cache")
    if adapters:
        argv.append("--adapters")
    if tokenizer is not None:
        argv += ["--tokenizer", str(tokenizer)]
    try:
        child, url = await _spawn([*argv, "--port", str(section.port)], run_dir / "logs" / "proxy.log", section)
    except BaseException:
        shutil.rmtree(handoff.parent, ignore_errors=True)
        raise
    return ProxyProcess(child, url, handoff, ProxyClient(url, key), section, argv)


async def _spawn(argv: list[str], log_path: Path, section: ProxySection) -> tuple[Child, str]:
    """The child and its URL, once it has said that it is ready."""
    child = await spawn("proxy", argv, log_path=log_path, stdout=asyncio.subprocess.PIPE)
    assert child.process.stdout is not None
    try:
        line = (await asyncio.wait_for(child.process.stdout.readline(), section.start_timeout_s)).decode().strip()
    except TimeoutError:
        line = ""
    except BaseException:
        await child.stop()
        raise
    if " on http://" not in line:
        await child.stop()
        words = child.last_words()
        if "in use" in words:
            raise UserError(f"proxy.port {section.port} is in use; choose another or 0 for a free one")
        raise HarnessRLError(f"the capture proxy did not start: {words or 'no output'} (log: {child.log_path})")
    return child, line.split(" on ", 1)[1]
