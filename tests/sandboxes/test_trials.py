"""Real Harbor trials in the sandbox: what the verifier may trust, what tasks may ask for."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("HARBOR_TELEMETRY", "off")

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.hooks import TrialEvent
from harbor.trial.trial import Trial

from harness_rl.sandboxes.bubblewrap import Verification
from harness_rl.sandboxes.errors import SandboxBuildFailedError
from harness_rl.sandboxes.hooks import sandbox_hooks
from harness_rl.sandboxes.reaper import audit

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

VERIFY = '#!/bin/bash\nif [ "$(cat /app/hello.txt)" = hello ]; then r=1; else r=0; fi\necho $r > /logs/verifier/reward.txt\n'
TOML = """
version = "1.0"
[agent]
timeout_sec = {timeout}
{agent}
[verifier]
timeout_sec = 60.0
{verifier}
[environment]
build_timeout_sec = 300.0
cpus = 1
memory_mb = 512
storage_mb = 128
network_mode = "no-network"
{environment}
"""
Make = Callable[..., Path]


class ShellAgent(BaseAgent):
    """Runs one command, as a scripted agent would."""

    def __init__(self, logs_dir: Path, *args: Any, command: str = "true", **kwargs: Any) -> None:
        super().__init__(logs_dir, *args, **kwargs)
        self._command = command

    @staticmethod
    def name() -> str:
        return "shell"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        return

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await environment.exec(self._command)


@pytest.fixture
def make_task(rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    from harness_rl.sandboxes import images
    from harness_rl.sandboxes import rootfs as rootfs_module

    monkeypatch.setattr(images, "ensure_rootfs", lambda: rootfs)
    assert rootfs_module.rootfs_path() == rootfs
    monkeypatch.setenv("HARNESS_RL_CACHE", str(tmp_path / "cache"))

    def make(
        *,
        environment: str = 'docker_image = "debian:bookworm-slim"\nworkdir = "/app"',
        agent: str = "",
        verifier: str = "",
        timeout: float = 60.0,
        files: dict[str, str] | None = None,
        test: str = VERIFY,
    ) -> Path:
        task = tmp_path / "task"
        content = {
            "task.toml": TOML.format(environment=environment, agent=agent, verifier=verifier, timeout=timeout),
            "instruction.md": "Write the word hello into hello.txt.\n",
            "tests/test.sh": test,
            "solution/solve.sh": "#!/bin/bash\necho hello > hello.txt\n",
            **(files or {}),
        }
        for name, text in content.items():
            (task / name).parent.mkdir(parents=True, exist_ok=True)
            (task / name).write_text(text)
        (task / "environment").mkdir(exist_ok=True)
        return task

    return make


async def run(task: Path, agent: AgentConfig | str, before: list[Verification] | None = None, **environment: Any) -> TrialResult:
    config = TrialConfig(
        task=TaskConfig(path=task),
        trials_dir=task.parent / "trials",
        agent=AgentConfig(name=agent) if isinstance(agent, str) else agent,
        environment=EnvironmentConfig(import_path="harness_rl.sandboxes.bubblewrap:BubblewrapEnvironment", kwargs=environment),
    )
    with sandbox_hooks() as hooks:
        trial = await Trial.create(config)

    async def take_over(_event: Any) -> None:
        assert before is not None
        before.append(await hooks.sandbox.before_verification())

    if before is not None:
        trial.add_hook(TrialEvent.AGENT_END, take_over)
    result = await trial.run()
    assert audit().total == 0, str(audit())
    return result


def scripted(command: str) -> AgentConfig:
    return AgentConfig(import_path="test_trials:ShellAgent", kwargs={"command": command})


def rewards(result: TrialResult) -> dict[str, float]:
    assert result.exception_info is None, result.exception_info
    assert result.verifier_result is not None and result.verifier_result.rewards is not None
    return dict(result.verifier_result.rewards)


async def test_oracle_passes_and_nop_fails(make_task: Make) -> None:
    task = make_task()
    assert rewards(await run(task, "oracle")) == {"reward": 1.0}
    assert rewards(await run(task, "nop")) == {"reward": 0.0}


async def test_many_trials_at_once(make_task: Make) -> None:
    task = make_task()
    results = await asyncio.gather(*(_trial(task) for _ in range(8)))
    assert results == [1.0] * 8
    assert audit().total == 0


async def _trial(task: Path) -> float:
    config = TrialConfig(
        task=TaskConfig(path=task), trials_dir=task.parent / "trials", agent=AgentConfig(name="oracle"),
        environment=EnvironmentConfig(import_path="harness_rl.sandboxes.bubblewrap:BubblewrapEnvironment"),
    )  # fmt: skip
    return rewards(await (await Trial.create(config)).run())["reward"]


async def test_i01_planted_rewards_are_removed_and_reported(make_task: Make) -> None:
    task = make_task(test="#!/bin/bash\necho 0 > /logs/verifier/reward.txt\n")
    plant = "echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt; "
    plant += "echo x > /tests/conftest.py; cp /bin/true /bin/rm"
    found: list[Verification] = []
    result = await run(task, scripted(plant), found)
    assert rewards(result) == {"reward": 0.0}
    assert {"/logs/verifier/reward.json", "/logs/verifier/reward.txt", "/tests/conftest.py"} == set(found[0].planted)
    assert found[0].replaced == ["/usr/bin/rm"] and found[0].tampered


async def test_i02_a_loop_that_rewrites_the_verdict_does_not_survive(make_task: Make) -> None:
    task = make_task(test="#!/bin/bash\necho 0 > /logs/verifier/reward.txt\nsleep 0.5\n")
    loop = "while :; do echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json; sleep 0.02; done"
    found: list[Verification] = []
    result = await run(task, scripted(f"(setsid nohup bash -c {json.dumps(loop)} >/dev/null 2>&1 &); exec -a sshd sleep 0.2"), found)
    assert rewards(result) == {"reward": 0.0} and found[0].killed >= 1


async def test_agent_time_out_is_graded_and_leaves_nothing(make_task: Make) -> None:
    task = make_task(timeout=1.0)
    result = await run(task, scripted("echo hello > hello.txt; setsid sleep 6543.5 & sleep 6543.5"))
    assert result.exception_info is not None and result.exception_info.exception_type == "AgentTimeoutError"
    assert result.verifier_result is not None and result.verifier_result.rewards == {"reward": 1.0}


async def test_dockerfile_layer_is_built_once(make_task: Make) -> None:
    dockerfile = "FROM debian:bookworm-slim\nENV GREETING=hello\nWORKDIR /app\nCOPY data/ seed/\n"
    dockerfile += "RUN cp seed/word.txt copied.txt && ln -s /app /link\n"
    task = make_task(environment="", files={"environment/Dockerfile": dockerfile, "environment/data/word.txt": "hello\n"})
    task_solution = task / "solution" / "solve.sh"
    task_solution.write_text(
        '#!/bin/bash\n[ "$(pwd)" = /app ] && [ "$GREETING" = "$(cat /link/copied.txt)" ] && cp seed/word.txt hello.txt\n'
    )
    assert rewards(await run(task, "oracle")) == {"reward": 1.0}
    layers = task.parent / "cache" / "layers"
    (layer,) = [path for path in layers.iterdir() if not path.name.startswith(".")]
    built = layer.stat().st_mtime_ns
    assert rewards(await run(task, "oracle")) == {"reward": 1.0} and layer.stat().st_mtime_ns == built
    assert not (layer / "run" / "host").exists() and not (layer / "logs").exists()
    (task / "environment" / "data" / "word.txt").write_text("other\n")
    assert rewards(await run(task, "oracle")) == {"reward": 0.0}


async def test_a_failing_build_is_an_infrastructure_failure(make_task: Make) -> None:
    task = make_task(environment="", files={"environment/Dockerfile": "FROM debian:bookworm-slim\nRUN echo the reason >&2 && false\n"})
    result = await run(task, "oracle")
    assert result.exception_info is not None and result.exception_info.exception_type == "SandboxBuildFailedError"
    assert "the reason" in result.exception_info.exception_message and not result.reward_valid


async def test_unsupported_tasks_are_refused_by_name(make_task: Make) -> None:
    task = make_task(environment="", files={"environment/Dockerfile": "FROM ubuntu:24.04\n"})
    with pytest.raises(SandboxBuildFailedError, match="unknown base image"):
        await run(task, "oracle")
    task = make_task(environment='docker_image = "debian:bookworm"\nnetwork_mode = "allowlist"\nallowed_hosts = ["example.org"]')
    (task / "environment" / "Dockerfile").unlink()
    (task / "task.toml").write_text((task / "task.toml").read_text().replace('network_mode = "no-network"\n', ""))
    with pytest.raises(SandboxBuildFailedError, match=r"may reach example\.org"):
        await run(task, "oracle")


async def test_agent_and_verifier_users(make_task: Make) -> None:
    dockerfile = "FROM debian:bookworm-slim\nRUN useradd -m agent && mkdir /app && chown agent /app\nWORKDIR /app\n"
    task = make_task(environment="", agent='user = "agent"', files={"environment/Dockerfile": dockerfile})
    (task / "tests" / "test.sh").write_text(VERIFY.replace("if [", 'if [ "$(stat -c %U /app/hello.txt)" = agent ] && ['))
    assert rewards(await run(task, "oracle")) == {"reward": 1.0}


async def test_separate_verifier_sees_only_artifacts(make_task: Make) -> None:
    test = "#!/bin/bash\ntest -e /app/left && echo 0 > /logs/verifier/reward.txt || cp /logs/artifacts/score /logs/verifier/reward.txt\n"
    task = make_task(verifier='environment_mode = "separate"', test=test)
    assert rewards(await run(task, scripted("touch /app/left; echo 0.5 > /logs/artifacts/score"))) == {"reward": 0.5}
