from __future__ import annotations

import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness_rl.metrics import Metric, RunState
from harness_rl.orchestrator.accounts import Accounts
from harness_rl.viewer.closing import closing_rows, closing_table
from harness_rl.viewer.plot import place_evals, write_reward_plot

EVALS = {"before warm-up": (0.02, 0.0, 0.1), "after warm-up": (0.4, 0.3, 0.5), "step 10": (0.7, 0.6, 0.8), "end": (0.9, 0.8, 0.95)}


def line(step: int, reward: Any, **more: Any) -> dict[str, Any]:
    return {Metric.STEP: step, Metric.REWARD: reward, Metric.REWARD_STD: 0.4, Metric.SCORED: 24, **more}


@pytest.mark.parametrize(
    "lines",
    [
        [line(step, 0.4 + 0.03 * step, **{Metric.REWARD_TRAINED: 0.5}) for step in range(1, 21)],
        [line(1, None), line(2, math.nan), line(3, 0.5)],
        [line(1, 0.5, **{Metric.REWARD_STD: None, Metric.SCORED: 0})],
        [line(1, -3.0), line(2, 40.0)],
        [line(1, 7.0)],
        [{}],
        [],
    ],
)
@pytest.mark.parametrize("evals", [{}, EVALS, {"start": (math.nan, math.nan, math.nan)}, {"start": (0.5, None, None)}])
def test_the_plot_is_a_png_whatever_is_unknown(tmp_path: Path, lines: list[dict[str, Any]], evals: Any) -> None:
    path = write_reward_plot(tmp_path, lines, evals)
    assert path == tmp_path / "reward.png"
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.rstrip().endswith(b"IEND\xaeB`\x82")
    assert int.from_bytes(data[16:20], "big") == 1800


def test_evals_stand_where_they_were_made() -> None:
    assert place_evals(EVALS, last_step=20) == [(-1, "before warm-up"), (0, "after warm-up"), (10, "step 10"), (20, "end")]


def test_the_closing_table_adds_up_what_was_counted() -> None:
    state = RunState("run", 4, phase="done", step=4, evals={"end": (0.9, 0.8, 0.95)})
    counted = {Metric.STEP_SECONDS: 30.0, "perf/rollout_wait_s": 12.5, Metric.TRAINED_TOK_S: 900.0}
    lines = [line(step, reward, **counted) for step, reward in enumerate([0.1, 0.2, None, 0.3, 0.9], start=1)]
    accounts = Accounts(
        Counter(trained=62, engine=2), Counter(ours=2), Counter(trained=124, late=3), Counter(), Counter(trained=15, stale=5)
    )
    rows = dict(closing_rows(state, lines, {"durable": 8}, accounts))
    assert rows["reward"].startswith("0.20 → 0.47   (first and last 3 of 4 steps")
    assert rows["eval end"] == "0.90 [0.80, 0.95]"
    assert rows["groups"] == "durable 8" and rows["rollouts"] == "64: trained 62, engine 2" and rows["failed by fault"] == "ours 2"
    assert rows["rows"] == "20: trained 15, stale 5" and rows["model calls"] == "127: trained 124, late 3"
    assert rows["time"] == "steps 02:30, rollout wait 01:02"
    assert not {"sampled tokens", "the model's", "without a record"} & rows.keys()
    accounts.cut = 3
    assert dict(closing_rows(state, lines, {}, accounts))["the model's"] == "3 scored rollouts that a limit or the agent's time cut"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_closing_table_fits_even_with_nothing_in_it(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(closing_table(RunState("run", 4, phase="failed"), [], {}, Accounts()))
    text = console.export_text()
    assert "failed after 0 of 4 steps" in text and "reward" in text
    assert max(map(len, text.splitlines())) <= width
