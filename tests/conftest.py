"""What several parts' tests share: one real vLLM for the whole session, started on first use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real vLLM with the quickstart's model, served as `policy`; `HARNESS_RL_TEST_ENGINE` names a running one instead."""
    given = os.environ.get("HARNESS_RL_TEST_ENGINE")
    if given:
        yield given
        return
    from harness_rl.config import EngineSection
    from harness_rl.engines.vllm import launch
    from harness_rl.models import resolve_model

    loop = asyncio.new_event_loop()
    section = EngineSection(max_model_len=4096)
    engine = loop.run_until_complete(
        launch(section, Path(resolve_model("smollm2-135m")), run_dir=tmp_path_factory.mktemp("engine"), served_model="policy")
    )
    yield engine.url
    loop.run_until_complete(engine.stop())
    loop.close()
