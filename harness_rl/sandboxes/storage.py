"""Where a session's writes go. Invariant: it is limited, and it is gone with the session.

Small quotas are a tmpfs, larger ones (limits.SandboxLimits.storage_in_memory) a sparse disk image in the session's folder on a loop
device that the kernel frees with the last mount. A build writes straight into the folder that becomes the layer."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

from .errors import SandboxBuildFailedError
from .limits import SandboxLimits

_RESERVE_BYTES = 1 << 30
"""Free space that must remain on the host's disk after a session's image."""


async def make_storage(folder: Path, limits: SandboxLimits, upper: Path | None) -> dict[str, Any]:
    """The `storage` part of the supervisor's spec. Raises SandboxBuildFailedError."""
    if upper is not None:
        return {"kind": "directory", "path": str(upper)}
    if limits.storage_in_memory:
        return {"kind": "tmpfs", "bytes": limits.storage_bytes}
    free = shutil.disk_usage(folder).free
    if free < limits.storage_bytes + _RESERVE_BYTES:
        raise SandboxBuildFailedError(
            f"{folder} has {free >> 20} MiB free, but a sandbox with storage_mb = {limits.storage_mb} needs "
            f"{(limits.storage_bytes + _RESERVE_BYTES) >> 20}: free disk space, or move the cache with HARNESS_RL_CACHE"
        )
    image = folder / "disk.img"
    with image.open("wb") as file:
        os.truncate(file.fileno(), limits.storage_bytes)
    process = await asyncio.create_subprocess_exec(
        "mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", str(image),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _out, errors = await process.communicate()
    if process.returncode != 0:
        raise SandboxBuildFailedError(f"mkfs.ext4 of a session's disk image failed: {errors.decode('utf-8', 'replace').strip()[-200:]}")
    return {"kind": "loop", "path": str(image)}
