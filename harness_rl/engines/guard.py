"""Runs a command as the leader of its process group and takes the whole group down with its owner. A script of the standard library alone.

Usage: guard.py OWNER_PID COMMAND... Needed because vLLM's engine and worker processes survive a server that is killed: the kernel's
death signal reaches only the direct child. When the owner dies, however it does, the group is killed; when the command ends, what it left
in the group is killed and its exit code is ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1


def main() -> int:
    owner, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGHUP, lambda number, frame: os.killpg(0, signal.SIGKILL))
    # The group gets a stop's SIGTERM as a whole; the guard stays for the command's end. A handler, not SIG_IGN: that would be inherited.
    signal.signal(signal.SIGTERM, _wait_on)
    signal.signal(signal.SIGINT, _wait_on)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != owner:
        return 1
    code = subprocess.Popen(command).wait()
    _kill_rest()
    return code if code >= 0 else 128 - code


def _wait_on(number: int, frame: FrameType | None) -> None:
    return None


def _kill_rest() -> None:
    """Everything of our group but ourselves."""
    group, me = os.getpgid(0), os.getpid()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != me:
            try:
                if os.getpgid(int(entry.name)) == group:
                    os.kill(int(entry.name), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


if __name__ == "__main__":
    sys.exit(main())
