"""Several processes over gloo give what one gives: the same weights, norms, rates and metrics after some steps."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_script import CASES, STEPS, outcome

from harness_rl.errors import UserError
from harness_rl.learner.ranks import Ranks
from harness_rl.learner.spec import LearnerSpec

SCRIPT = Path(__file__).parent / "ranks_script.py"
LIMIT_S = 300.0
TOLERANCE = {"states": 2e-5, "sinks": 2e-5, "bfloat16": 3e-2}
"""Of weights, in the largest weight's size; 1e-9 where a case is not here (float64)."""


def run_ranks(size: int, out: Path, names: list[str], script: Path = SCRIPT) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(out), *names]
    processes = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True) for rank in range(size)]
    try:
        ended = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size, ended


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case, by that many ranks."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(request.param, out, list(CASES))
    return {name: torch.load(out / f"{name}.pt") for name in CASES}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_as_one_process(found: dict[str, Any], name: str) -> None:
    expected, tolerance = outcome(name), TOLERANCE.get(name, 1e-9)
    largest = max(float(weight.abs().max()) for weight in expected["weights"].values())
    assert found[name]["weights"].keys() == expected["weights"].keys()
    for key, weight in expected["weights"].items():
        assert float((found[name]["weights"][key] - weight).abs().max()) <= tolerance * largest, key
    assert len(found[name]["metrics"]) == STEPS
    for ours, theirs in zip(found[name]["metrics"], expected["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=max(tolerance, 1e-5), abs=max(tolerance, 1e-7))


def test_as_many_processes_as_the_spec_says() -> None:
    spec = LearnerSpec(model="-", run_dir="-", lineage="k", processes=2, device="cpu")
    with pytest.raises(UserError, match=r"1 processes were started and learner.processes is 2; start it with torchrun --nproc-per-node=2"):
        Ranks.join(spec, {})
