"""What the local sandbox cannot give a task, found by reading it: the feature is named, and nothing is started.

A task is refused here rather than run without something it asks for: a task that cannot be solved trains the model on noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness_rl.tasks.history import Unreadable, hidden_commits, stores
from harness_rl.tasks.load import SOLUTION, TaskRef

TEST = "tests/test.sh"
HANDED_OVER = "/logs/artifacts"
NO_SOLUTION = "no_solution"


@dataclass(frozen=True)
class Problem:
    """Why a task is refused."""

    rule: str
    """A short fixed name; scripts may match on it."""
    message: str
    """What is wrong, where, and what to do."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


def lint(task: TaskRef) -> list[Problem]:
    """All problems of one task, worst first; empty when the local sandbox can run it."""
    config, problem = _parse(task)
    if problem is not None:
        return [problem]
    parts = (
        _files(task, bool(config.steps)),
        _environment(task, config),
        _artifacts(task, config),
        _definition(task, config),
        _history(task),
    )
    return [problem for part in parts for problem in part]


def _parse(task: TaskRef) -> tuple[Any, Problem | None]:
    from harbor.models.task.config import TaskConfig
    from pydantic import ValidationError

    path = task.path / "task.toml"
    try:
        return TaskConfig.model_validate_toml(path.read_text(encoding="utf-8")), None
    except ValidationError as error:
        mistake = error.errors()[0]
        where = ".".join(str(part) for part in mistake["loc"]) or "the file"
        return None, Problem("schema", f"{path}: {where}: {mistake['msg']}")
    except (OSError, ValueError) as error:
        return None, Problem("schema", f"{path}: {error}")


def _files(task: TaskRef, has_steps: bool) -> Iterator[Problem]:
    for path in sorted(task.path.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(task.path):
            yield Problem("link", f"{path} is a link that leaves the task's folder; put the file itself there")
    if has_steps:
        return
    if not (task.path / TEST).is_file():
        yield Problem("no_test", f"{task.path / TEST} is missing; write a verifier that leaves a number in /logs/verifier/reward.txt")
    if not (task.path / SOLUTION).is_file():
        yield Problem(NO_SOLUTION, f"{task.path / SOLUTION} is missing; without it nothing shows that the task can be solved")


def _environment(task: TaskRef, config: Any) -> Iterator[Problem]:
    environment, where = config.environment, f"{task.path / 'task.toml'} [environment]"
    if environment.gpus:
        yield Problem("gpus", f"{where}: gpus = {environment.gpus}; the local sandbox has none")
    if environment.tpu is not None:
        yield Problem("tpu", f"{where}: tpu; the local sandbox has none")
    if _word(environment.os) == "windows":
        yield Problem("windows", f'{where}: os = "windows"; the local sandbox runs Linux')
    if environment.mcp_servers:
        yield Problem("mcp", f"{where}: mcp_servers; the local sandbox reaches no server")
    if environment.cpus is not None and environment.cpus <= 0:
        yield Problem("cpus", f"{where}: cpus = {environment.cpus}; give a positive number or none")
    for section, policy in (("environment", environment), ("agent", config.agent), ("verifier", config.verifier)):
        # A list of hosts is a need. "public" is Harbor's default and says nothing about need: there the oracle's trial decides.
        if policy.allowed_hosts:
            hosts = ", ".join(policy.allowed_hosts)
            yield Problem("network", f"{task.path / 'task.toml'} [{section}]: needs the hosts {hosts}; the local sandbox has no network")


def _artifacts(task: TaskRef, config: Any) -> Iterator[Problem]:
    """A separate verifier sees what is declared, and what lies in the folder that is always handed over."""
    from harbor.models.task.config import VerifierEnvironmentMode
    from harbor.models.task.verifier_mode import resolve_step_verifier_mode, resolve_task_verifier_mode

    modes = [(step, resolve_step_verifier_mode(config, step)) for step in config.steps or []] or [
        (None, resolve_task_verifier_mode(config))
    ]
    for step, mode in modes:
        declared = config.artifacts or (step is not None and step.artifacts)
        if mode != VerifierEnvironmentMode.SEPARATE or declared or _speaks_of(task, HANDED_OVER):
            continue
        where = f"{task.path / 'task.toml'}{f' step {step.name}' if step is not None else ''}"
        yield Problem(
            "artifacts", f"{where}: a separate verifier, but no artifacts: it sees nothing of the work; list its files in artifacts"
        )


def _speaks_of(task: TaskRef, words: str) -> bool:
    """Whether a text that the task gives its agents, or its solution, holds some words."""
    texts = [*task.path.rglob("instruction.md"), *task.path.rglob("solve.sh")]
    return any(words in path.read_text(encoding="utf-8", errors="replace") for path in texts if path.is_file())


def _definition(task: TaskRef, config: Any) -> Iterator[Problem]:
    from harness_rl.sandboxes.errors import SandboxBuildFailedError
    from harness_rl.sandboxes.images import check_definition

    folder, image = task.path / "environment", config.environment.docker_image
    if image is None and not (folder / "Dockerfile").is_file():
        yield Problem("no_environment", f"{task.path}: neither environment/Dockerfile nor [environment] docker_image; name an image")
    try:
        check_definition(folder, image)
    except SandboxBuildFailedError as error:
        yield Problem("definition", str(error))


def _history(task: TaskRef) -> Iterator[Problem]:
    for store in stores(task.path / "environment"):
        try:
            hidden = hidden_commits(store)
        except Unreadable as error:
            yield Problem("history", f"{store} cannot be searched for later commits ({error}); repair it, or leave it out")
            continue
        if hidden:
            cure = "keep the checked-out history alone (git clone --no-local --single-branch --no-tags)"
            yield Problem("history", f"{store} holds {len(hidden)} commits that the checkout does not show, {hidden[0][:12]} first; {cure}")


def _word(value: Any) -> str:
    """An enum of Harbor's, or None, as its plain word."""
    return str(getattr(value, "value", value))
