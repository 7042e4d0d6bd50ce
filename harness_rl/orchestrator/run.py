"""A training run: rollouts, learner and weight updates go on at the same time; this file only says who waits for whom.

    produce ──groups──► assembler ──batch──► feed ──► learner ──result──► record
       ▲                                                  │
       └── pacing: the version that the engine serves ◄───┘ sync: hold new calls · push · prove · release

A learner that dies is started again from its newest checkpoint, and a run that died goes on the same way (`resume.py`): both are one more
`_attempt` of the same run. Whatever ends it (the last step, a signal, a failure), the same `finally` blocks run: sandboxes stopped,
learner, proxy and engine ended, leaks counted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from harness_rl.config import RunConfig
from harness_rl.errors import HarnessRLError, InvariantError, LearnerError, LearnerGone, first_error
from harness_rl.learner.link import Message
from harness_rl.learner.rows import mark_stale, parse_version
from harness_rl.metrics import Metric, MetricsLog, RunState, mean
from harness_rl.orchestrator.accounts import row_fates
from harness_rl.orchestrator.batches import Assembler, Batch
from harness_rl.orchestrator.credit import AdvantageFunction
from harness_rl.orchestrator.evaluate import Evaluation, evaluate
from harness_rl.orchestrator.generation import Generation
from harness_rl.orchestrator.journal import GroupState, Journal
from harness_rl.orchestrator.learner_process import LearnerProcess, SyncHooks, SyncReport, start_learner
from harness_rl.orchestrator.learner_spec import learner_spec
from harness_rl.orchestrator.resume import Restored, restore
from harness_rl.orchestrator.rewards import RewardFunction
from harness_rl.orchestrator.rollout import RolloutRunner
from harness_rl.orchestrator.schedule import TaskOrder
from harness_rl.orchestrator.services import Services
from harness_rl.orchestrator.staleness import StaleWatch, used_rollouts
from harness_rl.orchestrator.stepmetrics import step_metrics
from harness_rl.sessions.base import SessionFactory

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Whoever hears of a run while it goes. Called in the control process, between steps; what it raises ends the run."""

    def begun(self, step: int) -> None:
        """Training starts, or goes on, after so many steps."""

    def step_ended(self, step: int, line: Mapping[str, float]) -> bool:
        """The step's metrics line is written. True: the run is to end here."""

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint is whole."""

    def ended(self) -> None:
        """After the last checkpoint."""


@dataclass
class RunResult:
    run_dir: Path
    steps: int
    checkpoint: Path | None
    evaluations: list[Evaluation]
    ended: str
    """`done`; `solved`: every group had full reward, nothing was left to learn from; `stopped`: the observer ended it."""


@dataclass
class TrainingRun:
    config: RunConfig
    services: Services
    factory: SessionFactory
    rows: list[dict[str, Any]]
    """The training tasks."""
    eval_rows: list[dict[str, Any]]
    reward_function: RewardFunction | None
    state: RunState
    journal: Journal
    model_path: Path
    eval_factory: SessionFactory | None = None
    advantage_function: AdvantageFunction | None = None
    resume: bool = False
    """Go on from the run folder's newest checkpoint."""
    observer: Observer | None = None
    lineage: str = field(default_factory=lambda: secrets.token_hex(2))
    proven: set[str] = field(default_factory=set)
    """Policy versions whose weights the engine was shown to hold."""
    evaluations: list[Evaluation] = field(default_factory=list)
    _proofs: asyncio.Condition = field(default_factory=asyncio.Condition)
    _fed: asyncio.Event = field(default_factory=asyncio.Event)
    """The learner has its first batch."""
    _may_update: asyncio.Event = field(default_factory=asyncio.Event)
    """The starting weights are evaluated: the engine may get others."""
    _held_since: float = 0.0
    """Wall clock of the first hold of the update under way; 0: it holds nothing."""
    _update_waits: bool = False
    """The learner is at its first update and waits for `_may_update`."""
    _leased: dict[int, Batch] = field(default_factory=dict)
    _stale_watch: StaleWatch = field(default_factory=StaleWatch)
    _durable_step: int = 0
    """Of the newest checkpoint."""
    _line: dict[str, int] = field(default_factory=dict)
    """Earlier lineages that the present weights come from, with their last proven steps."""
    _stopped: bool = False
    """The observer asked for the end."""
    _started_at: int = 0
    """Optimizer steps in the weights that the present learner started from."""

    async def run(self) -> RunResult:
        """To the last step. Raises HarnessRLError with the cause when the run cannot go on."""
        restarts = 0
        while True:
            try:
                return await self._attempt()
            except LearnerGone as gone:
                if restarts == self.config.learner.max_restarts:
                    raise LearnerError(f"{gone}; it was started {restarts + 1} times (learner.max_restarts)") from gone
                restarts += 1
                self.state.say(f"{gone}; starting it again from its newest checkpoint")
                if self.state.holding and not isinstance(gone, _EngineIsNew):
                    await self.services.renew_engine()  # it died within a weight update: nobody knows what the engine holds
                self.resume, self.lineage = True, secrets.token_hex(2)

    async def _attempt(self) -> RunResult:
        """One learner's life."""
        config = self.config
        runner = RolloutRunner(self.factory, self.journal, self.reward_function, config.rollout.max_retries, config.reward.deadline_s)
        assembler = Assembler(
            config.rollout.groups_per_step,
            config.rollout.max_group_replacements,
            config.rollout.normalise_advantage,
            baseline=config.rollout.advantage_baseline,
            function=self.advantage_function,
            balance=config.rollout.balance_groups,
            mask_truncated=config.rollout.mask_truncated,
            shuffle=config.rollout.shuffle_advantages,
            seed=config.run.seed,
        )
        self.state.learner = "starting"
        learner = await start_learner(
            learner_spec(config, self.services, self.model_path, self.lineage, resume=self.resume, reference=self._started_from()),
            python=self.services.torch_python(config.learner.python),
            env=self.services.learner_env,
            hooks=SyncHooks(self._hold, self._release, self.services.excuse_failed_sync),
            run_dir=config.run_dir,
            timeout=config.learner.start_timeout_s,
        )
        try:
            restored = self._go_on_from(learner.step)
            assembler.restore(restored.groups, restored.step)
            order = TaskOrder(
                self.rows,
                seed=config.run.seed,
                shuffle=config.rollout.shuffle_tasks,
                position=restored.next_position,
                again=restored.again,
            )
            self.generation = Generation(
                config, runner, self.journal, order, assembler, self.state, version=restored.step, first_group=restored.next_group
            )
            async with self.services.watched(partial(self._renew_weights, learner)):
                await self._first_sync(learner)
                ended = await self._train(learner, runner)
                self.journal.drop_running()
                await self._finish(learner, runner)
            self.state.phase = "saving"
            checkpoint = await learner.stop(timeout=config.learner.step_timeout_s)
            self._durable(checkpoint)
            if self.observer is not None:
                self.observer.ended()
        finally:
            await learner.close()
            self.state.learner = "stopped"
        return RunResult(config.run_dir, self.state.step, Path(checkpoint["path"]), self.evaluations, ended)

    def _started_from(self) -> str:
        """The model before the run's first step; a resumed run's `model_path` is where its weights are looked for when none are saved."""
        found = self.journal.meta("started_from") or str(self.model_path)
        self.journal.set_meta("started_from", found)
        return str(found)

    def _go_on_from(self, step: int) -> Restored:
        """Journal, metrics and state of a run whose weights are those after `step`; 0 for a fresh one."""
        config = self.config
        restored = restore(self.journal, config.run_dir / "rollouts", step, config.rollout.max_staleness)
        self.journal.set_meta("lineages", [*(self.journal.meta("lineages") or []), [self.lineage, step]])
        self.metrics = MetricsLog(config.run_dir / "metrics.jsonl")
        self.state.rewards = [line[Metric.REWARD] for line in self.metrics.take_back(step)]
        self.state.step, self._started_at, self._line = step, step, restored.line
        self._durable_step = step
        self.evaluations = [Evaluation(**entry) for entry in self.journal.meta("evaluations") or []]
        self._leased.clear()
        self._stale_watch = StaleWatch.after(step, self.journal.meta("stale_watch"))
        self._fed, self._may_update, self._update_waits = asyncio.Event(), asyncio.Event(), False
        if self.resume:
            self.state.say(
                f"going on from step {step}: {len(restored.groups)} groups are scored and not trained, "
                f"{len(restored.again)} are played again"
            )
        return restored

    async def _first_sync(self, learner: LearnerProcess) -> None:
        """The engine starts from the learner's weights, proven, before anything is sampled."""
        self.state.say("first weight sync")
        message = await learner.next(self.config.learner.start_timeout_s)
        if message.type != "sync_done":
            raise LearnerError(f"the learner sent {message.type!r} before its first weight sync")

    async def _renew_weights(self, learner: LearnerProcess) -> None:
        """The engine was started again. A learner that waits with its first update has no starting weights left to push."""
        if self._update_waits:
            raise _EngineIsNew("the engine died under the start evaluation, and the learner has left the weights that it evaluates")
        await learner.resync()

    async def _finish(self, learner: LearnerProcess, runner: RolloutRunner) -> None:
        """The end evaluation, of the last weights; a running engine gets these in any case: it outlives the run and is taken for it."""
        evaluates = bool(self.config.eval.at_end and self.eval_rows)
        if evaluates or self.config.engine.urls:
            await self._catch_up(learner)
        if evaluates:
            await self._evaluate(runner, "end")

    async def _catch_up(self, learner: LearnerProcess) -> None:
        """The engine gets the last step's weights, where the run ends between two pushes (`sync.every`)."""
        if self.generation.pacer.version < self.state.step:
            await learner.resync()
            while self.generation.pacer.version < self.state.step:
                await learner.next(self.config.learner.step_timeout_s)

    async def _hold(self, version: str) -> None:
        if version != f"{self.lineage}-{self._started_at}":
            self._update_waits = True
            await self._may_update.wait()
            self._update_waits = False
        self.state.learner = "syncing"
        if self.config.sync.lora == "adapter" and self.state.version:
            return  # calls go on under the adapter that they ask for until another is proven
        self._held_since = self._held_since or time.time()  # engines that sleep are held for from before the step that the update ends
        await self.services.hold(f"weights {version}", self.config.proxy.hold_timeout_s)

    async def _release(self, report: SyncReport) -> list[str]:
        asked = await self.services.release(report.version, report.adapter)
        lineage, step = parse_version(report.version)
        if self._held_since:
            self.journal.held(report.version, self._held_since, report.seconds.get("stopped", 0.0))
            self._held_since = 0.0
        self.journal.set_meta("proven", (self.journal.meta("proven") or {}) | {lineage: step})
        async with self._proofs:
            self.proven.add(report.version)
            self._proofs.notify_all()
        self.state.version, self.state.learner = report.version, "waiting"
        await self.generation.weights_are(step)
        proof, seconds = report.proof, sum(report.seconds.values())
        self.state.say(
            f"weights {report.version} proven: mean |Δlogp| {proof['mean_abs']:.1e} over {proof['tokens']} tokens, {seconds:.1f} s in all"
        )
        return asked

    async def _evaluate(self, runner: RolloutRunner, label: str) -> None:
        section, phase = self.config.eval, self.state.phase
        if self.eval_factory is not None:
            runner = replace(runner, factory=self.eval_factory)
        evaluation = await evaluate(
            runner,
            self.eval_rows[: section.max_tasks or None],
            label=label,
            samples=section.samples,
            temperature=section.temperature,
            slots=self.generation.slots,
            seed=self.config.run.seed,
            state=self.state,
        )
        self.evaluations.append(evaluation)
        self.journal.set_meta("evaluations", [evaluation.as_dict() for evaluation in self.evaluations])
        self.state.phase = phase

    async def _evaluate_start(self, runner: RolloutRunner) -> None:
        """While the learner works on its first batch: the engine still serves the weights that the run started from."""
        done = self.state.step > 0 or any(evaluation.label == "start" for evaluation in self.evaluations)
        if self.config.eval.at_start and self.eval_rows and not done:
            await self._fed.wait()
            await self._evaluate(runner, "start")
        self._may_update.set()

    async def _train(self, learner: LearnerProcess, runner: RolloutRunner) -> str:
        self.state.phase = "training"
        self.state.training_since = time.monotonic()
        ended = "done"
        if self.observer is not None:
            self.observer.begun(self.state.step)
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(self.generation.produce()), tasks.create_task(self._feed(learner))]
                background += [tasks.create_task(self._evaluate_start(runner)), tasks.create_task(self._watch_idle())]
                await self._record(learner, self.config.run.steps)
                for task in background:
                    task.cancel()
        except* _Solved:
            ended = "solved"
        except* HarnessRLError as group:
            raise first_error(group) from None
        self._may_update.set()
        if self._leased:  # it ended while the learner was at work: take its last results before anything else is asked of it
            await self._record(learner, max(self._leased))
        return "stopped" if self._stopped else ended

    async def _feed(self, learner: LearnerProcess) -> None:
        """Give the learner each closed batch, in order, when it asks."""
        timeout = self.config.learner.step_timeout_s
        for _ in range(self.state.step, self.config.run.steps):
            batch = await self.generation.next_batch()
            versions = {version for row in batch.rows for span in row.spans for version, _, _ in span.versions}
            await self._wait_for_proof({version for version in versions if _lineage(version) == self.lineage})
            for row in batch.rows:
                mark_stale(row, batch.step - 1, self.config.rollout.max_staleness, self._line | {self.lineage: batch.step - 1})
            self._leased[batch.step] = batch
            self.journal.move_groups([group.group_id for group in batch.groups], GroupState.LEASED, step=batch.step)
            await learner.send_batch(batch.step, batch.rows, timeout, batch.rollouts)
            self.generation.pacer.step_began()
            self._fed.set()

    async def _wait_for_proof(self, versions: set[str]) -> None:
        """What in-flight calls sampled between an update and its proof trains only once the proof has passed (invariant 6)."""
        try:
            async with asyncio.timeout(self.config.sync.timeout_s), self._proofs:
                await self._proofs.wait_for(lambda: versions <= self.proven)
        except TimeoutError:
            names = ", ".join(sorted(versions - self.proven))
            raise InvariantError(f"rows were sampled by {names}, which was not proven in {self.config.sync.timeout_s:.0f} s") from None

    async def _record(self, learner: LearnerProcess, last: int) -> None:
        """Write down what the learner did, until step `last`."""
        timeout = self.config.learner.step_timeout_s
        since, totals = time.monotonic(), self.generation.totals
        while self.state.step < last:
            message = await learner.next(timeout)
            if message.type == "checkpoint":
                self._durable(message)
            if message.type != "result":
                continue
            batch = self._leased.pop(message["step"])
            rows = row_fates(message["rows"], message["reasons"])
            self.journal.move_groups([group.group_id for group in batch.groups], GroupState.TRAINED, step=batch.step)
            self.journal.end_step(batch.step, message["version"], dict(rows))
            self.state.step = batch.step
            # A step that changed nothing (no finite gradient) has no sync to tell the pacer.
            await self.generation.weights_are(message["served"])
            await self.generation.trained(batch.step, another_waits=bool(self._leased))
            pushed = learner.last_sync if learner.last_sync and learner.last_sync.version == message["version"] else None
            line = step_metrics(batch, message["metrics"], pushed)
            for alarm in self._stale_watch.observe(used_rollouts(batch)):
                self.state.say(alarm)
            self.journal.set_meta("stale_watch", self._stale_watch.keep(batch.step, self.journal.meta("stale_watch"), self._durable_step))
            now = time.monotonic()
            line[Metric.STEP_SECONDS], since = now - since, now
            line[Metric.TRAINED_TOK_S] = line.get("tokens/trained", 0.0) / line[Metric.STEP_SECONDS]
            line[Metric.GENERATED_TOK_S] = line["tokens/sampled"] / line[Metric.STEP_SECONDS]
            before, totals = totals, self.generation.totals
            line |= {name: total - before[name] for name, total in totals.items()}
            line["rollout/running"] = self.state.rollouts_running
            self.metrics.write({"step": self.state.step, "version": message["version"], "time": time.time(), **line})
            self.state.last = line
            self.state.rewards.append(line[Metric.REWARD])
            if self.observer is not None and self.observer.step_ended(self.state.step, line) and not self._stopped:
                self._stopped = True
                return

    def _durable(self, message: Message) -> None:
        self._durable_step = message["step"]
        self.journal.make_durable(message["step"], message["path"])
        if self.observer is not None:
            self.observer.saved(message["step"], Path(message["path"]))
        self.state.say(f"checkpoint {message['path']}")

    async def _watch_idle(self) -> None:
        """End a run in which nothing can be learned any more, and say why."""
        assembler, limit = self.generation.assembler, self.config.run.max_unscorable_steps
        while assembler.idle_rounds < limit:
            await asyncio.sleep(1.0)
        rewards = [reward for group in assembler.considered for reward in group.rewards]
        causes = Counter(cause for group in assembler.considered for rollout in group.rollouts for cause in rollout.causes)
        if not rewards:
            counted = ", ".join(f"{count} times {cause}" for cause, count in causes.most_common())
            raise HarnessRLError(f"no rollout could be scored in {limit} steps' worth of work: {counted}; see rollouts/ of the run")
        if min(rewards) >= 1.0:
            self.state.say(f"all rollouts of {limit} rounds had full reward: nothing is left to learn")
            raise _Solved
        raise HarnessRLError(
            f"every group of {limit} rounds had one reward for all its rollouts (mean {mean(rewards):.2f}): nothing can be learned; "
            "make the tasks easier, or warm the model up first (harness-rl warmup)"
        )


def _lineage(version: str) -> str:
    try:
        return parse_version(version)[0]
    except ValueError:
        raise InvariantError(
            f"rows were sampled by weights that the engine calls {version!r}: it was started again, or updated, by somebody else"
        ) from None


class _EngineIsNew(LearnerGone):
    """Evaluation and learner must both start over, from the weights that a new engine begins with."""


class _Solved(Exception):
    """Not an error: the run has nothing left to learn."""
