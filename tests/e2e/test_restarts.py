"""Real runs whose parts are killed on the way: what control can start again goes on, and a run that lost control itself is resumed.

The matrix: each part (learner, engine, proxy, the whole tree of a running sandbox, control) at each of three moments (rollouts running,
training, syncing), the three moments of a part in one run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from e2e.killing import Run, check_whole, descendants, failed_rollouts, find, running, write_config

from capture_proxy.trace import TrainingTrace
from harness_rl.sandboxes.reaper import audit

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.root]
LEARNER, PROXY, WORKER, SANDBOX = b"harness_rl.learner", b"capture_proxy", b"VLLM::Worker", b"sandboxes.supervisor"
SERVER = b"vllm.entrypoints"
CONTROL, CONTROL_IS_DEAD, STEPS = b"harness_rl.cli", -9, 3
SETTINGS = [f"run.steps={STEPS}", "checkpoint.every=1", *(f"{part}.max_restarts=3" for part in ("engine", "learner", "proxy"))]
OPTIONS = [part for setting in SETTINGS for part in ("--set", setting)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, tmp_path)


def leased(folder: Path) -> int:
    """Groups that the learner has and has not answered for."""
    with contextlib.closing(sqlite3.connect(f"file:{folder}/journal.sqlite?mode=ro", uri=True)) as journal:
        return journal.execute("SELECT COUNT(*) FROM groups WHERE state = 'leased'").fetchone()[0]


def paused(run: Run) -> bool:
    """Whether the engine stands still for a weight update."""
    url = re.search(r"engine ready: (\S+)", run.said)
    with contextlib.suppress(httpx.HTTPError):
        return url is not None and httpx.get(f"{url[1]}/is_paused", timeout=30).json()["is_paused"]
    return False


MOMENTS: dict[str, Callable[[Run, Path], bool]] = {
    "rollouts running": lambda run, folder: leased(folder) == 0 and not paused(run),
    "training": lambda run, folder: leased(folder) > 0 and not paused(run),
    "syncing": lambda run, folder: paused(run),
}


def await_moment(run: Run, folder: Path, moment: str, part: bytes = CONTROL) -> int:
    """Returns in that moment, with the pid of a process of `part` that runs in it."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert run.process.poll() is None, f"{moment} was never seen: {run.said[-3000:]}"
        run.look()
        if MOMENTS[moment](run, folder):
            with contextlib.suppress(LookupError):
                return run.process.pid if part == CONTROL else find(run.process.pid, part)
        time.sleep(0.05)
    raise AssertionError(f"{moment} was never seen: {run.said[-3000:]}")


def until_said_again(run: Run, words: str, before: int) -> None:
    deadline = time.monotonic() + 400
    while run.said.count(words) <= before:
        assert run.process.poll() is None and time.monotonic() < deadline, run.said[-3000:]
        time.sleep(0.2)


def lineages(folder: Path) -> list[str]:
    """Of the run's policies, in order: each start of a learner opens one."""
    with contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as journal:
        (found,) = journal.execute("SELECT value FROM meta WHERE key = 'lineages'").fetchone()
    return [lineage for lineage, _ in json.loads(found)]


def check_end(folder: Path, run: Run, causes: set[str], *earlier: Run) -> None:
    """`earlier`: the lives of the run that were killed before this one."""
    check_whole(folder, STEPS)
    assert failed_rollouts(folder) <= causes | {"cancelled"}
    assert re.search(rf"weights \w+-{STEPS} proven", run.said)
    assert audit().total == 0, str(audit())
    for life in (*earlier, run):
        assert len(life.parts) > 4, "learner, proxy, engine and its worker, and sandboxes"
        assert life.left_over() == []


@pytest.mark.parametrize(
    ("part", "recovery", "causes"),
    [
        (LEARNER, "going on from step", set()),
        (WORKER, "the engine died", {"engine"}),
        (SERVER, "the engine died", {"engine"}),
        (PROXY, "the capture proxy died", {"capture"}),
    ],
    ids=["learner", "engine worker", "engine server", "proxy"],
)
def test_a_part_is_killed_at_each_moment_and_started_again(
    config: Path, tmp_path: Path, part: bytes, recovery: str, causes: set[str]
) -> None:
    folder = tmp_path / "killed"
    with running(str(config), *OPTIONS, log=tmp_path / "output.log") as run:
        run.until("-0 proven")
        for moment in MOMENTS:
            victim = await_moment(run, folder, moment, part)
            recovered, proven = run.said.count(recovery), run.said.count(" proven")
            os.kill(victim, signal.SIGKILL)
            until_said_again(run, recovery, recovered)
            if part != PROXY:
                until_said_again(run, " proven", proven)  # weights that were pushed anew, before anything else is killed
        run.ends()
    check_end(folder, run, causes)
    starts = lineages(folder)
    assert len(set(starts)) == len(starts)
    assert part != LEARNER or len(starts) == 1 + len(MOMENTS)


