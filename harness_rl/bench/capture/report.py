"""What the capture bench found, as a page for people, each figure beside its bar."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field

OURS, THEIRS, DIRECT = "capture proxy", "OpenEnv", "direct"
READ = "capture proxy, one-call engine"
"""Before an engine with vLLM 0.33's one-call form."""
SHARES = {2_000: 1 / 4, 16_000: 1 / 5, 64_000: 1 / 4}
"""Prompt length -> at most this part of OpenEnv's CPU."""
ADDED_P99_MS = 50.0
TRACE_S, TRACE_BYTES = 0.3, 3_000_000
INGEST_S = 0.3


@dataclass
class Measured:
    """Figures by server."""

    cpu: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)
    """(server, prompt ids) -> (CPU ms of a call, median latency in ms), one pair for each round."""
    held: dict[str, dict[str, float]] = field(default_factory=dict)
    long: dict[str, dict[str, float]] = field(default_factory=dict)
    ingest: dict[str, float] = field(default_factory=dict)
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)
    """KiB of a session without a call, and of one with eight calls of a 16k conversation behind it."""

    def cpu_ms(self, server: str, size: int) -> float:
        return statistics.median(cpu for cpu, _ in self.cpu[server, size])

    def latency_ms(self, server: str, size: int) -> float:
        return statistics.median(latency for _, latency in self.cpu[server, size])


def report(m: Measured, calls: int, over_s: float) -> str:
    """The page."""
    servers = [name for name in (OURS, THEIRS) if name in m.ingest]
    parts = [
        "# The capture proxy beside OpenEnv's capture server and a direct connection",
        _machine(),
        "One engine that costs next to nothing, one process of agents, one server at a time, in turn. CPU is the server process's own "
        "time on a core (user and system, `/proc/PID/task/*/schedstat`). Conversations: a system prompt and eight tools, then turns that "
        "add 420 ids, 200 of them sampled, with a tool call in every answer; four at once, eight turns each. The proxy asks the engine "
        "three times for each call (render, generate, derender), twice where the engine reads what it samples (vLLM 0.33), OpenEnv once.",
        "## A call",
    ]
    rows = []
    for size in sorted({size for _, size in m.cpu}):
        for name in (DIRECT, OURS, READ, THEIRS):
            if (name, size) in m.cpu:
                rows.append([f"from {size // 1000}k", name, *_call(m, name, size), f"{m.latency_ms(name, size):.1f}"])
    parts.append(_table(["prompt ids", "", "CPU ms", "of OpenEnv's", "least to least", "bar", "", "latency ms"], rows))
    parts += [
        f"## {calls} held calls, arriving over {over_s:g} s",
        _table(
            ["", "at once at the engine", "unanswered", "CPU ms of a call", "added p50 ms", "added p99 ms", "over direct", "bar", ""],
            (_held(name, m.held[name], m.held[DIRECT]) for name in (DIRECT, *servers)),
        ),
        "## A session of 262 turns that ends at 118k ids",
        _table(
            ["", "trace MB", "fetched and loaded s", "CPU s of both ends", "CPU ms of a call", "latency ms", "bar", ""],
            (
                [
                    name,
                    f"{m.long[name]['bytes'] / 1e6:.2f}",
                    f"{m.long[name]['seconds']:.2f}",
                    f"{m.long[name]['cpu_s']:.2f}",
                    f"{m.long[name]['cpu_ms']:.1f}",
                    f"{m.long[name]['latency_ms']:.1f}",
                    f"{TRACE_BYTES / 1e6:g} MB, {TRACE_S} s" if name == OURS else "",
                    _verdict(m.long[name]["bytes"] < TRACE_BYTES and m.long[name]["seconds"] < TRACE_S) if name == OURS else "",
                ]
                for name in servers
            ),
        ),
        "## 100 turns of 50k ids, each with another history",
        _table(
            ["", "ingest of all, CPU s", "bar", ""],
            (
                [name, f"{m.ingest[name]:.2f}", f"{INGEST_S} s" * (name == OURS), _verdict(m.ingest[name] < INGEST_S) * (name == OURS)]
                for name in servers
            ),
        ),
        "## Memory",
        _table(
            ["", "KiB of a session that has not called", "KiB of one with eight calls of a 16k conversation"],
            ([name, *(f"{kib:.1f}" for kib in m.memory[name])] for name in servers),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _call(m: Measured, name: str, size: int) -> list[str]:
    """CPU of a call, its part of OpenEnv's, and the verdict on that."""
    if name == DIRECT:
        return [""] * 5
    spent = f"{m.cpu_ms(name, size):.2f}"
    if name == THEIRS or (THEIRS, size) not in m.cpu:
        return [spent, *[""] * 4]
    least = [min(cpu for cpu, _ in m.cpu[one, size]) for one in (name, THEIRS)]
    share = m.cpu_ms(name, size) / m.cpu_ms(THEIRS, size)
    return [spent, f"{share:.2f}", f"{least[0] / least[1]:.2f}", f"{SHARES[size]:.2f}", _verdict(share <= SHARES[size])]


def _held(name: str, found: dict[str, float], direct: dict[str, float]) -> list[str]:
    over = found["p99"] - direct["p99"]
    counts = [f"{found['most']:.0f}", f"{found['unanswered']:.0f}", f"{found['cpu_ms']:.2f}"]
    plain = [name, *counts, f"{found['p50']:.1f}", f"{found['p99']:.1f}"]
    if name == DIRECT:
        return [*plain, "", "", ""]
    met = _verdict(over < ADDED_P99_MS and not found["unanswered"]) if name == OURS else ""
    return [*plain, f"{over:.1f}", f"{ADDED_P99_MS:g}" * (name == OURS), met]


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _machine() -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False).stdout.strip()
    load = os.getloadavg()[1]
    return (
        f"Commit {commit or 'unknown'}{' with changes' if changed else ''}; Python {platform.python_version()}, {os.cpu_count()} cores "
        f"({platform.machine()}), load average of the last five minutes {load:.1f} (about 2 are the bench's own)."
    )
