from __future__ import annotations

import pytest

from harness_rl.sessions.harbor_trial import load_litellm


@pytest.fixture(scope="session", autouse=True)
def litellm_without_download() -> None:
    load_litellm()
