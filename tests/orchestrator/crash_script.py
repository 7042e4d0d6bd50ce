"""A whole run as a process that may be killed: control, journal, capture store and proxy are real; engine, learner and agents are not.

`python crash_script.py DIR [resume]`. The learner keeps its weights as real checkpoint folders; what it does now is in
DIR/a/phase, so that whoever kills the run can choose the moment.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.fakes import outcome, trace

from harness_rl.config import RunConfig
from harness_rl.learner.link import Message
from harness_rl.orchestrator import main, run, services
from harness_rl.orchestrator.learner_process import SyncHooks, SyncReport
from harness_rl.sessions.base import SessionServices, VerifyResult
from harness_rl.sessions.capture import Capture, mint
from harness_rl.sessions.outcome import rollout_record, write_record

STEPS = 5
STOPPED = 130
PHASE_S, ROLLOUT_S = 0.4, 0.7


@dataclass
class Learner:
    """Each step and each update takes `PHASE_S`; every step is saved."""

    folder: Path
    lineage: str
    hooks: SyncHooks
    step: int
    last_sync: SyncReport | None = None
    last_checkpoint: Message | None = None
    inbox: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    working: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def phase(self, name: str) -> None:
        (self.folder / "phase").write_text(f"{name} {self.step}")

    async def push(self) -> None:
        version = f"{self.lineage}-{self.step}"
        await self.hooks.hold(version)
        self.phase("syncing")
        await asyncio.sleep(PHASE_S)
        self.last_sync = SyncReport(version, {"ok": True, "mean_abs": 0.0, "tokens": 1}, {"push": PHASE_S})
        await self.hooks.release(self.last_sync)
        self.phase("waiting")
        self.inbox.put_nowait(Message("sync_done", {"version": version}))

    async def next(self, timeout: float) -> Message:
        return await asyncio.wait_for(self.inbox.get(), timeout)

    async def send_batch(self, step: int, rows: list[Any], timeout: float, rollouts: int | None = None) -> None:
        self.tasks.append(asyncio.create_task(self.train(step, [row.row_id for row in rows])))

    async def train(self, step: int, rows: list[str]) -> None:
        async with self.working:
            self.phase("training")
            await asyncio.sleep(PHASE_S)
            self.step = step
            await self.push()
            fields = {"step": step, "version": f"{self.lineage}-{step}", "served": step, "metrics": {}, "reasons": {}}
            self.inbox.put_nowait(Message("result", {**fields, "rows": dict.fromkeys(rows, "trained")}))
            path = self.folder / "checkpoints" / f"step-{step}"
            path.mkdir(parents=True)
            self.last_checkpoint = Message("checkpoint", {"step": step, "path": str(path)})
            self.inbox.put_nowait(self.last_checkpoint)

    async def resync(self) -> None:
        await self.push()

    async def stop(self, timeout: float) -> Message:
        assert self.last_checkpoint is not None
        return self.last_checkpoint

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()


def checkpoints(run_dir: Path) -> list[int]:
    return [int(path.name[5:]) for path in run_dir.glob("checkpoints/step-*")]


async def start_learner(spec: Any, *, hooks: SyncHooks, run_dir: Path, **_: Any) -> Learner:
    saved = checkpoints(run_dir) if spec.resume else []
    learner = Learner(run_dir, spec.lineage, hooks, max(saved, default=0))
    if saved:
        learner.last_checkpoint = Message(
            "checkpoint", {"step": learner.step, "path": str(run_dir / "checkpoints" / f"step-{learner.step}")}
        )
    learner.tasks.append(asyncio.create_task(learner.push()))
    return learner


class Session:
    """A rollout without an agent: a real capture session, and two tokens of the policy that is served."""

    def __init__(self, lent: SessionServices, capture: Capture, episode_id: str) -> None:
        self.lent, self.capture, self.episode_id = lent, capture, episode_id

    async def run(self) -> None:
        version = (await self.lent.proxy.health())["version"]
        await asyncio.sleep(ROLLOUT_S)
        self.found = outcome(float(int(self.episode_id[-1]) % 2), trace=trace(version), stop_reason="finished")
        await self.capture.seal()
        record = rollout_record({"episode_id": self.episode_id}, self.found, None, status=self.capture.status)
        write_record(self.lent.rollouts_dir / self.episode_id, record, self.found.trace)

    def verify(self, transcript: Any = None) -> VerifyResult:
        return VerifyResult(self.found.env_reward)

    def outcome(self) -> Any:
        return self.found

    async def close(self) -> None:
        await self.capture.delete()


class Factory:
    def bind(self, lent: SessionServices) -> None:
        self.lent = lent

    async def create(self, task: dict[str, Any], seed: int, episode_id: str, **_: Any) -> Session:
        await self.lent.proxy_up.wait()
        created = await mint(self.lent.proxy, metadata={"episode_id": episode_id})
        return Session(self.lent, Capture(created, self.lent, 20.0), episode_id)


class Engine:
    url, model, pid, info, dtype = "http://127.0.0.1:9", "policy", None, SimpleNamespace(max_model_len=1024), "float32"

    def require(self, **_: object) -> None: ...

    async def died(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None: ...


async def launch(*_: object, **__: object) -> Engine:
    return Engine()


def start(folder: Path, resume: bool) -> None:
    services.launch, run.start_learner = launch, start_learner  # type: ignore[assignment]
    rollout = {"num_generations": 2, "groups_per_step": 2, "max_concurrent_rollouts": 4, "max_staleness": 1, "seal_grace_s": 0.5}
    config = RunConfig.model_validate(
        {
            "run": {"dir": folder, "name": "a", "steps": STEPS},
            "sandbox": {"kind": "none"},
            "engine": {"python": sys.executable},
            "rollout": rollout,
        }
    )
    rows = [{"prompt": f"task {number}", "task_name": f"t{number}"} for number in range(6)]
    inputs = main.Inputs(Factory(), rows, None, [], None, folder / "no-model")  # type: ignore[arg-type]
    main.run_until_signal(lambda: main.train(config, inputs, resume=resume), config.run.stop_grace_s)


if __name__ == "__main__":
    try:
        start(Path(sys.argv[1]), "resume" in sys.argv)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
