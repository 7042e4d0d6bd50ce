"""Fixtures: a fake engine, a proxy in this process in front of it, and an agent that speaks raw Chat Completions."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_engine import FakeEngine
from proxy_helpers import ADMIN_KEY, Serve, Served

from capture_proxy.admin import main_app
from capture_proxy.app import Proxy, server
from capture_proxy.auth import key_hash
from capture_proxy.client import ProxyClient
from capture_proxy.settings import Settings
from capture_proxy.upstream import Retry


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as fake:
        yield fake


@pytest.fixture
async def serve(tmp_path: Path, certificates: Path) -> AsyncIterator[Serve]:
    """`await serve(engine_url, ...)` starts a proxy in this process; settings may be overridden by name."""
    async with AsyncExitStack() as stack:

        async def start(*engines: str, store: Path | None = None, **overrides: Any) -> Served:
            fields: dict[str, Any] = {
                "certificates": certificates,
                "retry": Retry(total_s=1.0, base_s=0.01),
                "seal_grace_s": 0.2,
                "keepalive_s": 0.2,
                **overrides,
            }
            settings = Settings(
                engines=engines, model="policy", store=store or tmp_path / "store", admin_key_hash=key_hash(ADMIN_KEY), **fields
            )
            proxy = Proxy(settings)
            stack.push_async_callback(proxy.close)
            runner = server(main_app(proxy), 0.5)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            stack.push_async_callback(runner.cleanup)
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            admin = await stack.enter_async_context(ProxyClient(url, ADMIN_KEY))
            http = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), connector=aiohttp.TCPConnector(limit=0))
            )
            return Served(proxy, url, admin, http)

        yield start


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all proxies, so that a template is tried once."""
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture
async def served(engine: FakeEngine, serve: Serve) -> Served:
    return await serve(engine.url)


@pytest.fixture
def real_engine(request: pytest.FixtureRequest) -> str:
    """URL of a real vLLM that serves `policy` with the token routes."""
    url = os.environ.get("HARNESS_RL_TEST_ENGINE")
    return url if url else request.getfixturevalue("engine_url")
