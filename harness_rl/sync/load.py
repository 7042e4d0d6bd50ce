"""What runs on a server, from its Prometheus text: how many calls, and how many tokens of history their cached blocks hold."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(r"^(?P<name>[a-zA-Z_:]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Load:
    running: int | None
    """Calls that are being sampled; None: the server does not say."""
    kv_tokens: int | None
    """Tokens in the blocks that calls hold, rounded up to whole blocks, at the server's last step; None: the server does not say."""


def read_load(text: str) -> Load:
    """Sums over the engines behind one server."""
    running: float | None = None
    usage: dict[str, float] = {}
    cache: dict[str, tuple[int, int]] = {}
    """(blocks, tokens of a block)"""
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        labels = dict(_LABEL.findall(found["labels"] or ""))
        engine = labels.get("engine", "0")
        match found["name"]:
            case "vllm:num_requests_running":
                running = (running or 0.0) + float(found["value"])
            case "vllm:kv_cache_usage_perc":
                usage[engine] = float(found["value"])
            case "vllm:cache_config_info" if labels.get("num_gpu_blocks", "").isdigit() and labels.get("block_size", "").isdigit():
                cache[engine] = int(labels["num_gpu_blocks"]), int(labels["block_size"])
    known = bool(usage) and usage.keys() <= cache.keys()
    return Load(
        running=None if running is None else round(running),
        kv_tokens=sum(round(share * cache[engine][0]) * cache[engine][1] for engine, share in usage.items()) if known else None,
    )
