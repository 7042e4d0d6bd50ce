"""I-04: a task whose version control holds later commits is refused by name, wherever git keeps them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness_rl.tasks import quickstart
from harness_rl.tasks.history import Unreadable, hidden_commits, stores
from harness_rl.tasks.lint import lint
from harness_rl.tasks.load import list_tasks

ME = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@x", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@x", "HOME": "/nonexistent"}


def git(folder: Path, *arguments: str) -> str:
    environment = {"PATH": os.environ["PATH"], **ME}
    return subprocess.run(["git", *arguments], cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, text: str) -> str:
    (folder / "a.py").write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", text)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits, the second checked out."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "one")
    commit(folder, "two")
    return folder


def later_branch(folder: Path) -> None:
    git(folder, "checkout", "-qb", "fix")
    commit(folder, "the fix")
    git(folder, "checkout", "-q", "main")


def later_tag(folder: Path) -> None:
    later_branch(folder)
    git(folder, "tag", "v2", "fix")
    git(folder, "branch", "-qD", "fix")


def reflog_only(folder: Path) -> None:
    commit(folder, "the fix")
    git(folder, "reset", "-q", "--hard", "HEAD~1")


def dangling(folder: Path) -> None:
    reflog_only(folder)
    git(folder, "reflog", "expire", "--expire=now", "--all")


def packed(folder: Path) -> None:
    later_tag(folder)
    git(folder, "gc", "-q")


def stashed(folder: Path) -> None:
    (folder / "a.py").write_text("the fix")
    git(folder, "stash", "-q")


def fetched(folder: Path) -> None:
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    commit(other, "the fix")
    git(folder, "fetch", "-q", str(other), "main:refs/remotes/origin/main")
    shutil.rmtree(other)


WAYS = [later_branch, later_tag, reflog_only, dangling, packed, stashed, fetched]


@pytest.mark.parametrize("way", WAYS)
def test_i04_a_later_commit_is_found_wherever_it_is_kept(repository: Path, way: Callable[[Path], None]) -> None:
    assert hidden_commits(repository / ".git") == []
    way(repository)
    assert hidden_commits(repository / ".git")
    shown = set(git(repository, "rev-list", "HEAD").split())
    assert not shown & set(hidden_commits(repository / ".git"))


@pytest.fixture
def task(tmp_path: Path) -> Path:
    quickstart.generate(tmp_path / "tasks", train=len(quickstart.KINDS), heldout=len(quickstart.KINDS))
    return sorted((tmp_path / "tasks" / "train").iterdir())[0]


def test_i04_the_task_is_refused_with_the_cure_and_a_clean_one_is_not(task: Path, repository: Path) -> None:
    place = task / "environment" / "app"
    shutil.copytree(repository, place)
    assert lint(list_tasks(task)[0]) == []
    later_tag(place)
    (problem,) = lint(list_tasks(task)[0])
    assert problem.rule == "history" and "holds 1 commits that the checkout does not show" in problem.message
    assert "--single-branch" in problem.message


def test_i04_bare_stores_and_those_of_submodules_are_looked_at(tmp_path: Path, repository: Path) -> None:
    git(tmp_path, "clone", "-q", "--bare", str(repository), "inside/mirror.git")
    shutil.copytree(repository / ".git", tmp_path / "inside" / "app" / ".git" / "modules" / "lib")
    assert len(list(stores(tmp_path / "inside"))) == 2


def test_i04_a_store_that_cannot_be_read_is_a_finding_and_runs_nothing(task: Path, repository: Path) -> None:
    place = task / "environment" / "app"
    shutil.copytree(repository, place)
    ran = task / "ran"
    git(place, "config", "core.fsmonitor", f"touch {ran}")
    git(place, "config", "alias.cat-file", f"!touch {ran}")
    assert lint(list_tasks(task)[0]) == []
    (place / ".git" / "HEAD").write_text("ref: refs/heads/gone\n")
    with pytest.raises(Unreadable):
        hidden_commits(place / ".git")
    assert [problem.rule for problem in lint(list_tasks(task)[0])] == ["history"]
    assert not ran.exists()
