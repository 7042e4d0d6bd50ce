"""The quickstart's tasks: reproducible, disjoint, complete; and verifiers that see the outcome, whatever the command."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from harness_rl.errors import UserError
from harness_rl.tasks import quickstart
from harness_rl.tasks.load import list_tasks, solution_commands


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    quickstart.generate(folder)
    return folder


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mode) for p in sorted(folder.rglob("*")) if p.is_file()}


def words_of(folder: Path) -> set[str]:
    text = " ".join(p.read_text() + " " + str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return set(re.findall(r"[a-z]+", text.lower())) & {*quickstart.TRAIN_WORDS, *quickstart.HELDOUT_WORDS}


def test_the_same_seed_writes_the_same_bytes(tasks: Path, tmp_path: Path) -> None:
    quickstart.generate(tmp_path)
    assert contents(tmp_path) == contents(tasks)
    quickstart.generate(tmp_path, seed=quickstart.SEED + 1)
    assert contents(tmp_path).keys() != contents(tasks).keys()


def test_generating_again_replaces_our_split_and_nothing_else(tmp_path: Path) -> None:
    quickstart.generate(tmp_path, train=14, heldout=7)
    quickstart.generate(tmp_path, train=9, heldout=7)
    assert len(list_tasks(tmp_path / "train")) == 9
    (tmp_path / "train" / "mine").mkdir()
    with pytest.raises(UserError, match="mine"):
        quickstart.generate(tmp_path)


def test_generating_again_mends_a_damaged_split_and_does_not_touch_a_whole_one(tmp_path: Path) -> None:
    quickstart.generate(tmp_path, train=7, heldout=7)
    before = contents(tmp_path)
    inodes = {path.stat().st_ino for path in tmp_path.rglob("*")}
    quickstart.generate(tmp_path, train=7, heldout=7)
    assert {path.stat().st_ino for path in tmp_path.rglob("*")} == inodes
    shutil.rmtree(next(iter((tmp_path / "train").iterdir())))
    quickstart.generate(tmp_path, train=7, heldout=7)
    assert contents(tmp_path) == before


def test_splits_are_large_enough_and_share_no_word(tasks: Path) -> None:
    train, heldout = list_tasks(tasks / "train"), list_tasks(tasks / "heldout")
    assert len(train) >= 48
    assert len(heldout) >= 20
    assert not {task.name for task in train} & {task.name for task in heldout}
    # Words that only the fixed text of every task uses (such as "line") are in neither list, so any shared word is a leak.
    assert not words_of(tasks / "train") & set(quickstart.HELDOUT_WORDS)
    assert not words_of(tasks / "heldout") & set(quickstart.TRAIN_WORDS)


def test_every_family_is_in_both_splits_and_evenly_in_any_beginning_of_a_list(tasks: Path) -> None:
    for split in ("train", "heldout"):
        listed = list_tasks(tasks / split)
        assert {task.metadata["family"] for task in listed} == {"write", "move", "count", "transform", "fix"}
        for count in (6, 16, 20):
            kinds = Counter(task.name.split("-")[1] for task in listed[:count])
            assert len(kinds) == 6
            assert max(kinds.values()) - min(kinds.values()) <= 1


def test_a_task_is_one_sentence_one_command_small_limits_and_no_network(tasks: Path) -> None:
    for task in list_tasks(tasks / "train") + list_tasks(tasks / "heldout"):
        assert task.instruction.count("\n") == 0
        assert len(task.instruction.split()) <= 12
        assert solution_commands(task).count("\n") == 0
        # In a JSON string and in the chat template the command stands as it is.
        assert not set(solution_commands(task)) & set("\\\"'")
        environment = tomllib.loads((task.path / "task.toml").read_text())["environment"]
        assert environment["network_mode"] == "no-network"
        assert environment["cpus"] == 1
        assert environment["memory_mb"] <= 512


def grade(task: Path, tmp_path: Path, command: str) -> str:
    """The reward after `command` ran in a copy of the task's files; /app, /tests and /logs are folders of this test."""
    app, logs = tmp_path / "app", tmp_path / "logs"
    app.mkdir()
    for source in (task / "environment").iterdir():
        (app / source.name).write_bytes(source.read_bytes())
    subprocess.run(["bash", "-c", command], cwd=app, check=False, capture_output=True, timeout=30)
    script = (task / "tests" / "test.sh").read_text()
    for inside, outside in (("/app", app), ("/tests", task / "tests"), ("/logs", logs)):
        script = script.replace(f"{inside}/", f"{outside}/")
    run = subprocess.run(["bash", "-c", script], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=30)
    assert run.stderr == "", "a verifier that prints errors may be taken for one that did not run"
    return (logs / "verifier" / "reward.txt").read_text().strip()


