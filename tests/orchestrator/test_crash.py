"""The crash matrix in short: a run of real control, journal, store and proxy is killed at three moments and resumed, or ended by a signal.

With a real engine, learner, agent and sandbox the same is in tests/e2e/test_restarts.py and test_ends.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.killing import Run, check_sums, failed_rollouts
from orchestrator import crash_script
from orchestrator.crash_script import STEPS, STOPPED

from capture_proxy.store import SUFFIX, read_log
from harness_rl.metrics import read_metrics
from harness_rl.sandboxes.scratch import left_scratch

MOMENTS = ("waiting", "training", "syncing")
"""Of the learner; rollouts run in each."""


@contextlib.contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Run]:
    log = folder / f"life-{len(list(folder.glob('life-*')))}.log"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, crash_script.__file__, str(folder), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
        )
        try:
            yield Run(process, log)
        finally:
            process.kill()
            process.wait()


def await_moment(run: Run, folder: Path, moment: str, after: int) -> None:
    """Returns while the learner is at `moment`, past step `after`, and rollouts run."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert run.process.poll() is None, run.said[-3000:]
        run.look()
        with contextlib.suppress(FileNotFoundError, ValueError, sqlite3.OperationalError):
            now, step = (folder / "a" / "phase").read_text().split()
            if now == moment and int(step) >= after and count(folder, "SELECT COUNT(*) FROM rollouts WHERE state = 'running'"):
                return
        time.sleep(0.01)
    raise AssertionError(f"{moment} was never seen: {run.said[-3000:]}")


def count(folder: Path, query: str) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{folder}/a/journal.sqlite?mode=ro", uri=True)) as journal:
        return int(journal.execute(query).fetchone()[0])


def check_store(folder: Path) -> None:
    """No session is open for whoever has its key."""
    logs = list((folder / "a" / "capture").glob("*" + SUFFIX))
    assert logs and all(read_log(path).records[-1].header["t"] == "delete" for path in logs)


def test_a_run_whose_control_is_killed_at_each_moment_is_resumed_and_loses_nothing(tmp_path: Path) -> None:
    lives: list[Run] = []
    for life, moment in enumerate(MOMENTS):
        with running(tmp_path, *(["resume"] if life else [])) as run:
            await_moment(run, tmp_path, moment, after=life)
            os.kill(run.process.pid, signal.SIGKILL)
            assert run.process.wait(10) == -signal.SIGKILL
        lives.append(run)
    with running(tmp_path, "resume") as run:
        assert run.process.wait(120) == 0, run.said[-3000:]
    folder = tmp_path / "a"
    for killed in lives:
        assert killed.parts and killed.left_over() == [], "the proxy dies with control"
    assert left_scratch() == [], "folders of sockets are reclaimed by the next start"
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert "abandoned" in failed_rollouts(folder) <= {"abandoned", "cancelled"}
    check_sums(folder)
    check_store(tmp_path)
    assert json.loads((folder / "accounts.json").read_text())["failures"]["ours"] >= len(MOMENTS)
    with contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as journal:
        lineages = [name for name, _ in json.loads(journal.execute("SELECT value FROM meta WHERE key = 'lineages'").fetchone()[0])]
        versions = [version for (version,) in journal.execute("SELECT version FROM steps ORDER BY step")]
        states = {state for (state,) in journal.execute("SELECT DISTINCT state FROM groups")}
        twice = journal.execute("SELECT position FROM groups WHERE state = 'durable' GROUP BY position HAVING COUNT(*) > 1").fetchall()
    assert len(set(lineages)) == len(lineages) == len(MOMENTS) + 1
    assert [version.split("-")[1] for version in versions] == [str(step) for step in range(1, STEPS + 1)]
    assert states <= {"durable", "dropped"} and not twice


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_in_order_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path) as run:
        await_moment(run, tmp_path, "training", after=1)
        run.process.send_signal(number)
        assert run.process.wait(60) == STOPPED, run.said[-3000:]
    assert run.parts and run.left_over() == []
    assert count(tmp_path, "SELECT COUNT(*) FROM rollouts WHERE state = 'running'") == 0
    check_sums(tmp_path / "a")
    check_store(tmp_path)
