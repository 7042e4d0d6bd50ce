"""What an update of the weights costs: to a real vLLM on CPU, beside the least that it could cost, and in each mode with calls in flight.

`python -m harness_rl.bench.sync MODEL_FOLDER REPORT.md`, in the torch environment. The least is the same bytes broadcast in the same
buckets to a process that drops them, plus vLLM's own `reload_weights` of the same weights: what moves them once and loads them once.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import torch.distributed as dist

from capture_proxy.engine import Engine
from capture_proxy.gate import Gate
from capture_proxy.upstream import Retry
from harness_rl.config import EngineSection
from harness_rl.engines.vllm import launch
from harness_rl.engines.vllm_plugin import open_group
from harness_rl.learner.policy import Policy
from harness_rl.learner.spec import LearnerSpec
from harness_rl.sync.base import StopPolicy, SyncReport, WeightSync
from harness_rl.sync.buckets import Plan, up_to
from harness_rl.sync.client import EngineClient
from harness_rl.sync.gloo import BUCKET_BYTES, GlooSender, free_port
from harness_rl.sync.verify import LogprobProbe

TIMEOUT_S = 600.0
PROBE_TOKENS = 64
MODES = [
    StopPolicy("keep"),
    StopPolicy("keep", "keep"),
    StopPolicy("abort"),
    StopPolicy("abort", "keep"),
    StopPolicy("wait", wait_s=TIMEOUT_S),
]
BAR = 1.3


def _receive(port: int, sizes: list[int], dtype: torch.dtype, rounds: int) -> None:
    group, _store = open_group("127.0.0.1", port, 1, 2, TIMEOUT_S)
    for _ in range(rounds):
        for size in sizes:
            group.broadcast([torch.empty(size, dtype=dtype)], dist.BroadcastOptions()).wait()
        group.barrier(dist.BarrierOptions()).wait()


def raw_broadcast(policy: Policy, rounds: int) -> list[float]:
    """Seconds of each round: buckets made and broadcast one after the other to a process that drops them."""
    plan = Plan.of(policy.model.named_parameters, policy.dtype)
    buckets = up_to(plan.sizes, BUCKET_BYTES // policy.dtype.itemsize)
    ends = np.cumsum(buckets)
    sizes = [sum(plan.sizes[end - count : end]) for end, count in zip(ends.tolist(), buckets, strict=True)]
    port = free_port("127.0.0.1")
    receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=(port, sizes, policy.dtype, rounds), daemon=True)
    receiver.start()
    group, store = open_group("127.0.0.1", port, 0, 2, TIMEOUT_S)
    spent = []
    for _ in range(rounds):
        began = time.perf_counter()
        for flat in plan.flat(buckets, "cpu"):
            group.broadcast([flat], dist.BroadcastOptions()).wait()
        group.barrier(dist.BarrierOptions()).wait()
        spent.append(time.perf_counter() - began)
    receiver.join(TIMEOUT_S)
    del group, store
    return spent


def own_reload(url: str, checkpoint: Path, rounds: int) -> list[float]:
    """Seconds of vLLM's own reload of a checkpoint, each."""
    spent = []
    for _ in range(rounds):
        began = time.perf_counter()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
        httpx.post(f"{url}/collective_rpc", json=body, timeout=TIMEOUT_S, trust_env=False).raise_for_status()
        spent.append(time.perf_counter() - began)
    return spent


@dataclass
class Bench:
    url: str
    policy: Policy
    calls: int
    tokens: int

    def sync(self, stop: StopPolicy) -> WeightSync:
        sender = GlooSender(self.policy.model.named_parameters, self.policy.dtype, TIMEOUT_S)
        probe = LogprobProbe(exact=True, bound=1e-3, first_bound=1.0, tokens=PROBE_TOKENS)
        return WeightSync([EngineClient(self.url, "policy", TIMEOUT_S)], sender, probe, self.policy.score_prompts, stop)

    def prompts(self, count: int, length: int) -> list[Any]:
        rng = np.random.default_rng(count)
        vocabulary = int(self.policy.model.config.vocab_size)
        return [rng.integers(0, vocabulary, length).astype(np.int32) for _ in range(count)]

    async def idle(self, rounds: int) -> list[SyncReport]:
        sync = self.sync(MODES[0])
        probe = self.prompts(1, PROBE_TOKENS + 1)
        found = [await asyncio.to_thread(sync.sync, f"idle-{n}", probe) for n in range(rounds + 1)]
        sync.close()
        return found[1:]

    async def busy(self, stop: StopPolicy, rounds: int) -> list[SyncReport]:
        """Updates under `calls` running calls, which go on as an agent's would behind the proxy."""
        sync, gate = self.sync(stop), Gate()
        probe, found = self.prompts(1, PROBE_TOKENS + 1), []
        await asyncio.to_thread(sync.sync, "first", probe)
        for number in range(rounds):
            async with self._running(gate):
                gate.hold("bench", TIMEOUT_S)
                found.append(await asyncio.to_thread(sync.sync, f"{stop.mode}-{stop.kv}-{number}", probe))
                gate.release(found[-1].version)
        sync.close()
        return found

    @asynccontextmanager
    async def _running(self, gate: Gate) -> AsyncIterator[None]:
        engine = Engine(self.url, "policy", Retry(), TIMEOUT_S, gate)
        params = {"max_tokens": self.tokens, "temperature": 1.0, "ignore_eos": True}
        calls = [
            asyncio.create_task(engine.generate(prompt, {**params, "seed": n}, {})) for n, prompt in enumerate(self.prompts(self.calls, 64))
        ]
        client = EngineClient(self.url, "policy", TIMEOUT_S)
        try:
            while (await asyncio.to_thread(client.load)).running != self.calls:
                await asyncio.sleep(0.05)
            yield
            await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            engine.close()
            client.close()


