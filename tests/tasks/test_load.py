"""`list_tasks`: what is a task, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness_rl.errors import UserError
from harness_rl.tasks.load import list_tasks, solution_commands


def make_task(folder: Path, instruction: str = "Do it.", config: str = '[metadata]\nfamily = "write"\n') -> Path:
    (folder / "solution").mkdir(parents=True)
    (folder / "task.toml").write_text(config)
    (folder / "instruction.md").write_text(instruction)
    (folder / "solution" / "solve.sh").write_text("#!/bin/bash\n# a comment\nset -eu\necho a > b\n\nmv b c\n")
    return folder


def test_tasks_come_sorted_with_instruction_and_metadata(tmp_path: Path) -> None:
    make_task(tmp_path / "b", "  Do b.\n\n")
    make_task(tmp_path / "a")
    (tmp_path / "notes").mkdir()
    (tmp_path / "README.md").write_text("no task")
    tasks = list_tasks(tmp_path)
    assert [task.name for task in tasks] == ["a", "b"]
    assert tasks[1].instruction == "Do b."
    assert tasks[1].metadata == {"family": "write"}
    assert tasks[1].path == (tmp_path / "b").resolve()


def test_a_path_may_name_one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_task(tmp_path / "one")
    assert [task.name for task in list_tasks(tmp_path / "one")] == ["one"]
    monkeypatch.chdir(tmp_path / "one")
    assert [task.name for task in list_tasks(Path())] == ["one"]


def test_the_instruction_of_a_multi_step_task_is_its_first_steps(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", config='[[steps]]\nname = "first"\n[[steps]]\nname = "second"\n')
    (task / "steps" / "first").mkdir(parents=True)
    (task / "steps" / "first" / "instruction.md").write_text("Begin.")
    assert list_tasks(tmp_path)[0].instruction == "Begin."


def test_solution_commands_leave_out_comments_and_shell_options(tmp_path: Path) -> None:
    make_task(tmp_path / "t")
    assert solution_commands(list_tasks(tmp_path)[0]) == "echo a > b\nmv b c"


def test_a_task_without_a_solution_is_named(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t")
    (task / "solution" / "solve.sh").unlink()
    with pytest.raises(UserError, match=r"t/solution/solve.sh is missing"):
        solution_commands(list_tasks(tmp_path)[0])


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        list_tasks(tmp_path / "nowhere")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        list_tasks(tmp_path / "file")


def test_a_folder_without_tasks_says_what_a_task_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no tasks; a task is a folder with task\.toml"):
        list_tasks(tmp_path)


def test_a_folder_of_splits_names_one(tmp_path: Path) -> None:
    make_task(tmp_path / "train" / "t")
    with pytest.raises(UserError, match=r"did you mean .*/train\?"):
        list_tasks(tmp_path)


@pytest.mark.parametrize(("name", "message"), [("instruction.md", r"instruction.md is missing"), ("task.toml", r"task.toml is missing")])
def test_a_half_written_task_is_named(tmp_path: Path, name: str, message: str) -> None:
    make_task(tmp_path / "sound")
    (make_task(tmp_path / "half") / name).unlink()
    with pytest.raises(UserError, match=message):
        list_tasks(tmp_path)


def test_an_empty_instruction_is_refused(tmp_path: Path) -> None:
    make_task(tmp_path / "t", instruction=" \n")
    with pytest.raises(UserError, match="is empty"):
        list_tasks(tmp_path)


def test_bad_toml_is_named(tmp_path: Path) -> None:
    make_task(tmp_path / "t", config="[metadata\n")
    with pytest.raises(UserError, match=r"t/task.toml is not valid TOML"):
        list_tasks(tmp_path)


def test_metadata_that_is_no_table_is_named(tmp_path: Path) -> None:
    make_task(tmp_path / "t", config="metadata = 3\n")
    with pytest.raises(UserError, match="metadata is not a table"):
        list_tasks(tmp_path)


def test_a_linked_task_is_refused_by_name(tmp_path: Path) -> None:
    make_task(tmp_path / "elsewhere" / "t")
    make_task(tmp_path / "set" / "sound")
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "elsewhere" / "t")
    with pytest.raises(UserError, match=r"set/linked is a symbolic link"):
        list_tasks(tmp_path / "set")


def test_a_hidden_task_is_refused_by_name(tmp_path: Path) -> None:
    make_task(tmp_path / ".hidden")
    make_task(tmp_path / "sound")
    with pytest.raises(UserError, match=r"\.hidden is a hidden folder"):
        list_tasks(tmp_path)
