"""Everything here runs in the torch environment: `.venv-torch/bin/pytest tests/learner`."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.torch)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(120))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # tiny models; a second thread only adds switching
