"""The live view of a run: a panel on a terminal, plain lines elsewhere.

It only reads `RunState`, starts no thread and never ends a run: a terminal that goes away or a fault in the drawing is logged once, and
the panel turns itself off.

    with Panel(state) as panel:
        drawing = asyncio.create_task(panel.run())
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.panel import Panel as Frame
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from harness_rl.metrics import Metric, RunState
from harness_rl.metrics import mean as mean_of
from harness_rl.viewer.text import by_count, clock, finite, fit, interval, number, printable, sparkline

log = logging.getLogger(__name__)

_REFRESH_S = 0.25
_MESSAGES_SHOWN = 4
_LABEL_WIDTH = 11
_LINES_AROUND = 6
"""Lines of a panel with messages that are neither body nor messages: frame, headline, gaps, cursor."""
_SIDE_BY_SIDE_FROM = 108
"""Columns from which learning and machinery stand beside each other."""

_PHASES = {"training": "green", "done": "green", "failed": "red", "stopping": "yellow"}
_ENGINE = {"ready": "green", "paused": "cyan", "stopped": "bright_black"}
_LEARNER = {"training": "green", "syncing": "cyan", "waiting": "bright_black", "stopped": "bright_black"}
_BUSY = "yellow"
"""Of every state that is none of the above: starting, restarting, eval, warm-up."""


class Panel:
    """Shows `state` until left. `run()` refreshes it about four times a second; leaving draws the last state."""

    def __init__(self, state: RunState, *, console: Console | None = None) -> None:
        self._state = state
        self._console = console or Console()
        self._live: Live | None = None
        self._size = self._console.size
        can_draw = self._console.is_terminal and not self._console.is_dumb_terminal
        self._plain = not can_draw or not self._console.encoding.startswith("utf")
        self._off = False
        self._steps_printed = state.step
        self._seen: list[tuple[float, str]] = []
        """(seconds since the start, message) of every message seen so far."""

    def __enter__(self) -> Panel:
        self.refresh()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.refresh()
        live, self._live = self._live, None
        if live:
            try:
                live.stop()
            except (OSError, ValueError) as failure:
                log.warning("live panel: the terminal went away: %s", failure)

    async def run(self) -> None:
        """Refresh until cancelled."""
        while not self._off:
            self.refresh()
            await asyncio.sleep(_REFRESH_S)

    def refresh(self) -> None:
        """Show the state of now. Never raises."""
        if self._off:
            return
        try:
            self._collect_messages()
            if self._plain:
                self._print_lines()
            else:
                self._draw()
        except Exception:
            self._off = True
            log.exception("live panel turned off; the run goes on and its log files have everything")

    def _draw(self) -> None:
        size = self._console.size
        if self._live and size != self._size:
            # The terminal has re-wrapped what was drawn, so that its height is unknown: start again on a clean screen.
            self._live.stop()
            self._live = None
            self._console.control(Control.clear(), Control.home())
        self._size = size
        # Live gets finished lines: it redraws on every print of the run, which a fault in the drawing must not reach.
        drawing = SegmentLines(self._console.render_lines(frame(self._state, self._seen, size.width, size.height)), new_lines=True)
        if self._live is None:
            self._live = Live(drawing, console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start(refresh=True)
        else:
            self._live.update(drawing, refresh=True)

    def _collect_messages(self) -> None:
        new = self._state.messages[len(self._seen) :]
        elapsed = time.monotonic() - self._state.started_at
        for message in new:
            text = printable(" ".join(message.split()))
            self._seen.append((elapsed, text))
            if self._plain:
                self._line(text)

    def _print_lines(self) -> None:
        state = self._state
        while self._steps_printed < state.step:
            self._steps_printed += 1
            self._line(_step_line(state, self._steps_printed))

    def _line(self, text: str) -> None:
        elapsed = time.monotonic() - self._state.started_at
        encoding = self._console.encoding
        line = f"[{clock(elapsed)}] {text}".encode(encoding, "replace").decode(encoding)
        self._console.print(Text(line), soft_wrap=True)


def _step_line(state: RunState, step: int) -> str:
    behind = state.step - step
    reward = state.rewards[-1 - behind] if behind < len(state.rewards) else None
    parts = [f"step {step}/{state.total_steps}", f"reward {number(reward)}", f"mean {number(_known_mean(state.rewards))}"]
    if behind == 0:
        parts.append(f"rollouts {state.rollouts_done:,}")
        if state.rollouts_failed.total():
            parts.append(f"failed {state.rollouts_failed.total():,} ({by_count(state.rollouts_failed)})")
        parts.extend(piece.plain for piece in _rates(state))
        if state.version:
            parts.append(f"policy {state.version}")
        if state.eta_s is not None and step < state.total_steps:
            parts.append(f"{clock(state.eta_s)} left")
    return "  ".join(parts)


def frame(state: RunState, messages: Sequence[tuple[float, str]], width: int, height: int) -> Frame:
    """The panel for a terminal of `width` x `height` cells; `messages` are (seconds since the start, text), the newest last."""
    inner = max(20, width - 4)
    if width >= _SIDE_BY_SIDE_FROM:
        half = (inner - 4) // 2
        left, right = _learning(state, half - _LABEL_WIDTH), _machinery(state, half - _LABEL_WIDTH)
        lines = max(len(left), len(right))
        body = Table.grid(padding=(0, 2))
        body.add_column(width=half)
        body.add_column(width=half)
        body.add_row(_grid(left), _grid(right))
    else:
        stacked = [*_learning(state, inner - _LABEL_WIDTH), *_machinery(state, inner - _LABEL_WIDTH)]
        lines = len(stacked)
        body = _grid(stacked)
    parts: list[RenderableType] = [_progress(state, inner), Text(), body]
    # Messages take what a low terminal leaves.
    room = min(_MESSAGES_SHOWN, height - lines - _LINES_AROUND)
    if room > 0 and messages:
        parts.extend([Text(), *_message_lines(messages[-room:], inner)])
    title = Text.assemble(("harness-rl", "bold"), " ", (state.name, "cyan"))
    title.truncate(max(1, width - 6), overflow="ellipsis")
    return Frame(Group(*parts), title=title, title_align="left", border_style="bright_black", padding=(0, 1), width=width)


def _progress(state: RunState, width: int) -> Text:
    phase = _light(state.phase, _PHASES.get(state.phase, _BUSY))
    steps = Text.assemble(("step ", "dim"), (str(state.step), "bold"), (f"/{state.total_steps}", "dim"))
    times = Text.assemble((clock(time.monotonic() - state.started_at), ""), (" elapsed", "dim"))
    if state.eta_s is not None and state.step < state.total_steps:
        times.append_text(Text.assemble((f"   {clock(state.eta_s)}", ""), (" left", "dim")))
    room = width - phase.cell_len - steps.cell_len - times.cell_len - 9
    if room < 8:
        return fit([phase, steps, times], width)
    done = round(room * min(1.0, state.step / max(1, state.total_steps)))
    bar = Text.assemble(("━" * done, "green"), ("─" * (room - done), "bright_black"))
    return fit([phase, steps, bar, times], width)


def _learning(state: RunState, width: int) -> list[tuple[str, Text]]:
    rewards = state.rewards
    last = Text(number(rewards[-1]), "bold") if rewards else Text("after the first step", "dim")
    tail = Text.assemble(("mean ", "dim"), number(_known_mean(rewards))) if rewards else Text()
    room = width - last.cell_len - tail.cell_len - 6
    graph = Text(sparkline(rewards, max(0, room)), "green")
    failed = [Text("none", "dim")]
    if state.rollouts_failed.total():
        failed = [Text(f"{state.rollouts_failed.total():,}", "yellow"), Text(by_count(state.rollouts_failed), "yellow")]
    return [
        ("reward", fit([last, graph, tail] if graph else [last], width)),
        ("eval", _evals(state, width)),
        ("rollouts", fit([_count(state.rollouts_running, "running"), _count(state.rollouts_done, "done")], width)),
        ("failed", fit(failed, width)),
        ("groups", fit([_count(state.groups_ready, "ready"), _count(state.groups_zero_variance, "without variance")], width)),
    ]


def _machinery(state: RunState, width: int) -> list[tuple[str, Text]]:
    engine = [_light(state.engine, _ENGINE.get(state.engine, _BUSY))]
    if state.holding:
        engine.append(Text("new calls held for the weights", "cyan"))
    policy = [Text(state.version) if state.version else Text("not yet", "dim")]
    policy.extend(_rates(state))
    return [
        ("engine", fit(engine, width)),
        ("learner", fit([_light(state.learner, _LEARNER.get(state.learner, _BUSY))], width)),
        ("sandboxes", fit([_count(state.sandboxes, "up")], width)),
        ("policy", fit(policy, width)),
    ]


def _rates(state: RunState) -> list[Text]:
    pieces = []
    sampled, staleness = finite(state.last.get(Metric.GENERATED_TOK_S)), finite(state.last.get(Metric.STALENESS))
    if sampled is not None:
        pieces.append(Text.assemble(number(sampled, 0), (" tokens/s", "dim")))
    if staleness is not None:
        pieces.append(Text.assemble(("staleness ", "dim"), number(staleness, 1)))
    return pieces


def _evals(state: RunState, width: int) -> Text:
    """Newest last. Where room is short the older ones lose first their interval, then their place."""
    if not state.evals:
        return Text("none yet", "dim")
    *older, newest = [Text.assemble((f"{label} ", "dim"), interval(estimate)) for label, estimate in state.evals.items()]
    if not _fits([*older, newest], width):
        older = [Text.assemble((f"{label} ", "dim"), number(mean)) for label, (mean, _, _) in list(state.evals.items())[:-1]]
    while older and not _fits([*older, newest], width):
        older.pop(0)
    return fit([*older, newest], width)


def _fits(pieces: list[Text], width: int) -> bool:
    return fit(pieces, sys.maxsize).cell_len <= width


def _message_lines(messages: Sequence[tuple[float, str]], width: int) -> list[Text]:
    lines = []
    for elapsed, text in messages:
        line = Text.assemble((f"{clock(elapsed)}  ", "dim"), text, no_wrap=True, overflow="ellipsis")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines


def _grid(lines: list[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=0)
    grid.add_column(width=_LABEL_WIDTH, style="dim", no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for label, value in lines:
        grid.add_row(label, value)
    return grid


def _light(state: str, colour: str) -> Text:
    return Text.assemble(("● ", colour), state)


def _count(count: int, what: str) -> Text:
    return Text.assemble(f"{count:,}", (f" {what}", "dim"))


def _known_mean(values: list[float]) -> float:
    return mean_of(value for value in values if finite(value) is not None)
