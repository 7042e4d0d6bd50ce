"""`tasks check`: what the lint refuses by name, and (as root) real oracle and nop trials in the real sandbox."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from harness_rl.errors import UserError
from harness_rl.sessions.harbor import SANDBOXES
from harness_rl.tasks import quickstart
from harness_rl.tasks.check import CheckSpec, TaskReport, check_command, check_tasks, print_table, to_json
from harness_rl.tasks.lint import Problem, lint
from harness_rl.tasks.load import list_tasks

LINT = CheckSpec(trials=False)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """One sound task of every kind; the first one's folder."""
    quickstart.generate(tmp_path, train=len(quickstart.KINDS), heldout=len(quickstart.KINDS))
    return next(path for path in sorted((tmp_path / "train").iterdir()) if "-write-" in path.name)


def rules(task: Path) -> list[str]:
    return [problem.rule for problem in lint(list_tasks(task)[0])]


def replace(task: Path, old: str, new: str) -> None:
    path = task / "task.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def dockerfile(task: Path, text: str) -> None:
    (task / "environment" / "Dockerfile").write_text(text)


async def test_the_quickstart_has_no_problems(task: Path) -> None:
    for split in ("train", "heldout"):
        for report in await check_tasks(task.parents[1] / split, LINT):
            assert report.problems == []
            assert report.ok


def test_a_separate_verifier_needs_declared_artifacts(task: Path) -> None:
    replace(task, "[verifier]", '[verifier]\nenvironment_mode = "separate"')
    assert rules(task) == ["artifacts"]
    document = (task / "task.toml").read_text()
    (task / "task.toml").write_text(f'artifacts = ["/app/hello.txt"]\n{document}')
    assert rules(task) == []
    (task / "task.toml").write_text(document)
    (task / "instruction.md").write_text("Put your answer into /logs/artifacts/answer.")
    assert rules(task) == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("cpus = 1", "cpus = 1\ngpus = 1", "gpus"),
        ("cpus = 1", 'cpus = 1\nos = "windows"', "windows"),
        ("cpus = 1", 'cpus = "many"', "schema"),
        ('network_mode = "no-network"', 'network_mode = "allowlist"\nallowed_hosts = ["pypi.org"]', "network"),
        ("[agent]\n", '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["pypi.org"]\n', "network"),
        ("debian:bookworm-slim", "nvidia/cuda:12", "definition"),
        ('docker_image = "debian:bookworm-slim"\n', "", "no_environment"),
        ("cpus = 1", 'cpus = 1\n[[environment.mcp_servers]]\nname = "x"\nurl = "http://x/"', "mcp"),
    ],
)
def test_what_the_sandbox_cannot_give_is_named(task: Path, old: str, new: str, rule: str) -> None:
    replace(task, old, new)
    assert rule in rules(task)


@pytest.mark.parametrize("line", ["", 'network_mode = "public"\n'])
def test_a_task_that_names_no_hosts_is_left_to_its_oracle(task: Path, line: str) -> None:
    replace(task, 'network_mode = "no-network"\n', line)
    assert rules(task) == []


@pytest.mark.parametrize("name", ["docker-compose.yaml", "docker-compose.yml"])
def test_compose_is_refused(task: Path, name: str) -> None:
    (task / "environment" / name).write_text("services: {}\n")
    assert "definition" in rules(task)


def test_a_supported_dockerfile_is_accepted(task: Path) -> None:
    dockerfile(task, "# base\nFROM debian:bookworm-slim\nWORKDIR /app\nENV A=1\nRUN echo a && \\\n  # why\n  echo b\nCOPY . /app\n")
    assert rules(task) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM debian:bookworm-slim\nRUN true\nEXPOSE 80\n", ":3: EXPOSE"),
        ("FROM nvidia/cuda:12\n", "nvidia/cuda:12"),
        ("FROM debian:bookworm-slim\nCOPY --from=a /x /x\n", ":2: COPY"),
    ],
)
def test_an_unsupported_dockerfile_is_refused_with_its_line(task: Path, text: str, words: str) -> None:
    dockerfile(task, text)
    problems = lint(list_tasks(task)[0])
    assert [problem.rule for problem in problems] == ["definition"]
    assert words in problems[0].message


