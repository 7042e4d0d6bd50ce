"""Control groups on trees that look like v1, v2 and mixed hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness_rl.sandboxes.cgroups import GROUP, CgroupLimits, CgroupUnavailable, SessionCgroup, detect, kill_tree, remove_tree

LIMITS = CgroupLimits(memory_bytes=256 << 20, pids=64, cpus=0.5)


def host(tmp_path: Path, mounts: dict[str, str], own: str = "0::/\n") -> tuple[Path, Path]:
    """mountinfo and cgroup files for {mount point: "fstype options"}."""
    rows = [f"30 20 0:1 / {tmp_path / point} rw - {kind.split()[0]} none {kind.split()[-1]}" for point, kind in mounts.items()]
    for point in mounts:
        (tmp_path / point).mkdir()
    (tmp_path / "mountinfo").write_text("\n".join(rows) + "\n")
    (tmp_path / "own").write_text(own)
    return tmp_path / "mountinfo", tmp_path / "own"


def v2_group(path: Path, *, kill: bool = True) -> Path:
    path.mkdir(exist_ok=True, parents=True)
    (path / "cgroup.subtree_control").write_text("")
    if kill:
        (path / "cgroup.kill").write_text("")
    return path


def test_v2_limits_and_groups(tmp_path: Path) -> None:
    mounts = host(tmp_path, {"cg": "cgroup2 rw"})
    v2_group(tmp_path / "cg")
    parent = v2_group(tmp_path / "cg" / GROUP)
    found = detect(*mounts)
    assert found.unified and found.kill_file
    assert (parent / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    group = SessionCgroup.create("s1", found, LIMITS)
    session = parent / "s1"
    read = {name: (session / name).read_text() for name in ("memory.max", "pids.max", "cpu.max")}
    assert read == {"memory.max": str(256 << 20), "pids.max": "64", "cpu.max": "50000 100000"}
    assert group.child("exec-1") == [session / "exec-1" / "cgroup.procs"]
    group.kill("exec-1")
    assert (session / "exec-1" / "cgroup.kill").read_text() == "1"
    (session / "memory.events").write_text("oom 1\noom_kill 3\n")
    assert group.oom_kills() == 3


def test_v2_uses_the_delegated_group_when_the_root_refuses(tmp_path: Path) -> None:
    mounts = host(tmp_path, {"cg": "cgroup2 rw"}, own="0::/user.slice/run.scope\n")
    (tmp_path / "cg" / "cgroup.subtree_control").mkdir()  # writing to it fails
    own = v2_group(tmp_path / "cg" / "user.slice" / "run.scope")
    v2_group(own / GROUP)
    assert detect(*mounts).kill == own / GROUP


def test_v2_without_delegation_is_refused_with_the_remedy(tmp_path: Path) -> None:
    mounts = host(tmp_path, {"cg": "cgroup2 rw"})
    with pytest.raises(CgroupUnavailable, match="Delegate=yes"):
        detect(*mounts)


def test_mixed_host_limits_by_v1_and_kills_by_v2(tmp_path: Path) -> None:
    mounts = host(tmp_path, {"mem": "cgroup rw,memory", "pid": "cgroup rw,pids", "cpu": "cgroup rw,cpu", "uni": "cgroup2 rw"})
    v2_group(tmp_path / "uni" / GROUP)
    found = detect(*mounts)
    assert not found.unified and found.kill == tmp_path / "uni" / GROUP
    group = SessionCgroup.create("s1", found, LIMITS)
    assert (tmp_path / "mem" / GROUP / "s1" / "memory.limit_in_bytes").read_text() == str(256 << 20)
    assert (tmp_path / "cpu" / GROUP / "s1" / "cpu.cfs_quota_us").read_text() == "50000"
    joined = group.child("exec-1")
    assert joined[0] == tmp_path / "uni" / GROUP / "s1" / "exec-1" / "cgroup.procs"
    assert {path.parent for path in joined[1:]} == {tmp_path / place / GROUP / "s1" for place in ("mem", "pid", "cpu")}


def test_missing_controllers_are_named(tmp_path: Path) -> None:
    mounts = host(tmp_path, {"mem": "cgroup rw,memory"})
    with pytest.raises(CgroupUnavailable, match="pids, cpu"):
        detect(*mounts)


def test_kill_without_cgroup_kill_signals_every_process(tmp_path: Path) -> None:
    """On a pure v1 host: the group's processes are killed one by one, after forking has been stopped."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "cgroup.procs").write_text(f"{process.pid}\n")
    assert kill_tree(tmp_path, kill_file=False, deadline_s=0.1) == 1
    assert process.wait(5) == -signal.SIGKILL
    assert (tmp_path / "pids.max").read_text() == "0"


def test_remove_tree_says_whether_it_is_gone(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert remove_tree(tmp_path / "a")
    (tmp_path / "c" / "d").mkdir(parents=True)
    os.close(os.open(tmp_path / "c" / "d" / "busy", os.O_CREAT))
    assert not remove_tree(tmp_path / "c")
