"""What the agents' tests share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def task(tmp_path: Path) -> Path:
    from trials import write_task

    return write_task(tmp_path / "task")


@pytest.fixture(scope="session")
def need_root() -> None:
    if os.geteuid() != 0 or shutil.which("bwrap") is None:
        pytest.fail("the agents' tests need root and bubblewrap; `make test` installs the latter")
