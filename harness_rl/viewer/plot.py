"""reward.png: the learning curve of a run.

It is drawn on a Figure of its own, so that nothing of the process's plotting state is read or changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from harness_rl.metrics import Metric
from harness_rl.viewer.text import finite, number

_INK, _QUIET, _GRID = "#24292f", "#57606a", "#e6e8eb"
_ALL, _TRAINED, _EVAL = "#1a7f5a", "#8fa3b8", "#c4572b"
_EVAL_STYLE: dict[str, Any] = {
    "fmt": "D",
    "markersize": 5.5,
    "markeredgecolor": "white",
    "markeredgewidth": 0.8,
    "elinewidth": 1.3,
    "capsize": 3,
}
_WIDTH_PX, _HEIGHT_PX, _DPI = 1800, 900, 200
"""Twice the size that a README shows, for sharp text."""

Estimate = tuple[float, float, float]


def write_reward_plot(run_dir: Path, metrics_lines: Sequence[Mapping[str, Any]], evals: Mapping[str, Estimate]) -> Path:
    """Write RUN/reward.png and return its path.

    `evals` maps a label to (mean, low, high). Where it stands: `step N` (anywhere in the label) after N steps, `end` or `final` after
    the last step, every other label before the first step, in the order given. Steps whose reward is unknown leave a gap.
    """
    figure = Figure(figsize=(_WIDTH_PX / _DPI, _HEIGHT_PX / _DPI), dpi=_DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [int(finite(line.get(Metric.STEP)) or index) for index, line in enumerate(metrics_lines, start=1)]
    _curve(axes, steps, metrics_lines)
    placed = place_evals(evals, last_step=max(steps, default=0))
    _points(axes, placed, evals, {step: _value(line, Metric.REWARD) for step, line in zip(steps, metrics_lines, strict=True)})
    _dress(axes, run_dir.resolve().name, steps, [x for x, _ in placed])
    path = run_dir / "reward.png"
    figure.savefig(path, dpi=_DPI)
    return path


def place_evals(evals: Mapping[str, Estimate], last_step: int) -> list[tuple[int, str]]:
    """(position on the step axis, label) of every eval, by the rule of `write_reward_plot`."""
    before = [label for label in evals if _eval_step(label, last_step) is None]
    placed = []
    for label in evals:
        step = _eval_step(label, last_step)
        placed.append((before.index(label) - len(before) + 1 if step is None else step, label))
    return placed


def _eval_step(label: str, last_step: int) -> int | None:
    numbered = re.search(r"\bstep[ -]?(\d+)", label)
    if numbered:
        return int(numbered[1])
    return last_step if re.search(r"\b(end|final)\b", label) else None


def _curve(axes: Axes, steps: list[int], lines: Sequence[Mapping[str, Any]]) -> None:
    reward = [_value(line, Metric.REWARD) for line in lines]
    if any(map(math.isfinite, reward)):
        axes.plot(
            steps, reward, color=_ALL, linewidth=2.0, marker="o", markersize=3.5, zorder=3, label="all scored rollouts, mean of the step"
        )
    error = [_standard_error(line) for line in lines]
    if any(map(math.isfinite, error)):
        bottom, top = (0.0, 1.0) if _is_share(reward) else (-math.inf, math.inf)
        low = [max(bottom, value - spread) for value, spread in zip(reward, error, strict=True)]
        high = [min(top, value + spread) for value, spread in zip(reward, error, strict=True)]
        axes.fill_between(steps, low, high, color=_ALL, alpha=0.16, linewidth=0, label="± standard error")
    trained = [_value(line, Metric.REWARD_TRAINED) for line in lines]
    if any(map(math.isfinite, trained)):
        axes.plot(steps, trained, color=_TRAINED, linewidth=1.2, linestyle=(0, (4, 2)), label="groups that were trained")


def _points(axes: Axes, placed: list[tuple[int, str]], evals: Mapping[str, Estimate], curve: Mapping[int, float]) -> None:
    """`curve`: the reward of each step; a label stands on the side of its point that the curve leaves free."""
    legend: str | None = "eval, 95 % interval"
    halo = [withStroke(linewidth=3, foreground="white")]
    for x, name in placed:
        mean, low, high = (finite(value) for value in evals[name])
        if mean is None:
            continue
        down = 0.0 if low is None else max(0.0, mean - low)
        up = 0.0 if high is None else max(0.0, high - mean)
        axes.errorbar([x], [mean], yerr=[[down], [up]], color=_EVAL, zorder=5, label=legend, **_EVAL_STYLE)
        legend = None
        below = curve.get(x, -math.inf) > mean
        axes.annotate(
            f"{name} {number(mean)}",
            (x, mean - down if below else mean + up),
            xytext=(0, -5 if below else 5),
            textcoords="offset points",
            ha="center",
            va="top" if below else "bottom",
            fontsize=8,
            color=_EVAL,
            path_effects=halo,
            zorder=6,
        )


def _dress(axes: Axes, title: str, steps: list[int], eval_steps: list[int]) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=8)
    axes.set_xlabel("optimizer step", fontsize=9.5, color=_QUIET)
    axes.set_ylabel("reward", fontsize=9.5, color=_QUIET)
    left, right = min([*steps, *eval_steps], default=0), max([*steps, *eval_steps], default=1)
    margin = max(0.6, 0.04 * (right - left))
    # A label is centred on its point, which at the left end needs room beside the axis.
    axes.set_xlim(left - (2 * margin if left in eval_steps else margin), right + margin)
    bottom, top = axes.dataLim.y0, axes.dataLim.y1
    if not (math.isfinite(bottom) and math.isfinite(top)) or _is_share([bottom, top]):
        bottom, top = 0.0, 1.0
    room = 0.05 * ((top - bottom) or 1.0)
    axes.set_ylim(bottom - room, top + room)
    # Evals before the start stand left of 0, where no step has a number.
    axes.set_xticks([tick for tick in MaxNLocator(nbins=12, integer=True).tick_values(0, max(1, right)) if 0 <= tick <= max(1, right)])
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", fontsize=8.5, frameon=False, labelcolor=_QUIET)
    else:
        axes.text(0.5, 0.5, "no step has a reward yet", transform=axes.transAxes, ha="center", color=_QUIET)


def _value(line: Mapping[str, Any], metric: Metric) -> float:
    known = finite(line.get(metric))
    return math.nan if known is None else known


def _is_share(values: Sequence[float]) -> bool:
    """True where all known values lie in [0, 1]."""
    return all(0 <= value <= 1 for value in values if math.isfinite(value))


def _standard_error(line: Mapping[str, Any]) -> float:
    spread, scored = finite(line.get(Metric.REWARD_STD)), finite(line.get(Metric.SCORED))
    return math.nan if spread is None or not scored or scored <= 0 else spread / scored**0.5
