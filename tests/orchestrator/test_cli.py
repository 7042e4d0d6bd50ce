"""The command line as a person meets it: exit codes, one-line errors, and nothing slow before a mistake is found."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness_rl.cli import _load, main
from harness_rl.config import RunConfig
from harness_rl.configfile import load_config, resolve_config, to_toml
from harness_rl.errors import UserError
from harness_rl.orchestrator.main import free_name
from harness_rl.shortform import shorten
from harness_rl.trl.config import AsyncGRPOConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(f'[run]\ndir = "{tmp_path}/runs"\n[model]\nname = "{tmp_path}/no-model"\n')
    return file


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert error.startswith("harness-rl: ")
    return error


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("run.stesp=3", "did you mean run.steps?"),
        ("rnu.steps=3", "did you mean run?"),
        ("run.steps=many", "run.steps"),
        ("sandbox.kind=docker", "sandbox.kind"),
        ("rollout.num_generations=1", "rollout.num_generations"),
        ("nonsense", "section.key=value"),
        ("warmup.target_low=0.9", "warmup.target_low must be below"),
        ('learner.gpus="1-3"', "learner.gpus"),
        ("learner.context_parallel=2", "learner.processes = 1 is not a multiple of learner.context_parallel = 2"),
        ("sync.lora=adapter", "sync.lora = adapter: there is no adapter without learner.lora_rank; set it, or leave sync.lora out"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(config, capsys, setting, words):
    assert main(["train", str(config), "--set", setting]) == 2
    assert words in one_line(capsys)


def test_more_processes_than_gpus_are_one_line_and_exit_2(config, capsys):
    settings = ["--set", 'learner.gpus="1,2"', "--set", "learner.processes=3"]
    assert main(["train", str(config), *settings]) == 2
    assert "learner.gpus = 1,2 are fewer than learner.processes = 3" in one_line(capsys)


def test_a_missing_config_and_a_broken_one(tmp_path, capsys):
    assert main(["train", str(tmp_path / "none.toml")]) == 2
    assert "does not exist" in one_line(capsys)
    (tmp_path / "broken.toml").write_text("[run\n")
    assert main(["train", str(tmp_path / "broken.toml")]) == 2
    assert "cannot be read" in one_line(capsys)


def test_no_tasks_no_model_and_an_unknown_harness_are_the_users_mistakes(config, tmp_path, capsys):
    assert main(["train", str(config)]) == 2
    assert "tasks.train" in one_line(capsys)
    (tmp_path / "empty").mkdir()
    assert main(["train", str(config), "--set", f"tasks.train={tmp_path}/empty"]) == 2
    assert "no task" in one_line(capsys)
    assert main(["train", str(config), "--set", f"tasks.train={tmp_path}/empty", "--set", "harness.name=no-such-agent"]) == 2
    one_line(capsys)
    assert main(["agents", "build", "no-such-agent"]) == 2
    assert "mini-swe-agent" in one_line(capsys)
    assert main(["models", "fetch", "no-such-model"]) == 2
    assert "smollm2-135m" in one_line(capsys)
    assert main(["trace", str(tmp_path / "no-run")]) == 2
    one_line(capsys)


def test_dry_run_prints_a_config_that_reads_back_equal(config, capsys):
    assert main(["train", str(config), "--dry-run", "--set", "run.steps=7", "--set", "engine.extra_args=['--a', 'b']"]) == 0
    printed = resolve_config(tomllib.loads(capsys.readouterr().out), [], "printed")
    assert (printed.run.steps, printed.engine.extra_args) == (7, ["--a", "b"])


def test_the_quickstart_config_is_valid_and_its_short_form_only_smaller():
    whole = load_config(ROOT / "examples/configs/quickstart.toml")
    short = shorten(load_config(ROOT / "examples/configs/quickstart.toml", ["run.short=true"]))
    assert shorten(whole) == whole
    assert short.run.steps < whole.run.steps
    assert (short.learner, short.sync, short.sandbox, short.harness) == (whole.learner, whole.sync, whole.sandbox, whole.harness)


def test_a_second_run_takes_the_next_free_name(tmp_path):
    config = RunConfig.model_validate({"run": {"dir": tmp_path, "name": "a-eval"}})
    assert free_name(config) == "a-eval"
    for taken in ("a-eval", "a-eval-2"):
        (tmp_path / taken).mkdir()
        (tmp_path / taken / "journal.sqlite").touch()
    assert free_name(config) == "a-eval-3"
    options = SimpleNamespace(config=tmp_path / "c.toml", set=[])
    options.config.write_text(f'[run]\ndir = "{tmp_path}"\nname = "a"\n')
    assert _load(options, "-eval").run.name == "a-eval-3"


def test_the_flat_view_and_the_file_give_the_same_config(tmp_path):
    flat = AsyncGRPOConfig(output_dir="runs/a", max_steps=3, num_generations=4, epsilon=0.1, engine={"max_model_len": 512}).config
    assert (flat.run.name, flat.run.steps, flat.rollout.num_generations, flat.engine.max_model_len) == ("a", 3, 4, 512)
    assert flat.learner.epsilon_high == 0.1, "TRL: epsilon_high defaults to epsilon"
    file = tmp_path / "flat.toml"
    file.write_text(to_toml(flat))
    assert load_config(file) == flat
    with pytest.raises(UserError, match="did you mean 'num_generations'"):
        AsyncGRPOConfig(num_generation=4)


def test_resume_needs_the_folder_of_a_run_and_train_needs_one_or_a_config(tmp_path, capsys):
    assert main(["train"]) == 2
    assert "--resume RUN" in one_line(capsys)
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert f"{tmp_path} is not the folder of a run" in one_line(capsys)


def test_a_resumed_run_has_the_config_and_the_name_of_its_folder(config, tmp_path, capsys):
    folder = tmp_path / "elsewhere" / "moved"
    folder.mkdir(parents=True)
    (folder / "journal.sqlite").touch()
    (folder / "config.toml").write_text(to_toml(load_config(config, ["rollout.num_generations=5"])))
    assert main(["train", "--resume", str(folder), "--set", "run.steps=40", "--dry-run"]) == 0
    found = RunConfig.model_validate(tomllib.loads(capsys.readouterr().out))
    assert (found.run_dir, found.rollout.num_generations, found.run.steps) == (folder, 5, 40)