def ratio_of(least: tuple[float, float], idle: list[SyncReport]) -> float:
    """An update's stop, of the least that it could take."""
    return statistics.median(report.seconds["stopped"] for report in idle) / sum(least)


def table(least: tuple[float, float], idle: list[SyncReport], busy: dict[str, list[SyncReport]], bench: Bench) -> str:
    broadcast, reload = least
    update, ratio = statistics.median(report.seconds["stopped"] for report in idle), ratio_of(least, idle)
    size = sum(parameter.numel() for parameter in bench.policy.model.parameters()) * bench.policy.dtype.itemsize
    parts = {name: statistics.median(report.seconds[name] for report in idle) for name in ("pause", "transfer", "finish", "probe")}
    rows = [
        "# What an update of the weights costs\n",
        f"{size / 1e6:.0f} MB in float32 to one vLLM on CPU; medians of {len(idle)} rounds; load average {os.getloadavg()[0]:.1f}.\n",
        "| | seconds |\n| --- | --- |",
        f"| the same buckets to a process that drops them | {broadcast:.2f} |",
        f"| vLLM's own `reload_weights` of the same weights | {reload:.2f} |",
        f"| **both: the least** | **{broadcast + reload:.2f}** |",
        *(f"| update: {name}{' (after the stop)' if name == 'probe' else ''} | {seconds:.2f} |" for name, seconds in parts.items()),
        f"| **update: from the first pause to the last resume** | **{update:.2f}** |\n",
        f"Ratio {ratio:.2f} (bar {BAR}): {'met' if ratio <= BAR else 'NOT met'}.\n",
        f"With {bench.calls} calls of {bench.tokens} tokens under way:\n",
        f"| mode | kv | stopped, s | of it pause, s | calls at the stop | ended | tokens read again |\n|{' --- |' * 7}",
    ]
    for name, reports in busy.items():
        middle = sorted(reports, key=lambda report: report.seconds["stopped"])[len(reports) // 2]
        told = [f"{middle.counts[key]:.0f}" if key in middle.counts else "-" for key in ("running", "cut", "recomputed_tokens")]
        rows.append(f"| {name} | {middle.seconds['stopped']:.2f} | {middle.seconds['pause']:.2f} | {' | '.join(told)} |")
    return "\n".join(rows) + "\n"


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="that each call samples")
    args = parser.parse_args()
    policy = Policy.load(LearnerSpec(model=str(args.model), run_dir=".", lineage="bench", device="cpu"), args.model)
    section = EngineSection(python=Path(sys.executable), device="cpu", max_model_len=1024)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        policy.model.save_pretrained(checkpoint)
        engine = await launch(section, args.model, run_dir=Path(folder), served_model="policy")
        try:
            bench = Bench(engine.url, policy, args.calls, args.tokens)
            # In turn, so that a change of the machine's mood is everyone's.
            broadcast, reload, idle = [], [], []
            for _ in range(args.rounds):
                broadcast += raw_broadcast(policy, 1)
                reload += own_reload(engine.url, checkpoint, 1)
                idle += await bench.idle(1)
            busy = {f"{stop.mode} | {stop.kv}": await bench.busy(stop, args.rounds) for stop in MODES}
        finally:
            await engine.stop()
    least = statistics.median(broadcast), statistics.median(reload)
    text = table(least, idle, busy, bench)
    args.report.write_text(text)
    print(text, end="")
    return 0 if ratio_of(least, idle) <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