def test_where_policies_are_adapters_whatever_is_started_again_samples_under_a_loaded_one(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    lora = ["--set", "sync.lora=adapter", "--set", "learner.lora_rank=4", "--set", "learner.learning_rate=1e-3"]
    with running(str(config), *OPTIONS, *lora, log=tmp_path / "output.log") as run:
        run.until("-0 proven")
        for part, recovery in ((WORKER, "the engine died"), (PROXY, "the capture proxy died"), (LEARNER, "going on from step")):
            victim = await_moment(run, folder, "rollouts running", part)
            recovered, proven = run.said.count(recovery), run.said.count(" proven")
            os.kill(victim, signal.SIGKILL)
            until_said_again(run, recovery, recovered)
            if part != PROXY:
                until_said_again(run, " proven", proven)
        run.ends()
    check_end(folder, run, {"engine", "capture"})
    proven = set(re.findall(r"weights (\w+-\d+) proven", run.said))
    sampled = set()
    for file in folder.glob("rollouts/*/trace.bin"):
        for turn in TrainingTrace.from_bytes(file.read_bytes()).turns:
            ((version, _, _),) = turn.metadata["weight_versions"]
            assert turn.metadata["adapters"] == [f"policy@{version}"]
            sampled.add(version)
    assert sampled <= proven and len(sampled) >= STEPS
    assert len(list((folder / "adapters").iterdir())) <= 3  # the last, what calls were under, and what goes next


def test_whole_trees_of_running_sandboxes_are_killed_at_each_moment_and_their_rollouts_are_made_again(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    # One rollout at a time: some always run, whatever the learner does.
    with running(str(config), *OPTIONS, "--set", "rollout.max_concurrent_rollouts=1", log=tmp_path / "output.log") as run:
        run.until("-0 proven")
        for moment in MOMENTS:
            supervisor = await_moment(run, folder, moment, SANDBOX)
            for pid in [*descendants(supervisor), supervisor]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        run.ends()
    check_end(folder, run, {"sandbox_lost", "sandbox_start"})
    with contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as journal:
        (made_again,) = journal.execute(
            "SELECT COUNT(*) FROM rollouts lost JOIN rollouts again USING (group_id, member) "
            "WHERE lost.cause LIKE 'sandbox_%' AND again.attempt = lost.attempt + 1"
        ).fetchone()
    assert made_again >= 1


def test_control_is_killed_at_each_moment_and_the_run_is_resumed_from_the_newest_checkpoint(config: Path, tmp_path: Path) -> None:
    folder, arguments, lives = tmp_path / "killed", [str(config)], []
    for life, moment in enumerate(MOMENTS):
        with running(*arguments, *OPTIONS, log=tmp_path / f"life-{life}.log") as run:
            run.until(" proven")
            os.kill(await_moment(run, folder, moment), signal.SIGKILL)
            assert run.process.wait(10) == CONTROL_IS_DEAD
        lives.append(run)
        arguments = ["--resume", str(folder)]
    with running(*arguments, *OPTIONS, log=tmp_path / "last.log") as run:
        run.until("going on from step ")
        run.ends()
    check_end(folder, run, {"abandoned"}, *lives)
    with sqlite3.connect(folder / "journal.sqlite") as journal:
        versions = [version.split("-") for (version,) in journal.execute("SELECT version FROM steps ORDER BY step")]
        states = {state for (state,) in journal.execute("SELECT DISTINCT state FROM groups")}
        twice = journal.execute("SELECT position FROM groups WHERE state = 'durable' GROUP BY position HAVING COUNT(*) > 1").fetchall()
    assert [step for _, step in versions] == [str(step) for step in range(1, STEPS + 1)]
    assert len(set(lineages(folder))) == 4, "each start opens a lineage of its own"
    assert states <= {"durable", "dropped"} and not twice


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
