from __future__ import annotations

import asyncio
import io
import math
from collections import Counter

import pytest
from rich.console import Console

from harness_rl.metrics import Metric, RunState
from harness_rl.viewer.panel import Panel, frame
from harness_rl.viewer.text import clock, sparkline

PHASES = ["starting", "eval", "warm-up", "training", "stopping", "done", "failed"]


def drawn(state: RunState, width: int, height: int = 40) -> list[str]:
    console = Console(width=width + 20, height=height, record=True, file=io.StringIO(), force_terminal=True)
    messages = [(61.0, text) for text in state.messages]
    console.print(frame(state, messages, width, height))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 107, 108, 120, 200])
@pytest.mark.parametrize("phase", PHASES)
def test_the_panel_fits_its_width_in_every_phase(state: RunState, phase: str, width: int) -> None:
    state.phase = phase
    for shown in (state, RunState("fresh", 20, phase=phase)):
        lines = drawn(shown, width)
        assert {len(line) for line in lines} == {width}
        assert phase in lines[1]


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_shows_what_a_person_asks_for(state: RunState, width: int) -> None:
    text = "\n".join(drawn(state, width))
    for part in ["step 12/20", "0.84", "mean 0.62", "6 running", "1,840 done", "sandbox_start 11", "paused", "syncing", "held", "k3f9-12"]:
        assert part in text
    for part in ["1,412 tokens/s", "staleness 0.8", "step 10 0.70 [0.60, 0.80]", "1:06:40 elapsed", "left", "engine ready"]:
        assert part in text


@pytest.mark.parametrize("height", [5, 14, 16, 24])
def test_messages_give_way_on_a_low_terminal(state: RunState, height: int) -> None:
    lines = drawn(state, 80, height)
    assert len(lines) < max(height, 14)
    assert ("engine ready" in "\n".join(lines)) == (height >= 24)


def test_unknown_numbers_are_shown_as_unknown(state: RunState) -> None:
    state.rewards = [math.nan, 0.5, math.nan]
    state.last = {Metric.GENERATED_TOK_S: math.nan, Metric.STALENESS: None}  # type: ignore[dict-item]
    state.evals = {"start": (math.nan, math.nan, math.nan)}
    text = "\n".join(drawn(state, 80))
    assert "–" in text and "mean 0.50" in text and "nan" not in text and "tokens/s" not in text


def test_plain_lines_for_messages_and_steps() -> None:
    state = RunState("plain", 3)
    out = io.StringIO()
    with Panel(state, console=Console(file=out, width=40)) as panel:
        state.say("engine ready")
        panel.refresh()
        panel.refresh()
        state.step, state.rewards, state.rollouts_done, state.rollouts_failed = 2, [0.25, 0.75], 48, Counter(engine=1)
        state.say("two lines\nin one \x1b[31mmessage")
        panel.refresh()
    lines = out.getvalue().splitlines()
    assert lines == [
        "[00:00] engine ready",
        "[00:00] two lines in one ␛[31mmessage",
        "[00:00] step 1/3  reward 0.25  mean 0.50",
        "[00:00] step 2/3  reward 0.75  mean 0.50  rollouts 48  failed 1 (engine 1)",
    ]


def test_a_terminal_without_unicode_gets_plain_lines() -> None:
    raw = io.BytesIO()
    state = RunState("ascii", 3, messages=["reward → up"])
    file = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    with Panel(state, console=Console(file=file, force_terminal=True)):
        pass
    assert b"reward ? up" in raw.getvalue()


async def test_the_panel_refreshes_and_survives_a_resize(state: RunState) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, height=40, legacy_windows=False, _environ={"TERM": "xterm"})
    with Panel(state, console=console) as panel:
        drawing = asyncio.create_task(panel.run())
        await asyncio.sleep(0.05)
        assert "\x1b[2J" not in out.getvalue()
        console.size = (60, 20)  # type: ignore[assignment]
        state.step = 13
        await asyncio.sleep(0.4)
        drawing.cancel()
    assert "\x1b[2J" in out.getvalue()
    assert "13" in out.getvalue()


def test_a_fault_in_the_drawing_never_reaches_the_run(state: RunState, caplog: pytest.LogCaptureFixture) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=40, _environ={"TERM": "xterm"})
    with Panel(state, console=console) as panel:
        state.evals = {"broken": (1.0,)}  # type: ignore[dict-item]
        panel.refresh()
        panel.refresh()
        console.print("a line of the run")
    assert len([record for record in caplog.records if "turned off" in record.message]) == 1


def test_a_closed_terminal_never_reaches_the_run(state: RunState) -> None:
    out = io.StringIO()
    with Panel(state, console=Console(file=out, force_terminal=True, width=80, height=40, _environ={"TERM": "xterm"})) as panel:
        out.close()
        panel.refresh()


def test_sparkline_and_clock() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([-1, 3], 10) == "▁█"
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([math.nan, 1.0], 10) == " █"
    assert len(sparkline([0.1] * 1000, 33)) == 33
    assert sparkline([], 5) == "" and sparkline([1.0], 0) == ""
    assert [clock(0), clock(59.6), clock(3600), clock(None), clock(math.nan)] == ["00:00", "01:00", "1:00:00", "–", "–"]
