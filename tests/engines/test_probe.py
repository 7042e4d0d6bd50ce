"""The probe believes answers, not version numbers, and names the flag that is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness_rl.engines.command import Adapters
from harness_rl.engines.vllm import connect, launch
from harness_rl.errors import EngineError, UserError
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
        found = await connect(engine.url)
        assert len(found.info.missing()) == 1 and remedy in found.info.missing()[0].remedy
        with pytest.raises(UserError, match=re.escape(remedy)):
            found.require(trains=off != "tokens", tokens=off == "tokens")
        found.require(trains=off == "tokens", tokens=off != "tokens")  # chat capture is enough to train, any weights to be evaluated
    finally:
        await engine.stop()


async def test_a_server_for_adapters_needs_their_routes_and_no_others(fake_engine: FakeEngine, tmp_path: Path) -> None:
    section = fake_engine(off=["weights"])
    engine = await launch(section, tmp_path, run_dir=tmp_path / "run", served_model="policy", adapters=Adapters(8, 3))
    try:
        found = await connect(engine.url)
        found.require(trains=True, tokens=True, adapters=True)
        with pytest.raises(UserError, match="VLLM_SERVER_DEV_MODE=1"):
            found.require(trains=True, tokens=True)
    finally:
        await engine.stop()
    engine = await launch(fake_engine(), tmp_path, run_dir=tmp_path / "run", served_model="policy")
    try:
        with pytest.raises(UserError, match=r"no adapter routes .*; start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            (await connect(engine.url)).require(trains=True, tokens=True, adapters=True)
    finally:
        await engine.stop()


async def test_another_kind_of_server(fake_engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="does not answer as an OpenAI-style server"):
        await launch(fake_engine(off=["vllm"]), tmp_path, run_dir=tmp_path / "run", served_model="policy")
