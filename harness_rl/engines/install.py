"""Build the torch environment (torch, transformers, vLLM), by the one script that `make setup` uses too.

Invariant: an environment is usable only once the script has stamped it; nothing here installs by another way.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from harness_rl.errors import UserError


def install(into: Path) -> int:
    """Build or complete the environment at `into`; 0 when it is there. Raises UserError where there is no source checkout."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "setup.sh"
    if not script.is_file():
        raise UserError(
            f"engine install: needs a source checkout of harness-rl; elsewhere run `python -m venv {into}` and "
            f"`{into}/bin/pip install harness-rl[learner,vllm]`, and set engine.python = {into}/bin/python"
        )
    env = {**os.environ, "TORCH_VENV": str(into.absolute())}
    return subprocess.run([str(script), "debian", "torch"], env=env, stdin=subprocess.DEVNULL).returncode
