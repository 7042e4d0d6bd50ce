"""From a config to a finished run: what the command line and the Python API share.

A run folder belongs to one live process (a file lock), and holds everything the run leaves: resolved config, metrics, journal, capture,
rollouts, checkpoints, logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from harness_rl.agents.registry import check_name
from harness_rl.config import RunConfig
from harness_rl.configfile import load_config, to_toml
from harness_rl.engines.command import Adapters
from harness_rl.engines.patchable import check_patchable
from harness_rl.errors import UserError, first_error
from harness_rl.imports import load_object
from harness_rl.metrics import RunState, read_metrics
from harness_rl.models import resolve_model
from harness_rl.orchestrator.abandoned import close_dead_sessions
from harness_rl.orchestrator.accounts import settle, write_accounts
from harness_rl.orchestrator.credit import AdvantageFunction
from harness_rl.orchestrator.evaluate import Evaluation, evaluate
from harness_rl.orchestrator.journal import Journal
from harness_rl.orchestrator.rewards import RewardFunction, load_reward_function
from harness_rl.orchestrator.rollout import RolloutRunner
from harness_rl.orchestrator.run import Observer, RunResult, TrainingRun
from harness_rl.orchestrator.runfiles import own_files
from harness_rl.orchestrator.services import Services, services
from harness_rl.orchestrator.warmup import Script, WarmStart, make_scripts, read_warm_start, warm_start_path, warm_up
from harness_rl.sessions.base import SessionFactory
from harness_rl.sessions.harbor import HarborSessionFactory
from harness_rl.viewer.closing import closing_table
from harness_rl.viewer.panel import Panel
from harness_rl.viewer.plot import write_reward_plot
from harness_rl.wholefile import write_whole

log = logging.getLogger(__name__)
T = TypeVar("T")
_FREE_BYTES = 1 << 30
"""Of disk, below which no run starts."""


@dataclass
class Inputs:
    """What a run works on, resolved: before any process starts, so that a mistake costs nothing."""

    factory: SessionFactory
    rows: list[dict[str, Any]]
    eval_factory: SessionFactory | None
    eval_rows: list[dict[str, Any]]
    reward_function: RewardFunction | None
    model_path: Path
    observer: Observer | None = None
    advantage_function: AdvantageFunction | None = None


def resolve_inputs(
    config: RunConfig,
    *,
    factory: SessionFactory | None = None,
    rows: list[dict[str, Any]] | None = None,
    reward_function: RewardFunction | None = None,
    eval_factory: SessionFactory | None = None,
    observer: Observer | None = None,
) -> Inputs:
    """Raises UserError for the first thing that is missing."""
    if factory is None:
        harness = check_name(config.harness.name, config.harness.model_class)
        if config.harness.step_limit and not harness.step_limit:
            raise UserError(f"harness.step_limit: {config.harness.name} has no such limit of its own; use rollout.max_calls")
        if config.tasks.train is None:
            raise UserError("tasks.train: name the folder of training tasks")
        factory = HarborSessionFactory.from_config(config, config.tasks.train)
    if config.reward.weights and isinstance(factory, HarborSessionFactory):
        raise UserError("reward.weights: they are of reward_funcs; a verifier's reward has no parts to weigh")
    if reward_function is None and config.reward.function is not None:
        reward_function = load_reward_function(config.reward.function)
    if eval_factory is None and config.tasks.eval is not None:
        eval_factory = HarborSessionFactory.from_config(config, config.tasks.eval)
    inputs = Inputs(
        factory=factory,
        rows=rows if rows is not None else factory.prompt_rows(),
        eval_factory=eval_factory,
        eval_rows=eval_factory.prompt_rows() if eval_factory else [],
        reward_function=reward_function,
        model_path=Path(resolve_model(config.model.name)),
        observer=observer,
        advantage_function=load_object(own, "rollout.advantage_function") if (own := config.rollout.advantage_function) else None,
    )
    check_patchable(config, inputs.model_path)
    for one in (factory, eval_factory):
        if isinstance(one, HarborSessionFactory):
            one.refuse_unrunnable()
    return inputs


@dataclass
class Outcome:
    """What the commands print at the end."""

    run_dir: Path
    result: RunResult | None = None
    warm_start: WarmStart | None = None
    evaluation: Evaluation | None = None
    greedy: Evaluation | None = None


async def train(config: RunConfig, inputs: Inputs, *, resume: bool = False, console: Console | None = None) -> Outcome:
    """To the last step; with `resume`, from the newest checkpoint of the config's run folder. Raises HarnessRLError.

    However it ends, its accounts are written and shown.
    """
    async with accounted(config, console) as (state, journal):
        return await _train(config, inputs, resume, journal, state)


async def _train(config: RunConfig, inputs: Inputs, resume: bool, journal: Journal, state: RunState) -> Outcome:
    model, warm = inputs.model_path, None
    if resume:
        sessions, turns = await close_dead_sessions(config.run_dir, journal.running())
        if sessions:
            state.say(f"closed {sessions} capture sessions of a process that died; {turns} turns of running rollouts are kept as abandoned")
    async with services(config, inputs.model_path, state, adapters=Adapters.of(config)) as running:
        _bind(running, inputs)
        if config.warmup.enabled and not (resume and any(config.run_dir.glob("checkpoints/step-*"))):
            state.phase = "warm-up"
            warm = await _warm_start(config, running, inputs, journal, state, await make_scripts(inputs.factory, inputs.rows))
            model = warm.path
        run = TrainingRun(
            config=config,
            services=running,
            factory=inputs.factory,
            rows=inputs.rows,
            eval_factory=inputs.eval_factory,
            eval_rows=inputs.eval_rows,
            reward_function=inputs.reward_function,
            advantage_function=inputs.advantage_function,
            state=state,
            journal=journal,
            model_path=model,
            resume=resume,
            observer=inputs.observer,
        )
        return Outcome(config.run_dir, await run.run(), warm)


def _close(config: RunConfig, journal: Journal, state: RunState, out: Console) -> None:
    """What the run leaves for its reader; nothing of one that ended before its first rollout."""
    accounts = settle(journal, config.run_dir / "rollouts")
    if not accounts.rollouts:
        return
    metrics, plot = config.run_dir / "metrics.jsonl", None
    lines = read_metrics(metrics) if metrics.exists() else []
    try:
        write_accounts(accounts, config.run_dir)
        plot = write_reward_plot(config.run_dir, lines, state.evals) if lines else None
    except OSError as error:  # a full disk must not hide why the run ended
        out.print(f"accounts.json and reward.png could not be written: {error}")
    out.print(closing_table(state, lines, journal.counts()["groups"], accounts))
    saved = journal.newest_checkpoint()
    if saved or plot:
        out.print("   ".join([*([f"model {saved}"] if saved else []), *([f"plot {plot}"] if plot else [])]))


async def warm_start_only(config: RunConfig, inputs: Inputs, *, console: Console | None = None) -> Outcome:
    scripts = await make_scripts(inputs.factory, inputs.rows)
    found = read_warm_start(warm_start_path(config, inputs.factory, inputs.model_path, inputs.rows, scripts))
    if found is not None:
        return Outcome(config.run_dir, warm_start=found)
    async with accounted(config, console) as (state, journal), services(config, inputs.model_path, state) as running:
        _bind(running, inputs)
        return Outcome(config.run_dir, warm_start=await _warm_start(config, running, inputs, journal, state, scripts))


async def evaluate_only(config: RunConfig, inputs: Inputs, *, console: Console | None = None) -> Outcome:
    if not inputs.eval_rows:
        raise UserError("tasks.eval: name the folder of tasks to evaluate on")
    async with accounted(config, console) as (state, journal), services(config, inputs.model_path, state, trains=False) as running:
        _bind(running, inputs)
        if config.engine.urls:
            state.say(whose_weights(running, inputs.model_path))
        assert inputs.eval_factory is not None
        measure = partial(
            evaluate,
            RolloutRunner(inputs.eval_factory, journal, inputs.reward_function, config.rollout.max_retries, config.reward.deadline_s),
            inputs.eval_rows[: config.eval.max_tasks or None],
            slots=asyncio.Semaphore(config.rollout.max_concurrent_rollouts),
            seed=config.run.seed,
            state=state,
        )
        # An engine that was started again serves the same model folder: nothing has to be pushed.
        async with running.watched(partial(running.release, None)):
            sampled = await measure(label="eval", samples=config.eval.samples, temperature=config.eval.temperature)
            greedy = await measure(label="greedy", samples=1, temperature=0.0) if config.eval.greedy else None
        return Outcome(config.run_dir, evaluation=sampled, greedy=greedy)


def whose_weights(running: Services, asked: Path) -> str:
    """Only a learner pushes weights: an evaluation on running engines is of those that they hold, whatever the config names."""
    held = sorted({f"{engine.url}: {engine.info.weight_version or 'unknown'}" for engine in (running.engine, *running.others)})
    return f"scoring the weights that the running engine holds (version by its own account: {', '.join(held)}); {asked} is not pushed to it"


def _bind(running: Services, inputs: Inputs) -> None:
    lent = running.for_sessions()
    inputs.factory.bind(lent)
    if inputs.eval_factory is not None:
        inputs.eval_factory.bind(lent)


async def _warm_start(
    config: RunConfig, running: Services, inputs: Inputs, journal: Journal, state: RunState, scripts: list[Script]
) -> WarmStart:
    found = read_warm_start(warm_start_path(config, inputs.factory, inputs.model_path, inputs.rows, scripts))
    if found is None:
        found = await warm_up(config, running, inputs.factory, inputs.rows, journal, state, inputs.model_path, scripts)
    state.say(f"warm start: success {found.success:.2f} after {found.demonstrations} demonstrations ({found.path})")
    return found


@asynccontextmanager
async def opened(config: RunConfig, console: Console | None) -> AsyncIterator[tuple[RunState, Journal]]:
    """The run folder, its journal and the panel, for as long as the run lives.

    Raises HarnessRLError where a file of the run cannot be written, whichever it is.
    """
    state = RunState(config.run.name, config.run.steps)
    with own_files(config.run_dir), run_folder(config), Panel(state, console=console) as panel:
        journal = Journal(config.run_dir / "journal.sqlite")
        drawing = asyncio.create_task(panel.run())
        try:
            yield state, journal
        except BaseException:
            state.phase = "failed"
            raise
        finally:
            drawing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await drawing
            journal.close()


@asynccontextmanager
async def accounted(config: RunConfig, console: Console | None) -> AsyncIterator[tuple[RunState, Journal]]:
    """`opened`; however it ends, its accounts are written and shown."""
    async with opened(config, console) as (state, journal):
        try:
            yield state, journal
            state.phase = "done"
        except BaseException as error:
            state.phase = "stopped" if isinstance(error, asyncio.CancelledError) else "failed"
            raise
        finally:
            _close(config, journal, state, console or Console())


class _LogFile(logging.FileHandler):
    """A log that cannot be written (a full disk) hides no other error: the lines are lost, the run's own cause is told."""

    def handleError(self, record: logging.LogRecord) -> None:
        del record

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextmanager
def run_folder(config: RunConfig) -> Iterator[None]:
    """Make the run folder, hold its lock, send the log to logs/control.log.

    Raises UserError when it is in use, not writable or on a disk that is nearly full; a folder in use is left as it is.
    """
    folder = config.run_dir
    with ExitStack() as cleanup:
        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
            cleanup.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = shutil.disk_usage(folder).free
            if free < _FREE_BYTES:
                raise UserError(f"run folder {folder}: the disk has {free >> 20} MiB free, a run needs {_FREE_BYTES >> 20}; set run.dir")
            write_whole(folder / "config.toml", to_toml(config))
            handler = _LogFile(folder / "logs" / "control.log")
        except BlockingIOError:
            raise UserError(f"run folder {folder} is in use by another process; set run.name to another name") from None
        except OSError as error:
            raise UserError(f"run folder {folder} cannot be written: {error.strerror}; set run.dir to another place") from None
        cleanup.callback(handler.close)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        # Harbor's lines are in each rollout's own trial.log, requests in the logs of the servers.
        handler.addFilter(lambda record: not record.name.startswith(("harbor.", "httpx")))
        root = logging.getLogger()
        root.addHandler(handler)
        cleanup.callback(root.removeHandler, handler)
        root.setLevel(logging.INFO)
        yield


