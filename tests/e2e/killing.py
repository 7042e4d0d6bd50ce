"""A small real run as a child process, its parts by pid, so that they can be killed, and what must hold once it has ended."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness_rl.metrics import read_metrics
from harness_rl.sandboxes.ledger import start_time
from harness_rl.tasks.quickstart import generate

ROOT = Path(__file__).resolve().parents[2]
GONE_S = 10.0
CONFIG = """
[run]
dir = "{dir}"
name = "killed"
steps = {steps}
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


def write_config(folder: Path, runs: Path) -> Path:
    """The config of a run of four steps below `runs`, with tasks of its own there; itself in `folder`."""
    generate(runs / "tasks", train=6, heldout=6)
    path = folder / "config.toml"
    path.write_text(CONFIG.format(dir=runs, root=ROOT, steps=4))
    return path


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


@dataclass
class Run:
    process: subprocess.Popen[bytes]
    log: Path
    parts: dict[int, int] = field(default_factory=dict)
    """Every process of the run that was seen, by pid with its start time: sandboxes, engine, its workers, learner, proxy."""

    @property
    def said(self) -> str:
        return self.log.read_text()

    def look(self) -> None:
        """Note which processes the run has now. A run that is killed leaves none whose parent tells that it was one of it."""
        for pid in descendants(self.process.pid):
            if (started := start_time(pid)) is not None:
                self.parts[pid] = started

    def left_over(self) -> list[int]:
        """Those of its processes that still live; a process that was killed has a moment to be gone."""
        deadline = time.monotonic() + GONE_S
        while (left := [pid for pid, started in self.parts.items() if start_time(pid) == started]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def until(self, words: str, seconds: float = 400) -> None:
        """Returns once the run has said `words`."""
        deadline = time.monotonic() + seconds
        while words not in self.said:
            assert self.process.poll() is None and time.monotonic() < deadline, self.said[-3000:]
            self.look()
            time.sleep(0.2)

    def kill(self, words: bytes) -> None:
        """SIGKILL to the part whose command line holds `words`."""
        os.kill(find(self.process.pid, words), signal.SIGKILL)

    def ends(self, seconds: float = 600) -> None:
        assert self.process.wait(seconds) == 0, self.said[-3000:]


@contextmanager
def running(*arguments: str, log: Path) -> Iterator[Run]:
    """`harness-rl train`, with its output in `log`; killed at the end if it still runs."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness_rl.cli", "train", *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            yield Run(process, log)
        finally:
            process.kill()
            process.wait()


def failed_rollouts(folder: Path) -> set[str]:
    """Causes; and no rollout is in two minds."""
    with sqlite3.connect(folder / "journal.sqlite") as journal:
        (running_still,) = journal.execute("SELECT COUNT(*) FROM rollouts WHERE state = 'running'").fetchone()
        assert running_still == 0
        return {cause for (cause,) in journal.execute("SELECT DISTINCT cause FROM rollouts WHERE state = 'failed'")}


def check_whole(folder: Path, steps: int) -> None:
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["rows/rejected"] == 0 for line in lines)
    check_sums(folder)
    assert "leak audit" not in (folder / "logs" / "control.log").read_text()


def check_sums(folder: Path) -> None:
    """The accounts name every rollout, call and token that journal and records know of, once."""
    accounts = json.loads((folder / "accounts.json").read_text())
    with sqlite3.connect(folder / "journal.sqlite") as journal:
        (rollouts,) = journal.execute("SELECT COUNT(*) FROM rollouts").fetchone()
    records = [json.loads(path.read_text())["capture"] for path in folder.glob("rollouts/*/outcome.json")]
    seen = [capture for capture in records if capture is not None]
    assert sum(accounts["rollouts"].values()) == rollouts
    assert sum(accounts["calls"].values()) == sum(capture["calls_seen"] for capture in seen)
    assert sum(accounts["tokens"].values()) == sum(capture["tokens"]["sampled"] for capture in seen)
    assert accounts["unrecorded"] == rollouts - len(seen)
