"""The table at the end of a run: what was learned, and where every rollout, row, call, token and second went.

Counts are the run's accounts; seconds are added up from its metrics. A family that no one counted is left out, not shown as zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness_rl.metrics import Metric, RunState, mean
from harness_rl.orchestrator.accounts import Accounts
from harness_rl.viewer.text import UNKNOWN, by_count, clock, finite, interval, number

_ENDS = 3
"""Steps at each end whose mean reward is compared."""

_PARTS_PER_LINE = 4


def closing_table(state: RunState, metrics_lines: Sequence[Mapping[str, Any]], groups: Mapping[str, int], accounts: Accounts) -> Group:
    """`groups`: how many ended in which state."""
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in closing_rows(state, metrics_lines, groups, accounts):
        table.add_row(label, value)
    headline = Text.assemble((state.name, "bold"), f"  {state.phase} after {state.step} of {state.total_steps} steps")
    return Group(headline, Text(), table)


def closing_rows(
    state: RunState, metrics_lines: Sequence[Mapping[str, Any]], groups: Mapping[str, int], accounts: Accounts
) -> list[tuple[str, str]]:
    """The table's lines as (label, plain text)."""
    rows = [("reward", _reward(metrics_lines))]
    rows.extend((f"eval {label}", interval(estimate)) for label, estimate in state.evals.items())
    rows += [("groups", by_count(groups)), ("rollouts", _with_total(accounts.rollouts)), ("failed by fault", by_count(accounts.failures))]
    rows += [
        ("model calls", _with_total(accounts.calls)),
        ("sampled tokens", _with_total(accounts.tokens)),
        ("rows", _with_total(accounts.rows)),
    ]
    if accounts.cut:
        rows.append(("the model's", f"{accounts.cut} scored rollouts that a limit or the agent's time cut"))
    if accounts.unrecorded:
        rows.append(("without a record", f"{accounts.unrecorded} rollouts, whose calls and tokens are not counted above"))
    rows.append(("time", _seconds(metrics_lines)))
    return [(label, value) for label, value in rows if value]


def _reward(lines: Sequence[Mapping[str, Any]]) -> str:
    rewards = [value for line in lines if (value := finite(line.get(Metric.REWARD))) is not None]
    if not rewards:
        return UNKNOWN
    ends = min(_ENDS, len(rewards))
    first, last = mean(rewards[:ends]), mean(rewards[-ends:])
    return f"{number(first)} → {number(last)}   (first and last {ends} of {len(rewards)} steps, all scored rollouts)"


def _with_total(counts: Counter[str]) -> str:
    return f"{counts.total()}: {by_count(counts)}" if counts else ""


def _seconds(lines: Sequence[Mapping[str, Any]]) -> str:
    """Sums of `perf/<part>_s`, the whole steps first; rates (`..._tok_s`) are not seconds."""
    parts: dict[str, float] = {}
    for line in lines:
        for key, value in line.items():
            seconds = finite(value)
            if key.startswith("perf/") and key.endswith("_s") and "_tok_s" not in key and seconds is not None:
                parts[key] = parts.get(key, 0.0) + seconds
    whole = parts.pop(Metric.STEP_SECONDS, None)
    shown = [] if whole is None else [f"steps {clock(whole)}"]
    for key, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        shown.append(f"{key.removeprefix('perf/').removesuffix('_s').replace('_', ' ')} {clock(seconds)}")
    return "\n".join(", ".join(shown[start : start + _PARTS_PER_LINE]) for start in range(0, len(shown), _PARTS_PER_LINE))
