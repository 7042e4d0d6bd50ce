"""Kills processes in the middle of saving checkpoints: `save_killed.py FOLDER TIMES` prints, for each, what was saved and what was found.

One import of torch for all: each saver is a fork that saves step after step, keeps one, and is killed with -9 at a random moment.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import torch
from learner_helpers import tiny_policy

from harness_rl.learner import checkpoint
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Trainer


def saver(root: Path, written: int) -> None:
    trainer = Trainer(tiny_policy(), LearnerSpec(model="-", run_dir="-", lineage="k"))
    for step in [1, *(n for n in range(2, 10_000) for _ in range(2))]:  # each later step twice, so that one is replaced too
        checkpoint.save(root, step, f"k-{step}", trainer.policy.model, None, trainer.state(), 1)
        os.write(written, f"{step}\n".encode())


def main(folder: Path, times: int) -> None:
    torch.set_num_threads(1)
    for attempt in range(times):
        root = folder / str(attempt)
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            saver(root, writes)
        os.close(writes)
        assert select.select([reads], [], [], 60)[0], "the first checkpoint was not saved in 60 s"
        time.sleep(random.random() * 0.3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        saved = 0
        with os.fdopen(reads) as lines:
            saved = max(int(line) for line in lines)
        checkpoint.clean(root)
        found = checkpoint.find(root).newest
        state = checkpoint.load_state(found) if found else {}
        print(saved, found.step if found else 0, int("optimizer" in state), len(list(root.glob(".step-*"))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
