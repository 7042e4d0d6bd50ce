"""Real runs that are ended from outside, by a signal or by a full disk: nothing is left, nothing durable is lost."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.killing import check_whole, descendants, running, write_config

from harness_rl.sandboxes.ledger import start_time
from harness_rl.sandboxes.reaper import audit

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.root]
STOPPED, FAILED = 130, 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_in_order_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with running(str(write_config(tmp_path, tmp_path)), log=tmp_path / "output.log") as run:
        run.until("step 1/4")
        parts = {pid: start_time(pid) for pid in descendants(run.process.pid)}
        assert len(parts) > 4, "learner, proxy, engine and its worker, and sandboxes"
        run.process.send_signal(number)
        assert run.process.wait(60) == STOPPED, run.said[-3000:]
    assert [pid for pid, started in parts.items() if started is not None and start_time(pid) == started] == []
    assert audit().total == 0, str(audit())
    with sqlite3.connect(tmp_path / "killed" / "journal.sqlite") as journal:
        (open_still,) = journal.execute("SELECT COUNT(*) FROM rollouts WHERE state = 'running'").fetchone()
    assert open_still == 0
    assert (tmp_path / "killed" / "accounts.json").is_file()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 GiB of its own, room for three checkpoints; nothing of it is written before it is used."""
    image, place = tmp_path / "disk.img", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 30)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(ballast: Path) -> None:
    """Take all that is free, in ever smaller pieces: the pieces need some room for themselves."""
    with ballast.open("wb") as file:
        size, piece = 0, 64 << 20
        while piece >= 4096:
            try:
                os.posix_fallocate(file.fileno(), size, piece)
                size += piece
            except OSError as error:
                assert error.errno == errno.ENOSPC
                piece //= 2


def test_f18_a_disk_that_fills_up_stops_the_run_by_name_and_it_goes_on_once_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    ballast = small_disk / "ballast"
    with running(str(write_config(tmp_path, small_disk)), "--set", "checkpoint.every=1", log=tmp_path / "first.log") as run:
        run.until("checkpoints/step-1")
        fill(ballast)
        deadline = time.monotonic() + 300
        while run.process.poll() is None:
            assert time.monotonic() < deadline, run.said[-3000:]
            time.sleep(0.5)
        assert run.process.returncode == FAILED, run.said[-3000:]
    last = run.said.strip().splitlines()[-1]
    assert last.startswith("harness-rl: ") and ("disk is full" in last or "No space left" in last or "MiB free" in last), last
    assert "Traceback" not in run.said
    assert audit().total == 0, str(audit())
    ballast.unlink()
    with running("--resume", str(small_disk / "killed"), log=tmp_path / "second.log") as run:
        run.until("going on from step ")
        run.ends()
    check_whole(small_disk / "killed", 4)
