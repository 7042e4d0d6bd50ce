from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from environments.bench import Bench, a_bench

from harness_rl.sessions.openenv_servers import openenv_server

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

Serving = Callable[..., contextlib.AbstractContextManager[str]]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with a_bench(tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def serving() -> Serving:
    """`with serving(sessions=..., CLOSE_EVERY_S=...) as url`: the tests' servers in a process of their own."""

    def start(sessions: int = 64, **env: str) -> contextlib.AbstractContextManager[str]:
        return openenv_server(app="envservers.serve:app", sessions=sessions, env=env)

    return start


@pytest.fixture(scope="session")
def server(serving: Serving) -> Iterator[str]:
    """One for all tests that leave it as it is."""
    with serving() as url:
        yield url


@pytest.fixture(scope="session", params=[2.5, pytest.param(30.0, marks=pytest.mark.full)])
def closing(request: pytest.FixtureRequest, serving: Serving) -> Iterator[tuple[str, float]]:
    """A server that closes every WebSocket after so many seconds."""
    with serving(CLOSE_EVERY_S=str(request.param)) as url:
        yield url, request.param
