"""`python -m harness_rl.learner --config RUN/learner.json --link SOCKET`; the link's token comes in the environment.

Several processes make one learner, as `torchrun --nproc-per-node=N -m harness_rl.learner ...` starts them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from harness_rl.processes import die_with_parent


def _run() -> int:
    parser = argparse.ArgumentParser(prog="harness_rl.learner")
    parser.add_argument("--config", type=Path, required=True, help="a LearnerSpec as JSON")
    parser.add_argument("--link", type=Path, required=True, help="control's Unix socket")
    options = parser.parse_args()
    if "RANK" in os.environ:
        die_with_parent()  # torchrun starts its workers in sessions of their own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; control decides what it means
    from harness_rl.learner.main import main

    return main(options.config, options.link)


if __name__ == "__main__":
    sys.exit(_run())