@pytest.mark.parametrize(("name", "rule"), [("tests/test.sh", "no_test"), ("solution/solve.sh", "no_solution")])
def test_a_missing_script_is_named(task: Path, name: str, rule: str) -> None:
    (task / name).unlink()
    assert rules(task) == [rule]


def test_a_link_that_leaves_the_task_is_refused(task: Path) -> None:
    (task / "environment" / "passwd").symlink_to("/etc/passwd")
    assert "link" in rules(task)


async def test_a_refused_task_is_not_run_and_a_bad_concurrency_is_the_users_mistake(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SANDBOXES, "local", "nowhere:Nothing")
    replace(task, "cpus = 1", "cpus = 1\ngpus = 1")
    reports = await check_tasks(task)
    assert [problem.rule for problem in reports[0].problems] == ["gpus"]
    with pytest.raises(UserError, match="concurrency = 0"):
        await check_tasks(task, CheckSpec(concurrency=0))


async def test_a_sandbox_that_cannot_start_is_a_finding_not_a_crash(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SANDBOXES, "local", "harness_rl.errors:NoSuchClass")
    reports = await check_tasks(task)
    assert [problem.rule for problem in reports[0].problems] == ["oracle_failed"]
    assert reports[0].oracle is None


def test_reports_as_json_and_as_a_table() -> None:
    reports = [TaskReport("a", [], 1.0, 0.0, 1.5), TaskReport("b", [Problem("nop_passed", "doing nothing earns 1")], 1.0, 1.0, 2.0)]
    document = json.loads(to_json(reports))
    assert document["ok"] is False
    assert document["tasks"][1] == {
        "name": "b",
        "problems": [{"rule": "nop_passed", "message": "doing nothing earns 1"}],
        "oracle": 1.0,
        "nop": 1.0,
        "seconds": 2.0,
        "ok": False,
    }
    output = io.StringIO()
    print_table(reports, Console(file=output, width=100))
    assert "b: nop_passed: doing nothing earns 1" in output.getvalue()
    assert "1 of 2 tasks ok" in output.getvalue()


def test_the_command_exits_with_2_when_a_task_is_refused(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(task, "cpus = 1", "cpus = 1\ngpus = 1")
    assert check_command(task, concurrency=1, as_json=False) == 2
    assert "gpus = 1; the local sandbox has none" in capsys.readouterr().out
    assert check_command(task, concurrency=1, as_json=True) == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False


Edit = Callable[[Path], None]


def _break_solution(task: Path) -> None:
    (task / "solution" / "solve.sh").write_text("#!/bin/bash\ntrue\n")


def _break_verifier(task: Path) -> None:
    (task / "tests" / "test.sh").write_text("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")


def _silence_verifier(task: Path) -> None:
    (task / "tests" / "test.sh").write_text("#!/bin/bash\ntrue\n")


def _replace_a_tool(task: Path) -> None:
    solution = task / "solution" / "solve.sh"
    solution.write_text(solution.read_text() + "\ncp /bin/cat /usr/local/bin/cat\n")


@pytest.mark.root
async def test_real_oracle_earns_1_and_nop_0_in_every_family(task: Path) -> None:
    reports = await check_tasks(task.parent)
    assert {(report.oracle, report.nop) for report in reports} == {(1.0, 0.0)}, to_json(reports)


@pytest.mark.root
@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (_break_solution, "oracle_failed"),
        (_break_verifier, "nop_passed"),
        (_silence_verifier, "oracle_failed"),
        (_replace_a_tool, "oracle_failed"),
    ],
)
async def test_an_unsound_task_is_refused(task: Path, edit: Edit, rule: str) -> None:
    for other in task.parent.iterdir():
        if other != task:
            shutil.rmtree(other)
    edit(task)
    reports = await check_tasks(task.parent)
    assert [problem.rule for problem in reports[0].problems] == [rule], to_json(reports)
