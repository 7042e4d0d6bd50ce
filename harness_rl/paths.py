"""Where harness-rl keeps what it builds once: one cache root, so that nothing is ever written beside the package."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(*parts: str) -> Path:
    """`$HARNESS_RL_CACHE` or `~/.cache/harness-rl`, joined with `parts` (not created)."""
    root = os.environ.get("HARNESS_RL_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "harness-rl").joinpath(*parts)
