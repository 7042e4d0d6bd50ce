"""Warm start: supervised training on demonstrations, captured through the same proxy and trained by the same learner, until success is
measured in a target range.

A scripted policy plays each task's own solution inside the real agent or environment; the engine renders, tokenises and scores it; the
trace says `demonstration`. The result is a model folder named by everything that it depends on, so that a second run finds it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness_rl.config import RunConfig
from harness_rl.errors import HarnessRLError, LearnerError, LearnerGone
from harness_rl.learner.rows import Row, build_rows
from harness_rl.learner.spec import LearnerSpec
from harness_rl.metrics import RunState
from harness_rl.orchestrator.evaluate import evaluate, task_name
from harness_rl.orchestrator.journal import DEMONSTRATION, Journal
from harness_rl.orchestrator.learner_process import LearnerProcess, SyncHooks, SyncReport, start_learner
from harness_rl.orchestrator.rollout import RolloutRunner
from harness_rl.orchestrator.schedule import TaskOrder
from harness_rl.orchestrator.services import Services
from harness_rl.paths import cache_dir
from harness_rl.sessions.base import SessionFactory
from harness_rl.sessions.ownthread import OwnThread

Script = list[dict[str, Any]]
"""The assistant turns of one demonstration."""


@dataclass(frozen=True)
class WarmStart:
    path: Path
    success: float
    demonstrations: int


@dataclass(frozen=True)
class Check:
    """One measurement on the way."""

    success: float
    demonstrations: int
    checkpoint: Path
    error: float = 0.0
    """Standard error of the success."""


@dataclass
class Target:
    """Where a warm start ends. Success is measured on few rollouts and one optimizer step may move it by a fifth: the first check in the
    upper half of the range, or above it by less than its standard error, ends it; a check further above ends it at the one before, if
    that lay inside."""

    low: float
    high: float
    inside: Check | None = None
    """The last check, if it lay in the range."""

    def see(self, check: Check) -> Check | None:
        """The check to end at, or None: go on."""
        if check.success - check.error > self.high:
            return self.inside or check
        if check.success >= (self.low + self.high) / 2:
            return check
        self.inside = check if check.success >= self.low else None
        return None


async def make_scripts(factory: SessionFactory, rows: list[dict[str, Any]]) -> list[Script]:
    """Each row's demonstration, one after the other and before any of them is captured: one may be a whole game, on a server that has no
    session to spare beside the episodes'. In a thread of its own, so that the run can be watched and stopped meanwhile.

    Raises UserError where the factory has none, and whatever the user's function raises.
    """
    thread = OwnThread("demonstrations")
    try:
        return [await thread.call(factory.demonstration, row) for row in rows]
    finally:
        thread.close()


def warm_start_path(
    config: RunConfig, factory: SessionFactory, model_path: Path, rows: list[dict[str, Any]], scripts: Sequence[Script]
) -> Path:
    """Where the warm start for this config, agent, model and set of tasks, with a script for each, lies (or will lie)."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        digest.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\0")

    add(config.warmup.model_dump(mode="json"))
    add(factory.identity())
    add({"temperature": config.rollout.temperature, "seed": config.run.seed})
    for file in sorted(model_path.iterdir()) if model_path.is_dir() else []:
        if file.is_file():
            add([file.name, file.stat().st_size])
            if file.stat().st_size < 1 << 20:
                digest.update(file.read_bytes())
    for row, script in zip(rows, scripts, strict=True):
        add([row.get("prompt"), script])
    return cache_dir("warmup", digest.hexdigest()[:24])


