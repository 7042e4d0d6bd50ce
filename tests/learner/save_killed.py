"""Saves checkpoint after checkpoint until it is killed: `save_killed.py FOLDER` prints each step once its save has ended. It keeps one."""

from __future__ import annotations

import sys
from pathlib import Path

from learner_helpers import tiny_policy

from harness_rl.learner import checkpoint
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Trainer


def main(root: Path) -> None:
    trainer = Trainer(tiny_policy(), LearnerSpec(model="-", run_dir="-", lineage="k"))
    for step in [1, *(n for n in range(2, 10_000) for _ in range(2))]:  # each later step twice, so that one is replaced too
        checkpoint.save(root, step, f"k-{step}", trainer.policy.model, None, trainer.state(), 1)
        print(step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
