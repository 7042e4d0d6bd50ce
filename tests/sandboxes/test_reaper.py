"""Runs that were killed: their sandboxes end with them, and the next start reclaims the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from harness_rl.sandboxes.ledger import Entry, Ledger, start_time
from harness_rl.sandboxes.reaper import audit, reap
from harness_rl.sandboxes.scratch import left_scratch, reap_scratch, scratch_dir

_OWNER = """
import asyncio, sys
from pathlib import Path
from harness_rl.sandboxes.sandbox import Sandbox, SandboxSpec

async def main():
    sandboxes = [await Sandbox.start(SandboxSpec(lowers=(Path(sys.argv[1]),), port=18080)) for _ in range(2)]
    print("ready", flush=True)
    await sandboxes[0].exec(["/bin/sh", "-c", "setsid sleep 5432.5 & sleep 5432.5"])

asyncio.run(main())
"""


def _sleepers() -> int:
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += path.read_bytes() == b"sleep\x005432.5\x00"
        except OSError:
            continue
    return count


@pytest.mark.root
@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_a_killed_owner(rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals) -> None:
    monkeypatch.setenv("HARNESS_RL_CACHE", str(tmp_path))
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, str(rootfs)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        end = time.monotonic() + 10
        while _sleepers() < 2 and time.monotonic() < end:
            time.sleep(0.02)
        assert _sleepers() == 2
        assert reap().sessions == 0 and audit().total == 0  # another live process's sessions are not ours to judge
    finally:
        owner.send_signal(how)
        owner.wait(10)
    end = time.monotonic() + 3
    while _sleepers() and time.monotonic() < end:
        time.sleep(0.02)
    assert _sleepers() == 0
    left = audit()
    assert left.ledger_entries == left.folders == 2 and left.cgroups > 0
    assert reap().sessions == 2
    assert audit().total == 0, str(audit())


def test_an_owner_is_its_pid_and_its_start(tmp_path: Path) -> None:
    ledger = Ledger.at(tmp_path)
    mine = Entry.mine("a1", [], tmp_path / "folder")
    assert mine.owner_alive() and mine.owned_by(os.getpid())
    recycled = Entry(**{**vars(mine), "id": "b2", "owner_start": mine.owner_start - 1})
    rebooted = Entry(**{**vars(mine), "id": "c3", "boot": "another"})
    assert not recycled.owner_alive() and not rebooted.owner_alive()
    for entry in (mine, recycled, rebooted):
        ledger.write(entry)
    (ledger.root / "torn.json").write_text('{"id": "x"')
    assert [entry.id for entry in ledger.entries()] == ["a1", "b2", "c3"]
    assert not (ledger.root / "torn.json").exists()
    assert start_time(2**22 + 1) is None


def test_reap_touches_only_the_dead(tmp_path: Path) -> None:
    ledger = Ledger.at(tmp_path)
    for name, start in (("live", 0), ("dead", -1)):
        folder = tmp_path / "sandboxes" / "sessions" / name
        folder.mkdir(parents=True)
        mine = Entry.mine(name, [], folder)
        mine.owner_start += start
        ledger.write(mine)
    report = reap(tmp_path)
    assert (report.sessions, report.remaining) == (1, 0)
    assert [path.name for path in (tmp_path / "sandboxes" / "sessions").iterdir()] == ["live"]
    assert audit(tmp_path).ledger_entries == 1 and audit(tmp_path).folders == 1


def test_scratch_folders_of_dead_processes_are_reclaimed_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = scratch_dir()
    key = mine.name.split("-")[1]
    dead, other = tmp_path / f"hrl-{key}-1-1-abc", tmp_path / f"hrl-{key}-1-{start_time(1)}-abc"
    foreign, elsewhere = tmp_path / "hrl-abc", tmp_path / "hrl-000000-1-1-abc"
    for folder in (dead, other, foreign, elsewhere):
        folder.mkdir()
    (dead / "link.sock").touch()
    assert sorted(left_scratch()) == sorted([mine, dead])
    assert left_scratch(tmp_path / "another cache") == []
    assert reap_scratch() == 1
    assert sorted(tmp_path.iterdir()) == sorted([mine, other, foreign, elsewhere])
    mine.rmdir()
    assert left_scratch() == []
