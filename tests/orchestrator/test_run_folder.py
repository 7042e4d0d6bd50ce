"""A run folder belongs to one live process, and a place where a run cannot be kept is refused before anything starts."""

from __future__ import annotations

import logging
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from harness_rl.config import RunConfig
from harness_rl.configfile import load_config
from harness_rl.errors import UserError
from harness_rl.orchestrator.main import run_folder


def config(place: Path, steps: int = 1) -> RunConfig:
    return RunConfig.model_validate({"run": {"dir": place, "name": "a", "steps": steps}})


def test_a_folder_in_use_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with run_folder(config(tmp_path, steps=1)):
        with pytest.raises(UserError, match=r"in use by another process; set run\.name"), run_folder(config(tmp_path, steps=2)):
            pass
        assert load_config(tmp_path / "a" / "config.toml").run.steps == 1
    with run_folder(config(tmp_path, steps=2)):
        assert load_config(tmp_path / "a" / "config.toml").run.steps == 2


def test_a_place_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (Path("/proc/harness-rl"), tmp_path / "file"):
        with pytest.raises(UserError, match=r"cannot be written: .*; set run\.dir to another place"), run_folder(config(place)):
            pass


def test_a_disk_that_is_nearly_full_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100 << 30, 99 << 30, 900 << 20))
    with pytest.raises(UserError, match=r"900 MiB free, a run needs 1024; set run\.dir"), run_folder(config(tmp_path)):
        pass
    assert not (tmp_path / "a" / "config.toml").exists()


def test_the_log_ends_with_the_run(tmp_path: Path) -> None:
    before = list(logging.getLogger().handlers)
    with pytest.raises(RuntimeError), run_folder(config(tmp_path)):
        logging.getLogger("harness_rl.test").warning("inside")
        raise RuntimeError
    assert logging.getLogger().handlers == before
    assert "inside" in (tmp_path / "a" / "logs" / "control.log").read_text()
