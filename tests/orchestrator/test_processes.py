"""A child says why it ended: the signal that killed it, else the end of its log."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from harness_rl.processes import spawn


async def test_last_words_of_a_killed_child_name_the_signal(tmp_path: Path) -> None:
    child = await spawn(
        "sleeper", [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(60)"], log_path=tmp_path / "log"
    )
    os.kill(child.process.pid, signal.SIGKILL)
    await child.ended()
    assert child.last_words() == "killed by SIGKILL"


async def test_last_words_of_a_failed_child_are_the_end_of_its_log(tmp_path: Path) -> None:
    child = await spawn("failing", [sys.executable, "-c", "raise SystemExit('no such model')"], log_path=tmp_path / "log")
    await child.ended()
    assert child.last_words() == "no such model"
