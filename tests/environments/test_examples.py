"""The examples' environments: their demonstrations win through the real loop, and their rewards are what they say."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from environments.bench import Bench

from harness_rl.tasks.quickstart import draft_split, task_files

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / "envs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def environment(module: ModuleType) -> Any:
    return next(kind for name, kind in vars(module).items() if name.endswith("Env"))


@pytest.mark.parametrize("name", ["echo", "catch"])
async def test_a_demonstration_has_the_full_reward(bench: Bench, name: str):
    module = load(name)
    factory = bench.factory(environment(module), rows=module.rows(), demonstrations=module.demonstration)
    for row in factory.prompt_rows()[::7]:
        session = await bench.play(factory, row, script=factory.demonstration(row))
        assert (session.verify().env_reward, session.outcome().tool_failure_count) == (1.0, 0), row


def test_echo_gives_credit_for_coming_close():
    game = load("echo").EchoEnv()
    game.reset(word="river")
    assert game.get_reward() == 0.0
    game.echo("rive")
    assert game.get_reward() == pytest.approx(2 * 4 / 9)
    with pytest.raises(ValueError, match="must be a text"):
        game.echo({"a": 1})
    game.echo("river")
    assert game.get_reward() == 1.0


@pytest.mark.parametrize(
    ("moves", "reward"),
    [([], 0.0), (["right"], 0.0), (["right", "right"], 1.0), (["right", "stay"], 0.5), (["left", "left"], 0.0), (["right"] * 3, 1.0)],
)
def test_catch_scores_where_the_ball_lands(moves: list[str], reward: float):
    game = load("catch").CatchEnv()
    assert game.reset(ball=3, paddle=1) == "ball 3 you 1"
    for number, direction in enumerate(moves):
        if number == 2:
            with pytest.raises(ValueError, match="The game is over"):
                game.move(direction)
        else:
            game.move(direction)
    assert game.get_reward() == reward


def write_task(folder: Path) -> None:
    [draft] = draft_split(["river", "stone", "cloud"], 1, "a")
    for name, text in task_files(draft, "task").items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_the_bash_loop_is_shown_a_tasks_solution_as_one_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("train_harbor_bash")
    write_task(tmp_path)
    [call, last] = example.demonstration({"task_path": str(tmp_path)})
    [bash] = call["tool_calls"]
    assert (bash["name"], last) == ("bash", {"content": "Done."})
    assert bash["arguments"]["command"] in (tmp_path / "solution" / "solve.sh").read_text().splitlines()


def test_flags_that_would_have_no_effect_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Its rows are the tasks of a folder."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("train_harbor_bash")
    for flag in ("--dataset-size", "--held-out"):
        with pytest.raises(SystemExit):
            example.parse([flag, "3"])
    write_task(tmp_path / "task")
    assert example.trainer(example.parse(["--cpu", "--tasks", str(tmp_path)])).config.sandbox.kind == "local"


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_says_what_it_needs(script: Path):
    """PEP 723: what `uv run` and `pipx run` install."""
    text, project = script.read_text(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    header = re.match(r"# /// script\n((?:# .*\n)+?)# ///\n", text)
    assert header is not None, f"{script.name} does not begin with its header"
    stated = tomllib.loads("".join(line.removeprefix("# ") for line in header[1].splitlines(keepends=True)))
    assert stated["requires-python"] == project["requires-python"]
    [ours] = [name for name in stated["dependencies"] if name.startswith(project["name"])]
    extra = ours.removeprefix(project["name"]).strip("[]")
    assert not extra or extra in project["optional-dependencies"]
    if "openenv_server" in text or "add_server" in text:
        assert extra == "openenv"
    if "HarborEnvironment" in text or "HarborSessionFactory" in text:
        assert extra == "harbor"


def test_the_rows_are_plain_data():
    for name in ("echo", "catch"):
        assert json.loads(json.dumps(load(name).rows())) == load(name).rows()
