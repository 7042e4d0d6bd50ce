"""A run in virtual time: the orchestrator's own scheduling (`Generation`, `Pacer`, `Assembler`, `TaskOrder`) between a model of the
engines and a model of the learner.

Everything that decides is the code of a real run; only what takes time is made up: rollouts are drawn from a workload, steps and updates
sleep. Retries, failures and evaluations are not modelled, and data-parallel learners are taken to scale with their number.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness_rl.config import RunConfig
from harness_rl.errors import UserError
from harness_rl.learner.link import CREDIT
from harness_rl.metrics import RunState
from harness_rl.orchestrator.batches import Assembler, Batch
from harness_rl.orchestrator.generation import Generation
from harness_rl.orchestrator.journal import Journal
from harness_rl.orchestrator.rollout import Rollout
from harness_rl.orchestrator.schedule import TaskOrder
from harness_rl.simulate.clock import Stuck, run_virtually
from harness_rl.simulate.engines import Engines
from harness_rl.simulate.workload import Play, Workload


@dataclass(frozen=True)
class Prediction:
    seconds: float
    """From the first rollout's start to the last step's end."""
    steps: int
    engines: float
    """Share of their full-speed capacity that was used."""
    engines_busy: float
    """Share of the time in which at least one call was under way."""
    calls_under_way: float
    """Mean over time."""
    learner: float
    """Share of the time in which it trained."""
    sandboxes: float
    """Mean share of `rollout.max_concurrent_rollouts` that was in use."""
    paced: float
    """Share of the time in which nothing new could start within `max_staleness`, or before it was wanted."""
    staleness: float
    """Optimizer steps between a token and the policy in training, mean over the tokens of trained groups."""
    stale_share: float
    """Of these tokens: too old to train."""
    sampled_tokens: int
    """Of all rollouts that ended or were given up."""
    tokens: int
    """Of trained groups, those too old included."""
    groups_given_up: int

    @property
    def steps_per_hour(self) -> float:
        return 3600 * self.steps / self.seconds

    @property
    def sampled_per_second(self) -> float:
        return self.sampled_tokens / self.seconds


def predict(config: RunConfig, workload: Workload) -> Prediction:
    """Raises UserError where the config lets the run never end."""
    try:
        return run_virtually(_Run(config, workload).whole())
    except Stuck as error:
        raise UserError(f"simulate: {error}; the config lets no group start or no batch close") from error


@dataclass
class _Run:
    config: RunConfig
    workload: Workload
    engines: Engines = field(init=False)
    spans: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """(version, tokens) of each rollout."""
    ages: Counter[int] = field(default_factory=Counter)
    trained_s: float = 0.0
    sandbox_s: float = 0.0
    sampled: float = 0.0
    served: int = 0
    """The version that a new call asks for."""

    def __post_init__(self) -> None:
        config = self.config
        self.engines = Engines(config.simulate.engines * self.workload.calls_per_engine)
        self.draw = random.Random(f"{config.run.seed}/simulate")
        self.steps = {name: getattr(self.workload, name) for name in ("step_s", "stopped_s", "probe_s")}

    async def whole(self) -> Prediction:
        config, rollout = self.config, self.config.rollout
        rows = [{"task_name": task} for task in self.workload.plays]
        self.open = asyncio.Event()
        self.open.set()
        self.generation = Generation(
            config,
            _Plays(self),
            Journal(Path(":memory:")),
            TaskOrder(rows, seed=config.run.seed, shuffle=rollout.shuffle_tasks),
            Assembler(rollout.groups_per_step, rollout.max_group_replacements, rollout.normalise_advantage),
            RunState("simulate", config.run.steps),
        )
        producing = asyncio.create_task(self.generation.produce())
        learning = asyncio.create_task(self._learn())
        await asyncio.wait({producing, learning}, return_when=asyncio.FIRST_EXCEPTION)
        for task in (producing, learning):
            task.result()
        self.engines.settle()
        return self._prediction(self.ended)

    async def _learn(self) -> None:
        waiting: asyncio.Queue[Batch] = asyncio.Queue()
        credit = asyncio.Semaphore(CREDIT)
        feeding = asyncio.create_task(self._feed(waiting, credit))
        served = 0
        for step in range(1, self.config.run.steps + 1):
            batch = await waiting.get()
            credit.release()
            seconds = self._drawn("step_s") / self.config.simulate.learners
            due = step - served >= self.config.sync.every
            if due and self.config.sync.sleep:
                await self._stop()
            await asyncio.sleep(seconds)
            self.trained_s += seconds
            self._count(batch)
            if due:
                await self._update(step, seconds)
                served = step
            await self.generation.trained(step, another_waits=not waiting.empty())
        self.ended = asyncio.get_running_loop().time()
        feeding.cancel()

    async def _feed(self, waiting: asyncio.Queue[Batch], credit: asyncio.Semaphore) -> None:
        for _ in range(self.config.run.steps):
            await credit.acquire()
            batch = await self.generation.next_batch()
            self.generation.pacer.step_began()
            waiting.put_nowait(batch)

    async def _stop(self) -> None:
        """New calls are held, and the engines stand."""
        sync = self.config.sync
        self.open.clear()
        if sync.mode == "wait":
            await self.engines.drained(sync.wait_s)
        self.engines.pause()

    async def _update(self, step: int, trained_s: float) -> None:
        """`trained_s`: what the step took; engines that sleep stood for it, and their stop is as long at least."""
        sync = self.config.sync
        if sync.lora == "adapter":  # nothing is held and nothing stands; the next calls ask for another adapter
            await asyncio.sleep(self._drawn("probe_s"))
        else:
            stopped = self._drawn("stopped_s")
            if not sync.sleep:
                await self._stop()
            await asyncio.sleep(max(0.0, stopped - trained_s) if sync.sleep else stopped)
            self.engines.resume(step)
            await asyncio.sleep(self._drawn("probe_s"))
            self.open.set()
        self.served = step
        await self.generation.weights_are(step)

    def _drawn(self, name: str) -> float:
        return self.draw.choice(self.steps[name])

    def _count(self, batch: Batch) -> None:
        for group in batch.groups:
            for member in group.rollouts:
                for version, tokens in self.spans.pop(member.rollout_id):
                    self.ages[batch.step - 1 - version] += round(tokens)

    def _prediction(self, seconds: float) -> Prediction:
        tokens = self.ages.total()
        too_old = sum(count for age, count in self.ages.items() if age > self.config.rollout.max_staleness)
        return Prediction(
            seconds=seconds,
            steps=self.config.run.steps,
            engines=self.engines.delivered_s / (self.engines.capacity * seconds),
            engines_busy=self.engines.busy_s / seconds,
            calls_under_way=self.engines.occupied_s / seconds,
            learner=self.trained_s / seconds,
            sandboxes=self.sandbox_s / (self.config.rollout.max_concurrent_rollouts * seconds),
            paced=self.generation.seconds_paced / seconds,
            staleness=sum(age * count for age, count in self.ages.items()) / max(1, tokens),
            stale_share=too_old / max(1, tokens),
            sampled_tokens=round(self.sampled),
            tokens=tokens,
            groups_given_up=self.generation.groups_given_up,
        )


@dataclass
class _Plays:
    """The runner: a rollout is a draw from its task's, and what it waits for."""

    run_of: _Run

    async def run(self, row: dict[str, Any], *, group_id: str, member: int, seed: int) -> Rollout:
        run, loop = self.run_of, asyncio.get_running_loop()
        draw = random.Random(seed)
        play: Play = draw.choice(run.workload.plays[row["task_name"]])
        began, name = loop.time(), f"{group_id}-{member}"
        try:
            spans = await self._calls(play)
            await asyncio.sleep(play.after_s)
        finally:
            run.sandbox_s += loop.time() - began
        run.spans[name] = spans
        return Rollout(name, group_id, member, 1, self._reward(group_id, member), None, [], loop.time() - began)

    async def _calls(self, play: Play) -> list[tuple[int, float]]:
        run, spans = self.run_of, []
        for call in play.calls:
            await asyncio.sleep(call.before_s)
            await run.open.wait()
            asked, shares = run.served, await run.engines.call(call.seconds)
            for version, share in [(asked, 1.0)] if run.config.sync.lora == "adapter" else shares:
                spans.append((version, share * call.tokens))
                run.sampled += share * call.tokens
        return spans

    def _reward(self, group_id: str, member: int) -> float:
        usable = random.Random(f"{self.run_of.config.run.seed}/{group_id}").random() < self.run_of.workload.usable
        return float(usable and member % 2)
