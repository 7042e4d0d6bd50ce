"""Counters of the proxy and their Prometheus text form. Each name says what it counts and in which unit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

PREFIX = "capture_proxy_"


@dataclass
class Metrics:
    """Counters since the process started; gauges are given at the time of reading."""

    calls: Counter[str] = field(default_factory=Counter)
    """Agent calls by outcome: `answered`, or the reason without an answer."""
    totals: Counter[str] = field(default_factory=Counter)
    """Plain counters by name."""

    def text(self, gauges: dict[str, float], engines: dict[str, bool], load: dict[str, dict[str, int]]) -> str:
        """The exposition format, version 0.0.4."""
        lines = [f"# TYPE {PREFIX}calls_total counter"]
        lines += [f'{PREFIX}calls_total{{outcome="{outcome}"}} {n}' for outcome, n in sorted(self.calls.items())]
        for name, value in sorted(self.totals.items()):
            lines += [f"# TYPE {PREFIX}{name}_total counter", f"{PREFIX}{name}_total {value}"]
        for name, gauge in sorted(gauges.items()):
            lines += [f"# TYPE {PREFIX}{name} gauge", f"{PREFIX}{name} {gauge:g}"]
        lines.append(f"# TYPE {PREFIX}engine_up gauge")
        lines += [f'{PREFIX}engine_up{{engine="{url}"}} {int(up)}' for url, up in engines.items()]
        for name in ("sessions", "in_flight"):
            lines.append(f"# TYPE {PREFIX}engine_{name} gauge")
            lines += [f'{PREFIX}engine_{name}{{engine="{url}"}} {of[name]}' for url, of in load.items()]
        return "\n".join(lines) + "\n"
