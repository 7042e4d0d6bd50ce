"""Engine and learner rates, alone and overlapped: what one pair of processes really gets on this machine.

Both sides are measured over the same wall-clock window, so "overlapped" never means "one after the other".
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from harness_rl.errors import LearnerError

_SCRIPT = Path(__file__).with_name("learner_load.py")


@dataclass(frozen=True)
class Rates:
    """Tokens per second; the engine's are sampled tokens at `concurrency`, the learner's are trained tokens of 512-token rows."""

    engine_alone: float
    learner_alone: float
    engine_overlapped: float
    learner_overlapped: float

    @property
    def sum_of_shares(self) -> float:
        """1.0: overlapping neither gains nor loses; below: the two get in each other's way."""
        return self.engine_overlapped / self.engine_alone + self.learner_overlapped / self.learner_alone


async def engine_rate(url: str, model: str, seconds: float, concurrency: int = 8, tokens: int = 32) -> float:
    """Sampled tokens per second of `concurrency` clients that ask for `tokens` each, again and again, for about `seconds`."""
    rng = random.Random(0)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def one() -> int:
            body = {
                "model": model,
                "prompt": [rng.randrange(100, 40000) for _ in range(64)],
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 1.0,
            }
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            return int(answer.json()["usage"]["completion_tokens"])

        started, total = time.monotonic(), 0
        while time.monotonic() - started < seconds:
            total += sum(await asyncio.gather(*(one() for _ in range(concurrency))))
        return total / (time.monotonic() - started)


class LearnerLoad:
    """The running load; `mark()` starts a window and `rate()` is the tokens per second of the steps that ended since."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._steps: list[tuple[int, float]] = []
        self._reader: asyncio.Task[None] | None = None

    async def started(self, timeout_s: float) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            line = await asyncio.wait_for(stdout.readline(), timeout_s)
        except TimeoutError:
            raise LearnerError(f"rates: the learner load was not ready after {timeout_s:.0f} s") from None
        if not line:
            raise LearnerError("rates: the learner load ended before its first step; run `harness-rl doctor` for the torch environment")
        self._reader = asyncio.create_task(self._read(stdout))

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        async for line in stdout:
            item = json.loads(line)
            self._steps.append((item["tokens"], item["seconds"]))

    def mark(self) -> None:
        self._steps.clear()

    def rate(self) -> float:
        seconds = sum(s for _, s in self._steps)
        return sum(n for n, _ in self._steps) / seconds if seconds else 0.0

    async def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 30)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._reader is not None:
            await self._reader


@asynccontextmanager
async def learner_load(
    python: Path, model: str, env: Mapping[str, str], *, length: int = 512, cores: Sequence[int] | None = None, timeout_s: float = 180.0
) -> AsyncIterator[LearnerLoad]:
    """Run the load with `env` added to ours (thread counts, preloads) until the block ends, on `cores` if they are given."""
    pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
    process = await asyncio.create_subprocess_exec(
        *pinned, str(python), "-P", str(_SCRIPT), model, "--length", str(length),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **env},
    )  # fmt: skip
    load = LearnerLoad(process)
    try:
        await load.started(timeout_s)
        yield load
    finally:
        await load.stop()


async def measure(url: str, served: str, python: Path, folder: str, env: Mapping[str, str], seconds: float = 20.0) -> Rates:
    """All four rates in about three times `seconds` and the learner's start-up."""
    engine_alone = await engine_rate(url, served, seconds)
    async with learner_load(python, folder, env) as load:
        load.mark()
        await asyncio.sleep(seconds)
        learner_alone = load.rate()
        load.mark()
        engine_overlapped = await engine_rate(url, served, seconds)
        return Rates(engine_alone, learner_alone, engine_overlapped, load.rate())
