"""A run folder belongs to one live process, and a place where a run cannot be kept is refused before anything starts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import logging
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from rich.console import Console

from harness_rl.config import RunConfig
from harness_rl.configfile import load_config
from harness_rl.errors import HarnessRLError, UserError
from harness_rl.metrics import MetricsLog
from harness_rl.orchestrator import learner_process, runfiles
from harness_rl.orchestrator.accounts import Accounts, write_accounts
from harness_rl.orchestrator.main import opened, run_folder


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


LINE = r"a file of the run cannot be written: \S+: No space left on device; make room or mend it, .*--resume"


class FullDisk:
    """Every `write` of a file of this name fails as on a full disk, which tells no name with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._open, self._name = Path.open, name
        monkeypatch.setattr(Path, "open", lambda path, *args, **kwargs: self.open(path, *args, **kwargs))

    def open(self, path: Path, mode: str = "r", *args: object, **kwargs: object) -> object:
        file = self._open(path, mode, *args, **kwargs)
        if self._name in path.name and mode != "r":
            file.close()
            return Full()
        return file


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("file", ["metrics.jsonl", "metrics.tmp", "learner.json", "accounts.json"])
async def test_f18_a_full_disk_is_one_line_whichever_file_meets_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    run = config(tmp_path)

    async def write() -> None:
        metrics = MetricsLog(run.run_dir / "metrics.jsonl")
        if file.startswith("metrics"):
            metrics.write({"step": 1})
            metrics.take_back(1)
        elif file == "learner.json":
            spec = type("Spec", (), {"to_json": lambda self: "{}"})()
            none = tmp_path / "none"
            await learner_process.start_learner(spec, python=none, env={}, hooks=None, run_dir=run.run_dir, timeout=1.0)
        else:
            write_accounts(Accounts(), run.run_dir)

    with pytest.raises(HarnessRLError, match=LINE):
        async with opened(run, Console(file=io.StringIO())):
            FullDisk(monkeypatch, file)
            async with asyncio.TaskGroup() as tasks:  # as in a run: it comes out in a group
                tasks.create_task(write())


async def test_a_folder_that_turned_read_only_is_named_with_the_file(tmp_path: Path) -> None:
    run = config(tmp_path)
    with pytest.raises(HarnessRLError, match=r"cannot be written: .*metrics\.jsonl: Read-only file system; make room or mend it"):
        async with opened(run, Console(file=io.StringIO())):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(run.run_dir / "metrics.jsonl"))


@pytest.mark.parametrize("error", [ConnectionRefusedError(errno.ECONNREFUSED, "refused"), FileNotFoundError(errno.ENOENT, "none", "/x/y")])
async def test_what_is_no_fault_of_the_runs_files_keeps_its_own_name(tmp_path: Path, error: OSError) -> None:
    with pytest.raises(type(error)):
        async with opened(config(tmp_path), Console(file=io.StringIO())):
            raise error


async def test_a_named_error_beside_a_full_disk_is_the_one_that_is_told(tmp_path: Path) -> None:
    full, named = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), UserError("mine")
    with pytest.raises(BaseExceptionGroup) as found:
        async with opened(config(tmp_path), Console(file=io.StringIO())):
            raise BaseExceptionGroup("both", [full, named])
    assert found.value.exceptions[1] is named


def test_a_resume_that_dies_while_it_writes_its_config_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_folder(config(tmp_path, steps=1)):
        pass

    class Killed(BaseException):
        pass

    def killed(descriptor: int) -> None:
        raise Killed

    monkeypatch.setattr(runfiles.os, "fsync", killed)
    with pytest.raises(Killed), run_folder(config(tmp_path, steps=2)):
        pass
    assert load_config(tmp_path / "a" / "config.toml").run.steps == 1
    (tmp_path / "a" / "accounts.json").write_text("{}")
    with contextlib.suppress(Killed):
        write_accounts(Accounts(), tmp_path / "a")
    assert (tmp_path / "a" / "accounts.json").read_text() == "{}"
