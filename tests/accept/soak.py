"""`make soak`: the quickstart for hours, with one of its processes killed at random every few minutes; writes tests/reports/soak.md.

Control is started again with `--resume`, as a supervisor of the machine would; everything else has to come back by itself. Judged at the
end: the reward bar of the quickstart, every rollout in exactly one state, sums that add up, nothing left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from e2e.killing import check_sums, descendants, find  # noqa: E402

from harness_rl.metrics import mean, read_metrics  # noqa: E402
from harness_rl.sandboxes.reaper import audit  # noqa: E402

CONFIG = ROOT / "examples" / "configs" / "quickstart.toml"
REPORT = ROOT / "tests" / "reports" / "soak.md"
PARTS = {
    "control": b"harness_rl.cli",
    "learner": b"harness_rl.learner",
    "proxy": b"capture_proxy",
    "engine": b"vllm",
    "engine worker": b"VLLM::Worker",
    "sandbox": b"sandboxes.supervisor",
}
SETTINGS = ["run.steps=400", "checkpoint.every=2", *(f"{part}.max_restarts=1000" for part in ("engine", "learner", "proxy"))]
ENDS, BAR, GRACE_S = 3, 0.85, 90.0


@dataclass
class Soak:
    folder: Path
    seed: int
    started: float = field(default_factory=time.monotonic)
    events: list[str] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    process: subprocess.Popen[bytes] | None = None

    def note(self, text: str) -> None:
        seconds = int(time.monotonic() - self.started)
        self.events.append(f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} {text}")
        print(self.events[-1], flush=True)

    def launch(self) -> None:
        resumed = (self.folder / "journal.sqlite").exists()
        place = ["--resume", str(self.folder)] if resumed else [str(CONFIG), "--set", f"run.dir={self.folder.parent}"]
        settings = [*SETTINGS, f"run.seed={self.seed}", *([] if resumed else [f"run.name={self.folder.name}"])]
        argv = [sys.executable, "-m", "harness_rl.cli", "train", *place, *(part for setting in settings for part in ("--set", setting))]
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            self.process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.note("resumed" if resumed else "started")

    def kill(self, part: str) -> None:
        assert self.process is not None
        try:
            pid = self.process.pid if part == "control" else find(self.process.pid, PARTS[part])
        except LookupError:
            self.note(f"{part} is not there to be killed")
            return
        victims = [pid, *descendants(pid)] if part == "sandbox" else [pid]
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        self.killed[part] += 1
        self.note(f"killed {part}, at step {len(self.lines())}")

    def lines(self) -> list[dict[str, float]]:
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def run(self, hours: float, every_s: float) -> int:
        """Kill on until the time is over, then end the run in order. Returns its exit code."""
        rng, end = random.Random(self.seed), self.started + hours * 3600
        self.launch()
        next_kill = time.monotonic() + every_s
        assert self.process is not None
        while time.monotonic() < end:
            time.sleep(1.0)
            if self.process.poll() is not None:
                if self.process.returncode != -signal.SIGKILL:
                    self.note(f"the run ended by itself with {self.process.returncode}")
                    return self.process.returncode
                self.launch()
            if time.monotonic() > next_kill:
                next_kill += every_s
                self.kill(rng.choice(sorted(PARTS)))
        self.note("time is over")
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(GRACE_S)

    def report(self, code: int) -> bool:
        # A step that was made again from recorded rollouts has none of its own.
        rewards = [line["reward"] for line in self.lines() if line["reward"] is not None]
        check_sums(self.folder)
        with sqlite3.connect(self.folder / "journal.sqlite") as journal:
            states = dict(journal.execute("SELECT state, COUNT(*) FROM rollouts GROUP BY state"))
            causes = dict(journal.execute("SELECT cause, COUNT(*) FROM rollouts WHERE cause IS NOT NULL GROUP BY cause"))
        leaks, last = audit(), mean(rewards[-ENDS:])
        bars = [
            (f"reward, last {ENDS} steps, at least {BAR}", f"{last:.3f}", last >= BAR),
            ("rollouts without an end", str(states.get("running", 0)), "running" not in states),
            ("left behind", str(leaks.total), leaks.total == 0),
            ("exit code, stopped by a signal or done", str(code), code in (0, 130)),
        ]
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
        text = ["# The quickstart with its processes killed", "", f"Commit `{commit}`, seed {self.seed}, {len(rewards)} steps.", ""]
        text += ["| bar | measured | met |", "| --- | --- | --- |"]
        text += [f"| {bar} | {measured} | {'yes' if met else 'NO'} |" for bar, measured, met in bars]
        text += ["", f"Killed: {dict(self.killed)}. Rollouts by state: {states}; failed by cause: {causes}.", ""]
        text += ["Reward of every step: " + " ".join(f"{reward:.2f}" for reward in rewards), "", "```", *self.events, "```", ""]
        REPORT.write_text("\n".join(text))
        print("\n".join(text))
        return all(met for _, _, met in bars)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--every", type=float, default=300.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = ROOT / "runs" / "soak"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    soak = Soak(folder, options.seed)
    return 0 if soak.report(soak.run(options.hours, options.every)) else 1


if __name__ == "__main__":
    sys.exit(main())