def resumed_config(run: Path, config: RunConfig | None, overrides: list[str] | None = None) -> RunConfig:
    """The config of a run that goes on in `run`: the folder's own, or `config` put there. Raises UserError where there is no run."""
    if not (run / "journal.sqlite").is_file():
        raise UserError(f"--resume: {run} is not the folder of a run (it has no journal.sqlite); name one below runs/")
    if config is None:
        config = load_config(run / "config.toml", overrides)
    config.run.dir, config.run.name = run.parent, run.name
    return config


def free_name(config: RunConfig) -> str:
    """The run's name, or the next free `name-2`, `name-3` when a finished run has it."""
    name, number = config.run.name, 1
    while (config.run.dir / name / "journal.sqlite").exists():
        number += 1
        name = f"{config.run.name}-{number}"
    return name


def run_until_signal(main: Callable[[], Coroutine[Any, Any, T]], grace_s: float) -> T:
    """`asyncio.run` that a SIGINT, SIGTERM or SIGHUP ends in order: the work is cancelled, everything is reclaimed, then KeyboardInterrupt.

    A second signal, or `grace_s` seconds, ends the process at once; children die with it by their death signal.
    """

    async def supervised() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(main())
        received: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            if received:
                os._exit(128 + number)
            received.append(number)
            loop.call_later(grace_s, os._exit, 128 + number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        try:
            return await task
        except asyncio.CancelledError:
            if received:
                raise KeyboardInterrupt from None
            raise
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    return asyncio.run(supervised())
