"""Control groups of a session, on cgroup v1, v2 and hosts that have both. Invariant: every process of a session is in its groups, so that
limits hold for all of them together and one write (or one loop of SIGKILLs where the kernel has no `cgroup.kill`) ends them all.

A session has one group with the limits (on v1 one in each controller's hierarchy) and below it one small group for each command, which
exists only to be killed. On a pure v2 host both are in one tree; the session's own group holds no process and hands no controller down,
as v2 demands."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

GROUP = "harness-rl"
"""Name of our group under each hierarchy's root; sessions are its children."""
_CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000


class CgroupUnavailable(RuntimeError):
    """The host's control groups cannot hold a sandbox; the message says what to change."""


@dataclass(frozen=True)
class CgroupLimits:
    memory_bytes: int
    pids: int
    cpus: float


@dataclass(frozen=True)
class Hierarchies:
    """Where sessions' groups are made on this host."""

    limits: dict[str, Path]
    """Controller -> directory that holds its session groups. On v2 the three directories are the same."""
    kill: Path
    """Directory of the hierarchy in which commands have groups of their own."""
    kill_file: bool
    """Whether groups in `kill` have the kernel's `cgroup.kill`."""
    unified: bool
    """True on a pure v2 host."""

    def directories(self) -> list[Path]:
        return list(dict.fromkeys([*self.limits.values(), self.kill]))


def detect(mounts: Path = Path("/proc/self/mountinfo"), own: Path = Path("/proc/self/cgroup")) -> Hierarchies:
    """Find (and where needed make) the parent groups. Raises CgroupUnavailable."""
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in mounts.read_text().splitlines():
        left, _, right = line.partition(" - ")
        target, (fstype, _source, options) = Path(left.split()[4]), right.split(maxsplit=2)
        if fstype == "cgroup":
            v1.update({name: target for name in options.split(",") if name in _CONTROLLERS})
        elif fstype == "cgroup2":
            v2 = target
    try:
        if v2 is not None and not v1:
            parent = _delegate(v2, own)
            return Hierarchies({name: parent for name in _CONTROLLERS}, parent, _has_kill(parent), unified=True)
        missing = [name for name in _CONTROLLERS if name not in v1]
        if missing:
            raise CgroupUnavailable(
                f"no cgroup controller for {', '.join(missing)}: mount cgroup2 at /sys/fs/cgroup, or the v1 controllers below it"
            )
        limits = {name: _make(root / GROUP) for name, root in v1.items()}
        kill = _make(v2 / GROUP) if v2 is not None else limits["pids"]
        return Hierarchies(limits, kill, _has_kill(kill), unified=False)
    except OSError as error:
        raise CgroupUnavailable(
            f"cannot create control groups: {error}; "
            "run as root with a writable /sys/fs/cgroup (in a container: --privileged --cgroupns=host)"
        ) from error


def _make(path: Path) -> Path:
    path.mkdir(mode=0o755, exist_ok=True)
    return path


def _has_kill(path: Path) -> bool:
    return (path / "cgroup.kill").exists()


def _delegate(root: Path, own: Path) -> Path:
    """The v2 parent group with memory, pids and cpu enabled for its children: at the mount's root, or below our own group if it was
    delegated."""
    places = [root]
    for line in own.read_text().splitlines():
        if line.startswith("0::/") and (below := line[4:]):
            places.append(root / below)
    problem: OSError | None = None
    for place in places:
        try:
            _enable(place)
            _enable(_make(place / GROUP))
        except OSError as error:
            problem = error
            continue
        return place / GROUP
    raise CgroupUnavailable(
        f"cgroup v2: cannot enable {'+'.join(_CONTROLLERS)} below {' or '.join(map(str, places))} ({problem}); "
        "start with `systemd-run --scope -p Delegate=yes ...`, or move this container's processes into a leaf group first"
    )


def _enable(group: Path) -> None:
    enabled = (group / "cgroup.subtree_control").read_text().split()
    if wanted := [f"+{name}" for name in _CONTROLLERS if name not in enabled]:
        (group / "cgroup.subtree_control").write_text(" ".join(wanted))


