"""Push checkpoints with the real client, whose settings are read from the environment at import: `hub_script.py REPOSITORY FOLDER ...`.

Pushes the folders in order, each when a line comes on standard input; prints what became of each as a JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness_rl.learner.checkpoint import Checkpoint
from harness_rl.learner.hub import Pusher


def main(repository: str, folders: list[str]) -> None:
    def told(checkpoint: Checkpoint, where: str, wrong: str | None) -> None:
        print(json.dumps({"step": checkpoint.step, "where": where, "wrong": wrong}), flush=True)

    pusher = Pusher(repository, told, pause_s=0.05)
    for folder, _ in zip(folders, sys.stdin, strict=False):
        step = int(folder.rpartition("-")[2])
        pusher.push(Checkpoint(Path(folder), step, f"k-{step}"))
    assert pusher.finish(60)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
