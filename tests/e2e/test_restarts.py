"""A real run whose vLLM and whose capture proxy are killed on the way: both are started again and the run ends whole."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness_rl.metrics import read_metrics
from harness_rl.tasks.quickstart import generate

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
[run]
dir = "{dir}"
name = "killed"
steps = 4
[engine]
max_model_len = 1024
max_num_seqs = 8
[harness]
config = "{root}/examples/configs/quickstart_agent.yaml"
[tasks]
train = "{dir}/tasks/train"
[reward]
function = "tests/e2e/rewards.py:sampled_tokens"
[rollout]
num_generations = 2
groups_per_step = 2
max_concurrent_rollouts = 4
max_staleness = 1
max_calls = 2
max_output_tokens_per_call = 24
"""


def descendants(pid: int) -> list[int]:
    """Of a process, itself left out, nearest first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(after_name[1]), []).append(int(stat.parent.name))
    found = list(children.get(pid, []))
    for child in found:  # grows while it is read
        found += children.get(child, [])
    return found


def find(owner: int, words: bytes) -> int:
    """The descendant whose command line holds `words`."""
    for pid in descendants(owner):
        try:
            if words in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise LookupError(f"no descendant of {owner} runs {words!r}")


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.root
def test_a_killed_engine_and_a_killed_proxy_are_started_again_and_the_run_ends_whole(tmp_path: Path) -> None:
    generate(tmp_path / "tasks", train=6, heldout=6)
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(dir=tmp_path, root=ROOT))
    log = tmp_path / "output.log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "harness_rl.cli", "train", str(config)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

        def until(words: str) -> None:
            deadline = time.monotonic() + 400
            while words not in log.read_text():
                assert run.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.2)

        try:
            until("step 1/4")
            os.kill(find(run.pid, b"VLLM::Worker"), signal.SIGKILL)
            until("the engine died")
            until("step 2/4")
            os.kill(find(run.pid, b"capture_proxy"), signal.SIGKILL)
            until("the capture proxy died")
            assert run.wait(600) == 0, log.read_text()[-3000:]
        finally:
            run.kill()
    said = log.read_text()
    proven = [int(step) for step in re.findall(r"weights \w+-(\d+) proven", said[said.index("the engine died") :])]
    assert proven[0] >= 1  # the weights that were trained so far, not those of the model folder
    assert proven[-1] == 4
    folder = tmp_path / "killed"
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["rows/rejected"] == 0 for line in lines)
    with sqlite3.connect(folder / "journal.sqlite") as journal:
        failed = dict(journal.execute("SELECT cause, COUNT(*) FROM rollouts WHERE state = 'failed' GROUP BY cause").fetchall())
        (running,) = journal.execute("SELECT COUNT(*) FROM rollouts WHERE state = 'running'").fetchone()
    assert set(failed) <= {"engine", "capture", "cancelled"}, "a rollout that lost its engine or its proxy is never scored"
    assert running == 0
    assert "leak audit" not in (folder / "logs" / "control.log").read_text()
