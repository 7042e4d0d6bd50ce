"""Which thread shares are best on this machine: launches the engine with each share, runs the learner load beside it, writes a table.

`python -m harness_rl.bench.threads MODEL_FOLDER REPORT.md`. The machine must be idle otherwise; the column
"load average" says how far it was (about 3 is ours).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness_rl.bench.rates import Rates, engine_rate, learner_load
from harness_rl.config import EngineSection
from harness_rl.engines.command import engine_command, engine_environment
from harness_rl.engines.environment import torch_python
from harness_rl.processes import spawn
from harness_rl.threads import openmp_env, usable_cores

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass(frozen=True)
class Share:
    """One way to divide the machine."""

    engine: int
    learner: int
    pin: bool = False
    """Engine on the first cores, learner on the last."""
    block_ms: int | None = None
    """How long an idle OpenMP thread spins (KMP_BLOCKTIME); None: the runtime's 200 ms."""
    mixed: bool = False
    """The learner keeps torch's own GNU runtime."""

    def __str__(self) -> str:
        extra = [", pinned"] * self.pin + [f", spin {self.block_ms} ms"] * (self.block_ms is not None) + [", two runtimes"] * self.mixed
        return f"engine {self.engine}, learner {self.learner}{''.join(extra)}"


def shares(cores: int) -> list[Share]:
    """What is compared on a machine of `cores`."""
    half = max(1, cores // 2)
    return [
        Share(cores, cores),
        Share(cores, cores, block_ms=0),
        Share(cores, cores, mixed=True),
        Share(cores, half),
        Share(half, cores),
        Share(half, half),
        Share(half, half, pin=True),
    ]


@asynccontextmanager
async def _engine(share: Share, python: Path, model: Path, folder: Path) -> AsyncIterator[str]:
    import httpx

    section = EngineSection(max_model_len=2048, threads=share.engine, expose_dev=False)
    port = 8190
    argv = engine_command(section, "cpu", python, model, "policy", port)
    env = engine_environment(section, "cpu", python, os.environ) | _spin(share)
    if share.pin:
        argv = ["taskset", "-c", ",".join(map(str, usable_cores()[: share.engine])), *argv]
    child = await spawn("engine", argv, log_path=folder / "engine.log", env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient() as client:
            while True:
                if not child.alive:
                    raise SystemExit(f"the engine ended: {child.last_words()}")
                try:
                    if (await client.get(f"{url}/health", timeout=5)).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.5)
        yield url
    finally:
        await child.stop()


async def measure_share(share: Share, python: Path, model: Path, seconds: float) -> tuple[Rates, float]:
    """Rates of one share, and the load average at the end."""
    with tempfile.TemporaryDirectory() as folder:
        async with _engine(share, python, model, Path(folder)) as url:
            await engine_rate(url, "policy", 2)
            engine_alone = await engine_rate(url, "policy", seconds)
            env: Mapping[str, str] = openmp_env(python, share.learner) | _spin(share)
            if share.mixed:
                env = {"OMP_NUM_THREADS": str(share.learner), "MKL_NUM_THREADS": str(share.learner), "LD_PRELOAD": ""}
            cores = usable_cores()[-share.learner :] if share.pin else None
            async with learner_load(python, str(model), env, cores=cores) as load:
                load.mark()
                await asyncio.sleep(seconds)
                learner_alone = load.rate()
                load.mark()
                engine_overlapped = await engine_rate(url, "policy", seconds)
                return Rates(engine_alone, learner_alone, engine_overlapped, load.rate()), os.getloadavg()[0]


def _spin(share: Share) -> dict[str, str]:
    return {} if share.block_ms is None else {"KMP_BLOCKTIME": str(share.block_ms)}


COLUMNS = ("share", "engine alone", "learner alone", "engine overlapped", "learner overlapped", "load average")
HEADER = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n"


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    rows = [HEADER]
    for share in shares(len(usable_cores())):
        rates, load = await measure_share(share, torch_python(), args.model, args.seconds)
        row = (
            f"| {share} | {rates.engine_alone:.0f} | {rates.learner_alone:.0f} | {rates.engine_overlapped:.0f} "
            f"| {rates.learner_overlapped:.0f} | {load:.1f} |\n"
        )
        print(row, end="", flush=True)
        rows.append(row)
    args.report.write_text("".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