async def warm_up(
    config: RunConfig,
    services: Services,
    factory: SessionFactory,
    rows: list[dict[str, Any]],
    journal: Journal,
    state: RunState,
    model_path: Path,
    scripts: Sequence[Script],
) -> WarmStart:
    """Train on the rows' scripts until the measured success is between `warmup.target_low` and `target_high`; the model is put at
    `warm_start_path`.

    A learner that dies is started again from its newest checkpoint, `learner.max_restarts` times. Raises HarnessRLError when all
    demonstrations are used up below the range, or when one of the solutions does not earn its task's reward.
    """
    # No reward function: a demonstration is right when the verifier says so, whatever the run rewards.
    runner = RolloutRunner(factory, journal, None, config.rollout.max_retries)
    work = config.run_dir / "warmup"
    shutil.rmtree(work, ignore_errors=True)  # of a process that died: its checkpoints are no part of this warm start
    work.mkdir(parents=True)
    target = Target(config.warmup.target_low, config.warmup.target_high)
    restarts = 0
    while True:
        state.phase = "warm-up"
        try:
            ended = await _attempt(config, services, runner, rows, scripts, state, model_path, target, resume=restarts > 0)
            break
        except LearnerGone as gone:
            if restarts == config.learner.max_restarts:
                raise LearnerError(f"warm-up: {gone}; it was started {restarts + 1} times (learner.max_restarts)") from gone
            restarts += 1
            state.say(f"warm-up: {gone}; starting it again from its newest checkpoint")
            if state.holding:
                await services.renew_engine()  # it died within a weight update: nobody knows what the engine holds
    path = warm_start_path(config, factory, model_path, rows, scripts)
    _publish(ended.checkpoint, path, {"success": ended.success, "demonstrations": ended.demonstrations})
    shutil.rmtree(work, ignore_errors=True)
    return WarmStart(path, ended.success, ended.demonstrations)


async def _attempt(
    config: RunConfig,
    services: Services,
    runner: RolloutRunner,
    rows: list[dict[str, Any]],
    scripts: Sequence[Script],
    state: RunState,
    model_path: Path,
    target: Target,
    *,
    resume: bool,
) -> Check:
    """One learner's life. Raises LearnerGone."""
    section, work = config.warmup, config.run_dir / "warmup"
    lineage = "w" + secrets.token_hex(2)

    async def hold(version: str) -> None:
        await services.hold(f"weights {version}", config.proxy.hold_timeout_s)

    async def release(report: SyncReport) -> list[str]:
        state.version = report.version
        return await services.release(report.version, report.adapter)

    spec = LearnerSpec(
        model=str(model_path),
        run_dir=str(work),
        lineage=lineage,
        engines=services.engine_urls,
        served_model=services.model,
        seed=config.run.seed,
        objective="sft",
        learning_rate=section.learning_rate,
        max_grad_norm=config.learner.max_grad_norm,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        device=config.learner.device,
        dtype=config.learner.dtype,
        threads=services.learner_threads,
        sync_backend=config.sync.backend,
        sync_timeout_s=config.sync.timeout_s,
        sync_host=config.sync.host,
        sync_mode=config.sync.mode,
        sync_kv=config.sync.kv,
        sync_wait_s=config.sync.wait_s,
        engine_dtype=services.engine_dtype,
        probe_tokens=config.sync.probe_tokens,
        probe_bound=config.sync.probe_bound,
        checkpoint_every=section.check_every,
        keep_checkpoints=2,
        resume=resume,
    )
    learner = await start_learner(
        spec,
        python=services.torch_python(config.learner.python),
        env=services.learner_env,
        hooks=SyncHooks(hold, release, services.excuse_failed_sync),
        run_dir=work,
        timeout=config.learner.start_timeout_s,
    )
    try:
        async with services.watched(learner.resync):
            await learner.next(config.learner.start_timeout_s)
            return await _train(config, runner, list(zip(rows, scripts, strict=True)), rows, learner, state, target)
    finally:
        await learner.close()


