"""The bench of an update of the weights, without its engine: what its exit code says."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness_rl.bench import sync as bench
from harness_rl.sync.base import SyncReport
from harness_rl.sync.verify import Proof


def report(stopped: float) -> SyncReport:
    proof = Proof(64, 0.0, 0.0, 0.0, 1e-4, True, False)
    return SyncReport("v", proof, {"pause": 0.1, "transfer": 0.2, "finish": 0.1, "probe": 0.1, "stopped": stopped})


@pytest.mark.parametrize(("stopped", "code", "words"), [(1.3, 0, "Ratio 1.30 (bar 1.3): met"), (1.4, 1, "Ratio 1.40 (bar 1.3): NOT met")])
async def test_a_bar_that_is_not_met_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: float, code: int, words: str
) -> None:
    class Bench:
        def __init__(self, url: str, policy: Any, calls: int, tokens: int) -> None:
            self.policy, self.calls, self.tokens = policy, calls, tokens

        async def idle(self, rounds: int) -> list[SyncReport]:
            return [report(stopped)] * rounds

        async def busy(self, stop: Any, rounds: int) -> list[SyncReport]:
            return [report(9.0)] * rounds

    async def launch(*_: Any, **__: Any) -> Any:
        async def stop() -> None: ...

        return SimpleNamespace(url="http://e", stop=stop)

    model = SimpleNamespace(save_pretrained=lambda folder: None, parameters=list)
    policy = SimpleNamespace(model=model, dtype=SimpleNamespace(itemsize=4))
    monkeypatch.setattr(bench, "Policy", SimpleNamespace(load=lambda *_: policy))
    monkeypatch.setattr(bench, "launch", launch)
    monkeypatch.setattr(bench, "Bench", Bench)
    monkeypatch.setattr(bench, "raw_broadcast", lambda *_: [0.4])
    monkeypatch.setattr(bench, "own_reload", lambda *_: [0.6])
    monkeypatch.setattr(sys, "argv", ["sync", str(tmp_path), str(tmp_path / "report.md"), "--rounds", "1"])
    assert await bench.main() == code
    assert words in (tmp_path / "report.md").read_text()
