"""Saves checkpoint after checkpoint until it is killed: `save_killed.py FOLDER` prints each step once its save has ended. It keeps one."""

from __future__ import annotations

import sys
from pathlib import Path

from learner_helpers import random_rows, tiny_policy

from harness_rl.learner.saving import Saver
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Trainer


def main(root: Path) -> None:
    trainer = Trainer(tiny_policy(), LearnerSpec(model="-", run_dir="-", lineage="k", keep_checkpoints=1))
    trainer.step(random_rows(0), "k-0")
    saver = Saver(root, trainer.spec)
    for step in [1, *(n for n in range(2, 10_000) for _ in range(2))]:  # each later step twice, so that one is replaced too
        saver.begin(step, f"k-{step}", trainer.policy, trainer.updater.optimizer, trainer.state())
        saver.wait()
        print(step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
