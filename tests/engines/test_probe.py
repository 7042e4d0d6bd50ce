"""The probe believes answers, not version numbers, and names the flag that is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness_rl.engines.probe import probe
from harness_rl.engines.vllm import launch
from harness_rl.errors import EngineError
from tests.engines.conftest import FakeEngine


@pytest.mark.parametrize(
    ("off", "remedy"),
    [
        ("tokens", "--enable-scale-out"),
        ("weights", "VLLM_SERVER_DEV_MODE=1"),
        ("backend", "--weight-transfer-config"),
        ("processed", "--logprobs-mode processed_logprobs"),
    ],
)
async def test_missing_part_is_named_with_its_flag(fake_engine: FakeEngine, tmp_path: Path, off: str, remedy: str) -> None:
    engine = await launch(fake_engine(off=[off]), tmp_path, run_dir=tmp_path / "run", served_model="policy")
    try:
        missing = (await probe(engine.url)).missing
    finally:
        await engine.stop()
    assert len(missing) == 1 and remedy in missing[0].remedy


async def test_another_kind_of_server(fake_engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="does not answer as an OpenAI-style server"):
        await launch(fake_engine(off=["vllm"]), tmp_path, run_dir=tmp_path / "run", served_model="policy")
