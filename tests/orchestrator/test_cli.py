"""The command line as a person meets it: exit codes, one-line errors, and nothing slow before a mistake is found."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tomllib
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness_rl.cli import _load, main
from harness_rl.config import RunConfig
from harness_rl.configfile import load_config, resolve_config, to_toml
from harness_rl.engines import vllm
from harness_rl.engines.probe import EngineInfo
from harness_rl.errors import UserError
from harness_rl.orchestrator import services
from harness_rl.orchestrator.main import free_name, run_folder
from harness_rl.sandboxes import preflight
from harness_rl.shortform import shorten
from harness_rl.tasks import quickstart
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


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A config with which a run would start: tasks, and a folder that looks like a model's."""
    pytest.importorskip("harbor")
    quickstart.generate(tmp_path / "tasks", train=6, heldout=6)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    file = tmp_path / "whole.toml"
    file.write_text(
        f'[run]\ndir = "{tmp_path}/runs"\nname = "a"\n[model]\nname = "{model}"\n[tasks]\ntrain = "{tmp_path}/tasks/train"\n'
        f'[engine]\npython = "{sys.executable}"\n'
    )
    return file


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cpus = 1", "cpus = 1\ngpus = 1", "gpus = 1; the local sandbox has none"),
        ('network_mode = "no-network"', 'network_mode = "allowlist"\nallowed_hosts = ["pypi.org"]', "needs the hosts pypi.org"),
    ],
)
@pytest.mark.parametrize("command", ["train", "eval", "warmup"])
def test_a_task_that_the_sandbox_cannot_run_is_refused_by_its_feature(whole, tmp_path, capsys, command, old, new, words):
    refused = sorted((tmp_path / "tasks" / "train").iterdir())[1]
    text = (refused / "task.toml").read_text()
    assert old in text
    (refused / "task.toml").write_text(text.replace(old, new))
    assert main([command, str(whole)]) == 2
    line = one_line(capsys)
    assert words in line and refused.name in line
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_training_needs_no_solution_and_refused_tasks_are_counted(whole, tmp_path, capsys):
    tasks = sorted((tmp_path / "tasks" / "train").iterdir())
    for task in tasks:
        shutil.rmtree(task / "solution")
    for task in tasks[:2]:
        (task / "environment" / "docker-compose.yaml").write_text("services: {}\n")
        (task / "environment" / "Dockerfile").write_text("FROM no-such-image:9\n")
    assert main(["train", str(whole)]) == 2
    line = one_line(capsys)
    assert tasks[0].name in line and "2 of 6 tasks are refused" in line and "solution" not in line


CANNOT = {
    "root": ("geteuid", lambda: 1000, "sandbox: root: user id 1000 (run as root"),
    "kernel": ("release", lambda: "4.19.0-9", "sandbox: kernel: 4.19.0-9 (needs Linux 5.11 or later)"),
}


@pytest.mark.parametrize("command", ["train", "agents build", "tasks check"])
@pytest.mark.parametrize("missing", CANNOT)
def test_no_root_and_an_old_kernel_are_one_line_from_every_command_that_needs_them(whole, tmp_path, capsys, monkeypatch, command, missing):
    name, fake, words = CANNOT[missing]
    # What the machine of this test lacks besides is not what is asked here.
    fine = preflight.Check("sandbox: x", True, "")
    for check in ("_programs", "_architecture", "_cgroups", "_namespaces", "_disk", "_rootfs"):
        monkeypatch.setattr(preflight, check, lambda: fine)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os if name == "geteuid" else platform, name, fake)
    arguments = {"train": [str(whole)], "agents build": ["mini-swe-agent"], "tasks check": [str(tmp_path / "tasks" / "train")]}[command]
    assert main([*command.split(), *arguments]) == 2
    line = one_line(capsys)
    assert line.startswith("harness-rl: this machine cannot run the local sandbox: ") and words in line


class Engine:
    """Stands in for the engine that a run launches."""

    url, model, info = "http://127.0.0.1:9", "policy", SimpleNamespace(max_model_len=1024)

    def require(self, **_: object) -> None:
        pass

    async def stop(self) -> None:
        pass


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that can run sandboxes, and an engine that is up at once."""

    async def launch(*_: object, **__: object) -> Engine:
        return Engine()

    for name, fake in (
        ("refuse_unless_able", lambda: None),
        ("reap", lambda: SimpleNamespace(sessions=0)),
        ("audit", lambda: SimpleNamespace(total=0)),
        ("launch", launch),
    ):
        monkeypatch.setattr(services, name, fake)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.strip().splitlines()[-1]


def test_a_busy_port_is_one_line_and_exit_2(whole, able, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["train", str(whole), "--set", f"proxy.port={port}"]) == 2
    assert last_line(capsys) == f"harness-rl: proxy.port {port} is in use; choose another or 0 for a free one"


def test_an_engine_without_a_flag_that_is_needed_is_one_line_and_exit_2(whole, able, capsys, monkeypatch):
    found = EngineInfo("0.32.0", "policy", 1024, True, False, None, None, True)
    asked = SimpleNamespace(info=found, url=Engine.url)
    monkeypatch.setattr(Engine, "require", lambda self, **needs: vllm.Engine.require(asked, **needs))
    assert main(["train", str(whole)]) == 2
    assert "has no weight routes" in (line := last_line(capsys)) and "start vLLM with VLLM_SERVER_DEV_MODE=1" in line


def test_a_disk_that_is_nearly_full_and_a_folder_in_use_are_one_line_and_exit_2(whole, able, tmp_path, capsys, monkeypatch):
    with run_folder(load_config(whole)):
        assert main(["train", str(whole)]) == 2
    assert "is in use by another process; set run.name" in last_line(capsys)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100 << 30, 99 << 30, 900 << 20))
    assert main(["train", str(whole)]) == 2
    assert "900 MiB free, a run needs 1024; set run.dir" in last_line(capsys)


@pytest.mark.parametrize(("missing", "words"), [("model.safetensors", "has no weights"), ("tokenizer.json", "has no tokenizer")])
def test_a_model_folder_without_weights_or_tokenizer_is_one_line_and_exit_2(whole, tmp_path, capsys, missing, words):
    (tmp_path / "model" / missing).unlink()
    assert main(["train", str(whole)]) == 2
    assert words in one_line(capsys)
