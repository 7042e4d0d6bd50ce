"""`harness-rl tasks check PATH`: is every task solvable, and does its verifier notice when it is not solved?

A task passes when the lint finds nothing, its own solution (Harbor's oracle agent) earns the full reward, and doing nothing earns less.
Both are real trials in the real sandbox, so that a task accepted here meets nothing new in training.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from harness_rl.config import SandboxSection
from harness_rl.errors import UserError
from harness_rl.sandboxes.preflight import refuse_unless_able
from harness_rl.sessions.harbor import SANDBOXES, sandbox_limits
from harness_rl.tasks.lint import Problem, lint
from harness_rl.tasks.load import TaskRef, list_tasks

FULL_REWARD = 1.0


@dataclass
class TaskReport:
    """What was found about one task."""

    name: str
    problems: list[Problem] = field(default_factory=list)
    oracle: float | None = None
    """Reward of the task's own solution; None when it was not run or not scored."""
    nop: float | None = None
    """Reward of doing nothing."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class CheckSpec:
    """How tasks are checked."""

    trials: bool = True
    """False: lint only."""
    concurrency: int = 2
    sandbox: SandboxSection = field(default_factory=SandboxSection)
    """What a run's own section would be, by default the defaults."""
    reward_key: str = "reward"
    deadline_s: float = 600.0
    """Of one trial, its sandbox's start included."""


async def check_tasks(path: Path, spec: CheckSpec | None = None, on_report: Callable[[TaskReport], None] | None = None) -> list[TaskReport]:
    """Check all tasks at `path`; reports come in the order of their names, `on_report` sees each as it ends. Raises UserError."""
    spec = spec or CheckSpec()
    if spec.concurrency < 1:
        raise UserError(f"tasks check: concurrency = {spec.concurrency}; give at least 1")
    tasks = list_tasks(path)
    gate = asyncio.Semaphore(spec.concurrency)
    scratch = Path(tempfile.mkdtemp(prefix="harness-rl-check-"))

    async def one(task: TaskRef) -> TaskReport:
        async with gate:
            report = await _check(task, spec, scratch)
        if on_report is not None:
            on_report(report)
        return report

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(task), name=f"check {task.name}") for task in tasks]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [task.result() for task in running]


async def _check(task: TaskRef, spec: CheckSpec, scratch: Path) -> TaskReport:
    started = time.monotonic()
    report = TaskReport(task.name, lint(task))
    if report.ok and spec.trials:
        report.oracle, failure = await _trial(task, "oracle", spec, scratch)
        if failure:
            report.problems.append(Problem("oracle_failed", failure))
        elif report.oracle is not None and report.oracle < FULL_REWARD:
            report.problems.append(Problem("oracle_failed", f"its own solution earns {report.oracle:g}; mend solution or verifier"))
    if report.ok and spec.trials:
        report.nop, failure = await _trial(task, "nop", spec, scratch)
        if failure:
            report.problems.append(Problem("nop_failed", failure))
        elif report.nop is not None and report.nop >= FULL_REWARD:
            report.problems.append(Problem("nop_passed", f"doing nothing earns {report.nop:g}; the verifier measures nothing"))
    report.seconds = time.monotonic() - started
    return report


async def _trial(task: TaskRef, agent: str, spec: CheckSpec, scratch: Path) -> tuple[float | None, str]:
    """(reward, "") of one trial, or (None, why there is none)."""
    from harbor.models.task.verifier_mode import task_has_any_shared_verifier
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.hooks import TrialEvent
    from harbor.trial.trial import Trial

    from harness_rl.sandboxes.hooks import sandbox_hooks

    config = TrialConfig(
        task=TaskConfig(path=task.path),
        trial_name=f"check-{agent}-{task.name}",
        trials_dir=scratch,
        agent=AgentConfig(name=agent),
        environment=EnvironmentConfig(
            import_path=SANDBOXES[spec.sandbox.kind], kwargs={"limits": sandbox_limits(spec.sandbox)}, delete=True
        ),
    )
    replaced: list[str] = []
    try:
        async with asyncio.timeout(spec.deadline_s):
            with sandbox_hooks() as hooks:
                trial = await Trial.create(config)

            async def agent_ended(_: object) -> None:
                left = await hooks.sandbox.before_verification(keep_services=bool(task.metadata.get("keep_services", False)))
                replaced.extend(left.replaced)

            trial.add_hook(TrialEvent.AGENT_END, agent_ended)
            result = await trial.run()
    except TimeoutError:
        return None, f"{agent}: the trial had not ended after {spec.deadline_s:g} s"
    except (OSError, ValueError, RuntimeError) as error:
        return None, f"{agent}: the trial did not start: {type(error).__name__}: {error}"
    if result.exception_info is not None:
        lines = str(result.exception_info.exception_message).strip().splitlines()
        return None, f"{agent}: {result.exception_info.exception_type}: {lines[0] if lines else 'no message'}"
    rewards = (result.verifier_result.rewards if result.verifier_result is not None else None) or {}
    # Harbor before 0.24 has no judgement of its own.
    if not getattr(result, "reward_valid", True) or spec.reward_key not in rewards:
        return None, f"{agent}: the verifier left no number named {spec.reward_key!r} (it left {', '.join(rewards) or 'none'})"
    if replaced and task_has_any_shared_verifier(trial.task.config):
        return None, (
            f"{agent}: it replaces {', '.join(replaced)}, which verifiers run, so that a rollout which does the same earns nothing; "
            'set [verifier] environment_mode = "separate", or reward.tampered = "keep" in the run'
        )
    return float(rewards[spec.reward_key]), ""


def check_command(path: Path, *, concurrency: int, as_json: bool) -> int:
    """Check, print a table or JSON, and return the exit code: 2 when a task is refused. Raises UserError, also for a machine that cannot
    run the trials: that is no fault of a task."""
    refuse_unless_able()
    console, errors = Console(soft_wrap=True), Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task("checking tasks", total=len(list_tasks(path)))
        reports = asyncio.run(check_tasks(path, CheckSpec(concurrency=concurrency), lambda report: progress.advance(bar)))
    if as_json:
        console.print(to_json(reports), markup=False, highlight=False)
    else:
        print_table(reports, console)
    return 0 if all(report.ok for report in reports) else 2


def to_json(reports: list[TaskReport]) -> str:
    """One JSON object: `ok`, and of each task name, ok, problems, rewards, seconds."""
    tasks = [{**asdict(report), "ok": report.ok} for report in reports]
    return json.dumps({"ok": all(report.ok for report in reports), "tasks": tasks}, indent=2)


def print_table(reports: list[TaskReport], console: Console) -> None:
    """A row per task and a last line with the count; problems are printed in full below the table."""
    table = Table(box=None, header_style="bold")
    for title in ("task", "oracle", "nop", "seconds", "verdict"):
        table.add_column(title, justify="right" if title in ("oracle", "nop", "seconds") else "left")
    for report in reports:
        verdict = "ok" if report.ok else ", ".join(sorted({problem.rule for problem in report.problems}))
        table.add_row(report.name, _number(report.oracle), _number(report.nop), f"{report.seconds:.1f}", verdict)
    console.print(table)
    for report in reports:
        for problem in report.problems:
            console.print(f"{report.name}: {problem}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{sum(report.ok for report in reports)} of {len(reports)} tasks ok", highlight=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
