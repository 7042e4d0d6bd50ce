"""Real runs whose parts are killed on the way: what control can start again goes on, and a run that lost control itself is resumed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import time
from pathlib import Path

import httpx
import pytest
from e2e.killing import check_whole, descendants, failed_rollouts, find, running, write_config

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.root]
LEARNER, PROXY, WORKER, SANDBOX = b"harness_rl.learner", b"capture_proxy", b"VLLM::Worker", b"sandboxes.supervisor"
CONTROL_IS_DEAD = -9


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, tmp_path)


def test_a_killed_engine_and_a_killed_proxy_are_started_again_and_the_run_ends_whole(config: Path, tmp_path: Path) -> None:
    with running(str(config), log=tmp_path / "output.log") as run:
        run.until("step 1/4")
        run.kill(WORKER)
        run.until("the engine died")
        run.until("step 2/4")
        run.kill(PROXY)
        run.until("the capture proxy died")
        run.ends()
    proven = [int(step) for step in re.findall(r"weights \w+-(\d+) proven", run.said[run.said.index("the engine died") :])]
    assert proven[0] >= 1  # the weights that were trained so far, not those of the model folder
    assert proven[-1] == 4
    check_whole(tmp_path / "killed", 4)
    lost = failed_rollouts(tmp_path / "killed")
    assert lost <= {"engine", "capture", "cancelled"}, "a rollout that lost its engine or its proxy is never scored"


def test_a_killed_learner_and_a_killed_control_process_go_on_from_the_newest_checkpoint(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    with running(str(config), "--set", "checkpoint.every=1", log=tmp_path / "first.log") as run:
        run.until("step 1/4")
        run.until("checkpoint ")
        run.kill(LEARNER)
        run.until("going on from step 1")
        run.until("step 2/4")
        run.until("checkpoints/step-2")
        run.process.kill()
        assert run.process.wait(10) == CONTROL_IS_DEAD
    with running("--resume", str(folder), log=tmp_path / "second.log") as run:
        run.until("going on from step 2")
        run.ends()
    assert "checkpoints/step-4" in run.said
    check_whole(folder, 4)
    assert failed_rollouts(folder) <= {"cancelled", "abandoned"}
    with sqlite3.connect(folder / "journal.sqlite") as journal:
        versions = [version for (version,) in journal.execute("SELECT version FROM steps ORDER BY step")]
        states = dict(journal.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
        twice = journal.execute("SELECT position FROM groups WHERE state = 'durable' GROUP BY position HAVING COUNT(*) > 1").fetchall()
    assert [version.split("-")[1] for version in versions] == ["1", "2", "3", "4"]
    first, second, third, fourth = (version.split("-")[0] for version in versions)
    assert first != second != third == fourth, "each start opened a lineage of its own"
    assert set(states) <= {"durable", "dropped"} and not twice


def test_an_engine_killed_under_the_start_evaluation_with_the_first_update_waiting(config: Path, tmp_path: Path) -> None:
    settings = ["run.steps=2", f'tasks.eval="{tmp_path}/tasks/heldout"', "eval.at_start=true", "eval.samples=6"]
    with running(str(config), *(part for setting in settings for part in ("--set", setting)), log=tmp_path / "output.log") as run:
        run.until("-0 proven")
        time.sleep(35)  # the learner has trained its first batch, the evaluation of 36 rollouts is about half done
        assert "eval start: reward" not in run.said
        run.kill(WORKER)
        run.until("the engine died under the start evaluation")
        run.until("going on from step 0")
        run.ends()
    assert run.said.count("eval start: reward") == 1
    check_whole(tmp_path / "killed", 2)
    with sqlite3.connect(tmp_path / "killed" / "journal.sqlite") as journal:
        (found,) = journal.execute("SELECT value FROM meta WHERE key = 'evaluations'").fetchone()
    (start,) = json.loads(found)
    assert (start["label"], start["tasks"], start["samples"], start["unscored"]) == ("start", 6, 6, 0)


def test_the_whole_trees_of_running_sandboxes_are_killed_and_their_rollouts_are_made_again(config: Path, tmp_path: Path) -> None:
    with running(str(config), "--set", "run.steps=2", log=tmp_path / "output.log") as run:
        run.until("proven")
        killed = 0
        while killed < 3:
            try:
                supervisor = find(run.process.pid, SANDBOX)
            except LookupError:
                time.sleep(0.05)
                continue
            for pid in [*descendants(supervisor), supervisor]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed += 1
            time.sleep(1.0)
        run.ends()
    check_whole(tmp_path / "killed", 2)
    lost = failed_rollouts(tmp_path / "killed")
    assert lost and lost <= {"sandbox_lost", "sandbox_start", "cancelled"}, lost


@pytest.mark.parametrize(
    ("part", "said"), [(LEARNER, "going on from step 0"), (WORKER, "the engine died"), (PROXY, "the capture proxy died")]
)
def test_what_dies_within_a_weight_update_is_started_again(config: Path, tmp_path: Path, part: bytes, said: str) -> None:
    with running(str(config), "--set", "run.steps=2", log=tmp_path / "output.log") as run:
        run.until("step 1/2")
        url = re.search(r"engine ready: (\S+)", run.said)
        assert url is not None
        deadline = time.monotonic() + 300
        while not httpx.get(f"{url[1]}/is_paused", timeout=30).json()["is_paused"]:
            assert time.monotonic() < deadline
        run.kill(part)
        run.until(said)
        run.ends()
    check_whole(tmp_path / "killed", 2)
    assert re.search(r"weights \w+-2 proven", run.said)
