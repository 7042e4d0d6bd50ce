"""The list of sandboxes that exist, one small file each. Invariant: the entry is on disk before anything of the sandbox is made and goes
after everything of it is gone, so that whatever a killed run left behind is named somewhere with its dead owner."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from harness_rl.paths import cache_dir


def sandboxes_dir(root: Path | None = None) -> Path:
    """Where the ledger and the session folders lie; `root` is the cache root."""
    return (root or cache_dir()) / "sandboxes"


def start_time(pid: int) -> int | None:
    """Kernel start time of a process in clock ticks since boot, which with the pid names it uniquely; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = stat[stat.rindex(")") + 2 :].split()
    return None if state in "ZX" else int(rest[18])


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass
class Entry:
    id: str
    owner_pid: int
    owner_start: int
    boot: str
    cgroups: list[str]
    folder: str
    supervisor_pid: int = 0
    supervisor_start: int = 0

    @classmethod
    def mine(cls, identity: str, cgroups: list[Path], folder: Path) -> Entry:
        return cls(identity, os.getpid(), start_time(os.getpid()) or 0, boot_id(), [str(path) for path in cgroups], str(folder))

    def owner_alive(self) -> bool:
        return self.boot == boot_id() and start_time(self.owner_pid) == self.owner_start

    def owned_by(self, pid: int) -> bool:
        return self.owner_pid == pid and self.owner_alive()


@dataclass(frozen=True)
class Ledger:
    root: Path

    @classmethod
    def at(cls, root: Path | None = None) -> Ledger:
        return cls(sandboxes_dir(root) / "ledger")

    def write(self, entry: Entry) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / f"{entry.id}.json"
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(entry)))
        draft.replace(path)

    def remove(self, identity: str) -> None:
        (self.root / f"{identity}.json").unlink(missing_ok=True)

    def entries(self) -> Iterator[Entry]:
        """Every readable entry; an unreadable one is a torn write of a process that had made nothing yet, and is dropped."""
        for path in sorted(self.root.glob("*.json")):
            try:
                yield Entry(**json.loads(path.read_text()))
            except FileNotFoundError:
                continue
            except (ValueError, TypeError):
                path.unlink(missing_ok=True)