async def _train(
    config: RunConfig,
    runner: RolloutRunner,
    shown: Sequence[tuple[dict[str, Any], Script]],
    rows: list[dict[str, Any]],
    learner: LearnerProcess,
    state: RunState,
    target: Target,
) -> Check:
    """Where it ended. The next demonstrations are captured while the learner trains on the last ones."""
    section, timeout, first = config.warmup, config.learner.step_timeout_s, learner.step
    slots = asyncio.Semaphore(config.rollout.max_concurrent_rollouts)  # of both: demonstrations go on beside a measurement
    steps = -(-section.demonstrations // section.batch)
    # From the end of the list: success is measured at its start, on tasks that a short warm start has not shown.
    order = TaskOrder(shown[::-1], seed=config.run.seed, shuffle=config.rollout.shuffle_tasks, position=first * section.batch)

    def demonstrate(step: int) -> asyncio.Task[list[Row]]:
        return tasks.create_task(_demonstrate(runner, [order.next()[1] for _ in range(section.batch)], step, slots))

    async def look(step: int) -> Check | None:
        """Measure the weights after `step`, where it is time to; where it ends, or None."""
        if step * section.batch < section.check_from or step % section.check_every:
            return None
        success, count = await _measure(config, runner, rows, state, step, slots)
        error = math.sqrt(max(0.0, success * (1 - success)) / count) if count else 0.0
        ended = target.see(Check(success, step * section.batch, await _checkpoint(learner, step, timeout), error))
        if ended is not None and ended.success - ended.error > section.target_high:
            state.say(f"warm-up: success jumped over its range to {ended.success:.2f}; lower warmup.learning_rate")
        return ended

    if first and (ended := await look(first)) is not None:  # the learner before may have died under this measurement
        return ended
    async with asyncio.TaskGroup() as tasks:
        coming = demonstrate(first + 1) if first < steps else None
        for step in range(first + 1, steps + 1):
            assert coming is not None
            await learner.send_batch(step, await coming, timeout)
            if step < steps:
                coming = demonstrate(step + 1)
            while (message := await learner.next(timeout)).type != "result":
                continue
            state.say(f"warm-up: {step * section.batch} demonstrations, loss {message['metrics'].get('loss', float('nan')):.3f}")
            changed = message["metrics"].get("updates", 1) > 0
            if changed and (ended := await look(step)) is not None:
                coming.cancel()
                return ended
    if target.inside is not None:
        return target.inside
    raise HarnessRLError(
        f"warm-up: success stayed below {section.target_low} after {steps * section.batch} demonstrations; "
        "raise warmup.demonstrations or warmup.learning_rate"
    )


async def _checkpoint(learner: LearnerProcess, step: int, timeout: float) -> Path:
    """The folder of the weights that were measured; the learner writes it after the step's result, while we measure, or longer."""
    while learner.last_checkpoint is None or learner.last_checkpoint["step"] < step:
        await learner.next(timeout)
    return Path(learner.last_checkpoint["path"])


async def _measure(
    config: RunConfig, runner: RolloutRunner, rows: list[dict[str, Any]], state: RunState, step: int, slots: asyncio.Semaphore
) -> tuple[float, int]:
    """Success, and on how many rollouts."""
    section, label = config.warmup, f"warmup-{step}"
    evaluation = await evaluate(
        runner,
        rows[: section.check_tasks],
        label=label,
        samples=1,
        temperature=config.rollout.temperature,
        slots=slots,
        seed=config.run.seed,
        state=state,
    )
    del state.evals[label]
    state.phase = "warm-up"
    return evaluation.reward, evaluation.tasks * evaluation.samples - evaluation.unscored


async def _demonstrate(runner: RolloutRunner, shown: list[tuple[dict[str, Any], Script]], step: int, slots: asyncio.Semaphore) -> list[Row]:
    """Rows of one batch of demonstrations. Raises HarnessRLError for a solution that its verifier refuses."""

    async def one(index: int, row: dict[str, Any], script: Script) -> list[Row]:
        async with slots:
            rollout = await runner.run(row, group_id=f"{DEMONSTRATION}{step:03d}", member=index, seed=index, script=script)
        if rollout.outcome is None or rollout.reward is None or rollout.reward <= 0:
            raise HarnessRLError(
                f"warm-up: the solution of {task_name(row)} got reward {rollout.reward} ({', '.join(rollout.causes) or 'verified'}); "
                + (f"run harness-rl tasks check {row['task_path']}" if "task_path" in row else "its demonstration does not solve it")
            )
        found = build_rows(rollout.outcome.trace, rollout.rollout_id, rollout.group_id, origins=frozenset({"demonstration"}))
        for built in found:
            built.advantage = 1.0
        return found

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(index, row, script)) for index, (row, script) in enumerate(shown)]
    return [row for task in running for row in task.result()]


def _publish(checkpoint: Path, target: Path, facts: dict[str, Any]) -> None:
    """Copy the model files (no optimizer state) to `target` in one rename."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copytree(checkpoint, temporary, ignore=shutil.ignore_patterns("optimizer*", "rng*", "COMPLETE", "trainer*"))
    (temporary / "warmup.json").write_text(json.dumps(facts, indent=2) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def read_warm_start(path: Path) -> WarmStart | None:
    """The finished warm start at `path`, or None."""
    try:
        facts = json.loads((path / "warmup.json").read_text())
    except FileNotFoundError:
        return None
    return WarmStart(path, float(facts["success"]), int(facts["demonstrations"]))