@dataclass
class SessionCgroup:
    """The groups of one session."""

    name: str
    hierarchies: Hierarchies
    _children: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def create(cls, name: str, hierarchies: Hierarchies, limits: CgroupLimits) -> SessionCgroup:
        group = cls(name, hierarchies)
        for directory in group.directories():
            directory.mkdir(mode=0o755)
        for path, value, required in group._settings(limits):
            if required or path.exists():
                path.write_text(value)
        return group

    def directories(self) -> list[Path]:
        return [directory / self.name for directory in self.hierarchies.directories()]

    def _settings(self, limits: CgroupLimits) -> list[tuple[Path, str, bool]]:
        """(file, value, must exist)."""
        memory, pids, cpu = (self.hierarchies.limits[name] / self.name for name in _CONTROLLERS)
        quota = max(1000, int(limits.cpus * _CPU_PERIOD_US))
        shared = [(pids / "pids.max", str(limits.pids), True)]
        if self.hierarchies.unified:
            return [
                *shared,
                (memory / "memory.max", str(limits.memory_bytes), True),
                (memory / "memory.swap.max", "0", False),
                (cpu / "cpu.max", f"{quota} {_CPU_PERIOD_US}", True),
            ]
        return [
            *shared,
            (memory / "memory.limit_in_bytes", str(limits.memory_bytes), True),
            (memory / "memory.memsw.limit_in_bytes", str(limits.memory_bytes), False),
            (cpu / "cpu.cfs_period_us", str(_CPU_PERIOD_US), True),
            (cpu / "cpu.cfs_quota_us", str(quota), True),
        ]

    def child(self, name: str) -> list[Path]:
        """Make the group of one command; returns the `cgroup.procs` files that its first process must write "0" to."""
        directory = self.hierarchies.kill / self.name / name
        directory.mkdir(mode=0o755)
        self._children[name] = directory
        joined = [directory]
        joined += [path for path in self.directories() if path != directory.parent]
        return [path / "cgroup.procs" for path in joined]

    def kill(self, name: str | None = None) -> int:
        """End every process of one command, or of the whole session; returns how many there were."""
        directory = self.hierarchies.kill / self.name
        return kill_tree(directory / name if name else directory, kill_file=self.hierarchies.kill_file)

    def commands(self) -> list[str]:
        return list(self._children)

    def kill_commands(self, keep: str) -> int:
        """End every process of every command except `keep`."""
        return sum(self.kill(name) for name in list(self._children) if name != keep)

    def release(self, name: str) -> bool:
        """Drop the group of a command that has ended; False while it still has processes (a service it left behind)."""
        directory = self._children.get(name)
        if directory is None:
            return True
        try:
            directory.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return False
        del self._children[name]
        return True

    def oom_kills(self) -> int:
        """Processes of this session that the kernel killed for memory."""
        directory = self.hierarchies.limits["memory"] / self.name
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                for line in (directory / name).read_text().splitlines():
                    key, _, value = line.partition(" ")
                    if key == "oom_kill":
                        return int(value)
        return 0


def processes(directory: Path) -> list[int]:
    """Pids in a group and the groups below it."""
    found: list[int] = []
    for path, _folders, _files in os.walk(directory):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in Path(path, "cgroup.procs").read_text().split()]
    return found


def kill_tree(directory: Path, *, kill_file: bool, deadline_s: float = 2.0) -> int:
    """SIGKILL everything in a group; returns how many processes there were. Without `cgroup.kill`, forks are stopped first so that the
    loop ends."""
    victims = processes(directory)
    if kill_file:
        with contextlib.suppress(FileNotFoundError):
            (directory / "cgroup.kill").write_text("1")
        return len(victims)
    with contextlib.suppress(OSError):
        (directory / "pids.max").write_text("0")
    end, seen = time.monotonic() + deadline_s, set(victims)
    while victims and time.monotonic() < end:
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        victims = processes(directory)
        seen.update(victims)
    return len(seen)


def remove_tree(directory: Path) -> bool:
    """Remove a group and the groups below it, deepest first; True when it is gone."""
    for path, _folders, _files in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(path)
    return not directory.exists()