def task_of(tasks: Path, kind: str) -> Path:
    return next(path for path in sorted((tasks / "train").iterdir()) if path.name.split("-")[1] == kind)


KINDS = ("write", "move", "count", "uniq", "sort", "fix")


@pytest.mark.parametrize("kind", KINDS)
def test_solution_earns_1_and_nothing_earns_0(tasks: Path, tmp_path: Path, kind: str) -> None:
    task = task_of(tasks, kind)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert grade(task, tmp_path / "a", solution_commands(list_tasks(task)[0])) == "1"
    assert grade(task, tmp_path / "b", "true") == "0"


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_that_destroys_everything_earns_0_not_an_error(tasks: Path, tmp_path: Path, kind: str) -> None:
    assert grade(task_of(tasks, kind), tmp_path, 'rm -rf "$PWD"') == "0"


# {0}, {1} ... are the words of the task's folder name (number-kind-words).
CASES = [
    ("write", "TZ=Asia/Tokyo date -R > {0}.txt", "1"),
    ("write", "date +%F > {0}.txt", "1"),
    ("write", "echo date > {0}.txt", "0"),
    ("write", "date +%Y%m%d > {0}.txt", "1"),
    ("write", "echo 1 > {0}.txt", "0"),  # date(1) reads it as one o'clock today
    ("write", "date +%Y > {0}.txt", "0"),
    ("write", "date +%T > {0}.txt", "0"),
    ("write", "echo tomorrow noon > {0}.txt", "0"),
    ("write", "date -d 1999-12-31 > {0}.txt", "0"),
    ("write", "(date; date) > {0}.txt", "0"),
    ("write", "touch {0}.txt", "0"),
    ("write", "date > {0}", "0"),
    ("write", "date > x && ln -s x {0}.txt", "0"),
    ("move", "cat {0}.txt > {1}.txt && rm {0}.txt", "1"),
    ("move", "cp {0}.txt {1}.txt", "0"),
    ("move", "rm {0}.txt && touch {1}.txt", "0"),
    ("move", "mv {0}.txt x && ln -s x {1}.txt", "0"),
    ("count", "grep -c '' {0}.txt > {1}.txt", "1"),
    ("count", "wc -l < {0}.txt > {1}.txt", "1"),
    ("count", "wc {0}.txt > {1}.txt", "0"),
    ("count", "echo 99 {0}.txt > {1}.txt", "0"),
    ("count", "wc -w < {0}.txt | tr -d '\\n' > {1}.txt", "1"),
    ("count", "wc -c < {0}.txt > {1}.txt", "0"),
    ("uniq", "sort -u {0}.txt > {1}.txt", "1"),
    ("uniq", "cp {0}.txt {1}.txt", "0"),
    ("uniq", "uniq {0}.txt | head -n 1 > {1}.txt", "0"),
    ("sort", "cat {0}.txt | sort -o {1}.txt", "1"),
    ("sort", "cp {0}.txt {1}.txt", "0"),
    ("sort", "sort {0}.txt | paste -sd ' ' > {1}.txt", "0"),
    ("fix", "chmod 755 {0}.sh", "1"),
    ("fix", "printf '#!/bin/sh\\ncat {1}.txt\\n' > {0}.sh; chmod a+x {0}.sh", "1"),
    ("fix", "chmod -x {0}.sh", "0"),
    ("fix", "chmod +x {1}.txt", "0"),
    ("fix", "printf '#!/bin/sh\\necho %s' $(head -n 1 {1}.txt) > {0}.sh; chmod +x {0}.sh", "0"),
    ("fix", "echo 'cat {1}.txt; exit 3' > {0}.sh; chmod +x {0}.sh", "0"),
    ("fix", "chmod +x {0}.sh; mv {0}.sh x; ln -s x {0}.sh", "0"),
]


@pytest.mark.parametrize(("kind", "command", "reward"), CASES, ids=[f"{kind}: {command} = {reward}" for kind, command, reward in CASES])
def test_a_verifier_sees_the_outcome_only(tasks: Path, tmp_path: Path, kind: str, command: str, reward: str) -> None:
    task = task_of(tasks, kind)
    assert grade(task, tmp_path, command.format(*task.name.split("-")[2:])) == reward


def test_a_hanging_script_ends_and_earns_0(tasks: Path, tmp_path: Path) -> None:
    task = task_of(tasks, "fix")
    script = task.name.split("-")[2]
    assert grade(task, tmp_path, f"echo 'sleep 60' > {script}.sh; chmod +x {script}.sh") == "0"
