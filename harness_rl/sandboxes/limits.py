"""What one sandbox may use. Invariant: every resource has a limit; the task's own figures win, ours fill the gaps (Harbor's defaults are
"unlimited")."""

from __future__ import annotations

from dataclasses import dataclass, field

_MB = 1 << 20


@dataclass(frozen=True)
class SandboxLimits:
    cpus: float = 1.0
    memory_mb: int = 2048
    storage_mb: int = 1024
    """Everything that the session writes to its root."""
    pids: int = 512
    """Processes and threads together."""
    output_mb: int = 16
    """Captured output of one command (both streams); beyond it the command's writes fail with ENOSPC."""
    transfer_mb: int = 1024
    """One upload."""
    download_mb: int = 256
    """Everything that is copied out of the session, a sparse file by its length; the verifier's own output may take as much again."""
    boot_timeout_s: float = 30.0
    stop_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"sandbox limit {name} must be above 0, is {value}")

    @property
    def memory_bytes(self) -> int:
        return self.memory_mb * _MB

    @property
    def storage_bytes(self) -> int:
        return self.storage_mb * _MB

    @property
    def output_bytes(self) -> int:
        return self.output_mb * _MB

    @property
    def transfer_bytes(self) -> int:
        return self.transfer_mb * _MB

    @property
    def download_bytes(self) -> int:
        return self.download_mb * _MB

    @property
    def storage_in_memory(self) -> bool:
        """Files on a tmpfs are fast and charged to the session's memory. Where they could take more than half of it they go to a disk
        image instead."""
        return 2 * self.storage_mb <= self.memory_mb


@dataclass(frozen=True)
class ExecResult:
    """What one command did. `code` follows the shell: 128+n for signal n, 124 after a time-out, 126 when it could not be started."""

    code: int
    stdout: bytes = field(repr=False)
    stderr: bytes = field(repr=False)
    timed_out: bool = False
    truncated: bool = False
    """The output reached the limit."""
