from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from environments.bench import Bench, a_bench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with a_bench(tmp_path) as made:
        yield made
