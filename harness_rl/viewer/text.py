"""Small pure pieces of text that every viewer shares.

None of them raises on NaN, None or an empty series: what is unknown is shown as `–`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

UNKNOWN = "–"
_BARS = "▁▂▃▄▅▆▇█"
_GAP = "   "


def finite(value: Any) -> float | None:
    """`value` as a float, or None where it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def number(value: Any, digits: int = 2) -> str:
    """A number for people: `0.53`, `1,240`, or `–`."""
    known = finite(value)
    return UNKNOWN if known is None else f"{known:,.{digits}f}"


def clock(seconds: float | None) -> str:
    """`mm:ss`, from one hour on `h:mm:ss`."""
    if finite(seconds) is None:
        return UNKNOWN
    minutes, second = divmod(max(0, round(seconds or 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def interval(estimate: Sequence[Any]) -> str:
    """`0.42 [0.31, 0.53]` of (mean, low, high)."""
    mean, low, high = estimate
    return f"{number(mean)} [{number(low)}, {number(high)}]"


def sparkline(values: Sequence[Any], width: int) -> str:
    """At most `width` bars; more values than that are averaged in even buckets.

    Values in [0, 1] (rewards, as a rule) keep that scale; others fill their own range.
    """
    if width < 1 or not values:
        return ""
    count = min(width, len(values))
    buckets = [values[index * len(values) // count : (index + 1) * len(values) // count] for index in range(count)]
    means = [_mean(bucket) for bucket in buckets]
    known = [value for value in means if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else _BARS[round((value - low) * scale)] for value in means)


def fit(pieces: Sequence[Text], width: int) -> Text:
    """The leading pieces that fit in `width` cells, joined by a gap; the first is cut rather than left out."""
    line = Text(no_wrap=True, overflow="ellipsis")
    for piece in pieces:
        gap = _GAP if line else ""
        if line and line.cell_len + len(gap) + piece.cell_len > width:
            break
        line.append(gap)
        line.append_text(piece)
    line.truncate(max(1, width), overflow="ellipsis")
    return line


def by_count(counts: Mapping[str, int], separator: str = ", ") -> str:
    """`engine 2, verifier 1`, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return separator.join(f"{name} {count:,}" for name, count in ordered if count)


def printable(text: str) -> str:
    """`text` with control characters other than newline and tab as pictures (`␛` for escape)."""
    return "".join(_picture(character) for character in text)


def _picture(character: str) -> str:
    code = ord(character)
    if character in "\n\t" or 32 <= code < 127 or code >= 160:
        return character
    return chr(0x2400 + code) if code < 32 else "␡" if code == 127 else "�"


def _mean(values: Sequence[Any]) -> float | None:
    known = [value for value in map(finite, values) if value is not None]
    return sum(known) / len(known) if known else None
