from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from environments.bench import Bench, a_bench

from harness_rl.sessions.openenv_servers import openenv_server

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with a_bench(tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """All servers of the tests in a process of their own."""
    with openenv_server(app="envservers.serve:app") as url:
        yield url


@pytest.fixture(scope="session", params=[2.5, pytest.param(30, marks=pytest.mark.full)])
def closing(request: pytest.FixtureRequest, server: str) -> tuple[str, float]:
    """A server that closes every WebSocket after so many seconds, and how many."""
    return f"{server}/closing{request.param}", request.param
