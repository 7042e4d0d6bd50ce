"""The agents of a bench, in a process of their own: conversations with a capturing proxy, or with the engine itself, every call timed.

`python -m harness_rl.bench.capture.load` reads one JSON object from stdin (`Load`) and prints one (`{"latencies": [...], ...}`).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from harness_rl.bench.capture.conversation import TOOLS, Plan


@dataclass
class Load:
    """What to do: one conversation for each key, all at once."""

    url: str
    """Up to and with `/v1`."""
    keys: list[str]
    plan: dict[str, Any]
    """Fields of `Plan`."""
    turns: int
    over_s: float = 0.0
    """The conversations begin evenly over this time."""
    rewritten: bool = False
    """Each turn is the first turn of another conversation: nothing is continued."""
    give_up_s: float = 600.0
    latencies: list[float] = field(default_factory=list)
    """Seconds of each answered call."""
    unanswered: int = 0


async def converse(load: Load, http: aiohttp.ClientSession, key: str, start_at: float) -> None:
    await asyncio.sleep(start_at - time.monotonic())
    plan = Plan(**load.plan)
    messages = plan.opening()
    for turn in range(load.turns):
        if load.rewritten:
            messages = Plan(**{**load.plan, "head": plan.head + turn}).opening()
        body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 4096}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        began = time.perf_counter()
        async with http.post(load.url + "/chat/completions", data=body, headers=headers) as response:
            answer = await response.read()
        load.latencies.append(time.perf_counter() - began)
        if response.status != 200:
            raise SystemExit(f"bench: turn {turn} was answered {response.status}: {answer[:500]!r}")
        message = json.loads(answer)["choices"][0]["message"]
        messages = [*messages, message, plan.tool_output(message["tool_calls"][0]["id"])]


async def run(load: Load) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        start, apart = time.monotonic() + 0.05, load.over_s / len(load.keys)
        tasks = [asyncio.create_task(converse(load, http, key, start + i * apart)) for i, key in enumerate(load.keys)]
        _, pending = await asyncio.wait(tasks, timeout=load.give_up_s)
        for task in pending:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    load.unanswered = len(pending)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
    return asdict(load)


def main() -> None:
    print(json.dumps(asyncio.run(run(Load(**json.load(sys.stdin))))))


if __name__ == "__main__":
    main()
