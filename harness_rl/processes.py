"""Child processes that never outlive their owner: own process group, death signal from the parent, output to a log file, bounded stop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel kills this process when its parent dies, also by SIGKILL."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Child:
    """A running child and its log."""

    name: str
    process: asyncio.subprocess.Process
    log_path: Path

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def ended(self) -> None:
        """Returns once the process has ended, by whatever means."""
        await self.process.wait()

    async def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM to the group, then SIGKILL after `grace_s`. Idempotent."""
        if self.alive:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), grace_s)
        self._signal(signal.SIGKILL)
        await self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def last_words(self, lines: int = 3) -> str:
        """Why it ended, for an error message: the signal that killed it, or the end of its log."""
        code = self.process.returncode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError:
            return ""
        return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-lines:])[-600:]


async def spawn(
    name: str,
    argv: Sequence[str],
    *,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    cwd: Path | None = None,
) -> Child:
    """Start `argv` in its own process group; stderr (and stdout unless a pipe is asked for) go to `log_path`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log if stdout is None else stdout,
            stderr=log,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    return Child(name, process, log_path)
