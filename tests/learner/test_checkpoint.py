from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from learner_helpers import random_rows, tiny_policy
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from harness_rl.errors import LearnerError, UserError
from harness_rl.learner import checkpoint, saving
from harness_rl.learner.saving import Saver, load_optimizer, load_state
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Trainer


def trainer() -> Trainer:
    return Trainer(tiny_policy(), LearnerSpec(model="-", run_dir="-", lineage="k", learning_rate=1e-2, micro_batch_tokens=4096))


def save(t: Trainer, root: Path, step: int, keep: int = 9, source: Path | None = None, version: str | None = None) -> checkpoint.Checkpoint:
    done: list[checkpoint.Checkpoint] = []
    saver = Saver(root, replace(t.spec, keep_checkpoints=keep), source, saved=lambda found, _: done.append(found))
    saver.begin(step, version or f"k-{step}", t.policy, t.updater.optimizer, t.state())
    saver.wait()
    return done[0]


def resume(found: checkpoint.Checkpoint) -> Trainer:
    t = trainer()
    t.policy.model.load_state_dict(AutoModelForCausalLM.from_pretrained(found.path, dtype=torch.float32).state_dict())
    load_optimizer(found, t.policy, t.updater.optimizer)
    t.restore(load_state(found))
    return t


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    a = trainer()
    a.step(random_rows(0), "k-0")
    save(a, tmp_path, 1)
    losses = [a.step(random_rows(i), "k-0").metrics["loss"] for i in (1, 2)]
    found = checkpoint.find(tmp_path).newest
    assert found is not None and found.version == "k-1"
    b = resume(found)
    assert b.updater.updates == 1
    assert [b.step(random_rows(i), "k-0").metrics["loss"] for i in (1, 2)] == losses


def test_it_is_a_plain_hugging_face_folder_with_the_tokenizer_beside(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors", "config.json", "trainer.pt"):
        (source / name).write_text("x")
    saved = save(trainer(), tmp_path / "c", 3, source=source)
    names = {path.name for path in saved.path.iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "config.json", "model.safetensors", "trainer.pt", "COMPLETE"} <= names
    assert (saved.path / "tokenizer.json").read_text() == "x" and (saved.path / "config.json").read_text() != "x"
    assert "harness_rl" not in (saved.path / "config.json").read_text()
    files = {str(path.relative_to(saved.path)) for path in saved.path.rglob("*") if path.is_file()}
    assert json.loads((saved.path / "COMPLETE").read_text())["files"].keys() == files - {"COMPLETE"}


def test_g07_half_written_checkpoints_are_skipped_by_name(tmp_path: Path) -> None:
    t = trainer()
    for step in (1, 2, 3, 4, 5):
        save(t, tmp_path, step)
    (tmp_path / "step-5" / "COMPLETE").unlink()
    (tmp_path / "step-4" / "trainer.pt").unlink()
    weights = tmp_path / "step-3" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    (tmp_path / "step-2" / "COMPLETE").write_text("{")
    found = checkpoint.find(tmp_path)
    assert found.newest is not None and found.newest.step == 1
    assert [line.split(":")[0] for line in found.skipped] == ["step-5", "step-4", "step-3", "step-2"]


def test_g07_fails_loudly_when_folders_exist_but_none_is_complete(tmp_path: Path) -> None:
    (tmp_path / "step-7").mkdir()
    with pytest.raises(UserError, match=r"no checkpoint in .* is complete: step-7: no COMPLETE"):
        checkpoint.find(tmp_path)
    assert checkpoint.find(tmp_path / "absent").newest is None


def test_old_ones_are_forgotten_after_the_new_one_counts(tmp_path: Path) -> None:
    t = trainer()
    for step in (1, 2, 3):
        save(t, tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


def test_a_step_taken_back_by_a_crash_is_replaced(tmp_path: Path) -> None:
    t = trainer()
    save(t, tmp_path, 1)
    t.step(random_rows(0), "k-0")
    save(t, tmp_path, 1, 2, version="new-1")
    found = checkpoint.find(tmp_path)
    assert found.newest is not None and found.newest.version == "new-1"


def test_f18_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = trainer()
    save(t, tmp_path, 1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: usage(0, 0, 1000))
    with pytest.raises(LearnerError, match="MiB free"):
        save(t, tmp_path, 2, keep=1)
    found = checkpoint.find(tmp_path)
    assert found.newest is not None and found.newest.step == 1 and not found.skipped


@pytest.mark.parametrize(
    "error",
    [
        None,
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EROFS, os.strerror(errno.EROFS)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named_and_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """torch and safetensors have errors of their own for it, which are no OSError."""
    t = trainer()
    save(t, tmp_path, 1)
    if error is None:  # torch's own, of a real device
        monkeypatch.setattr(checkpoint, "STATE", "/dev/full")
    else:
        monkeypatch.setattr(t.policy.model, "save_pretrained", Mock(side_effect=error))
    with pytest.raises(LearnerError, match=rf"checkpoint {tmp_path}/step-2 could not be written: "):
        save(t, tmp_path, 2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_clean_removes_what_a_kill_left(tmp_path: Path) -> None:
    (tmp_path / ".step-3.99.tmp").mkdir()
    checkpoint.clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize("delay", [0.03, pytest.param(0.2, marks=pytest.mark.full), pytest.param(0.5, marks=pytest.mark.full)])
def test_c80_a_kill_during_a_save_never_loses_the_previous_one(tmp_path: Path, delay: float) -> None:
    """A saver killed at some moment leaves the last checkpoint it had finished, or a newer whole one."""
    script = Path(__file__).parent / "save_killed.py"
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True) as saver:
        assert saver.stdout is not None
        first = saver.stdout.readline()
        time.sleep(delay)
        saver.kill()
        saved = max(int(line) for line in [first, *saver.stdout] if line.strip())
    checkpoint.clean(tmp_path)
    found = checkpoint.find(tmp_path).newest
    assert found is not None and found.step >= saved >= 1 and resume(found).updater.updates == 1
    assert not list(tmp_path.glob(".step-*"))


def test_what_was_put_aside_goes_back_if_nothing_took_its_place(tmp_path: Path) -> None:
    t = trainer()
    save(t, tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / ".step-1.99.old")  # killed between the two renames
    assert checkpoint.find(tmp_path).newest is None
    checkpoint.clean(tmp_path)
    found = checkpoint.find(tmp_path).newest
    assert found is not None and found.step == 1 and [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    """A user's objective may draw from any of them."""

    def draws() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]

    t = trainer()
    random.gauss(0, 1), np.random.randn()
    found = save(t, tmp_path, 1)
    expected = draws()
    draws()
    t.restore(load_state(found))
    assert draws() == expected


def test_steps_skipped_in_a_row_are_counted_over_a_resume(tmp_path: Path) -> None:
    t = trainer()
    diverged = random_rows(0)
    diverged[0].advantage, diverged[1].advantage = 1e38, -1e38
    for _ in range(2):
        assert not t.step(diverged, "k-0").updated
    resumed = trainer()
    resumed.restore(load_state(save(t, tmp_path, 1)))
    with pytest.raises(LearnerError, match="3 steps in a row"):
        resumed.step(diverged, "k-0")


def test_what_is_saved_is_what_was_when_the_save_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while a save is written: the save must not see it."""
    may_write, real = threading.Event(), torch.save
    monkeypatch.setattr(saving.torch, "save", lambda *args: (may_write.wait(30), real(*args)))
    t = trainer()
    saver = Saver(tmp_path, t.spec)
    t.step(random_rows(0), "k-0")
    saver.begin(1, "k-1", t.policy, t.updater.optimizer, t.state())
    losses = [t.step(random_rows(i), "k-0").metrics["loss"] for i in (1, 2)]
    saver.check()  # nothing has failed
    assert checkpoint.find(tmp_path).newest is None
    may_write.set()
    saver.wait()
    found = checkpoint.find(tmp_path).newest
    assert found is not None
    again = resume(found)
    assert [again.step(random_rows(i), "k-0").metrics["loss"] for i in (1, 2)] == losses


def test_g08_a_checkpoint_that_somebody_reads_outlives_the_cleaning(tmp_path: Path) -> None:
    t = trainer()
    first = save(t, tmp_path, 1)
    with checkpoint.held(first.path):
        for step in (2, 3, 4):
            save(t, tmp_path, step, keep=1)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-4"]
        assert (first.path / "model.safetensors").is_file() and (first.path / "COMPLETE").is_file()
    save(t, tmp_path, 5, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]
    with pytest.raises(LearnerError, match="step-1 is not there any more"), checkpoint.held(first.path):
        pass


def test_a_failed_save_is_told_at_the_next_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    t = trainer()
    saver = Saver(tmp_path, t.spec)
    monkeypatch.setattr(saving.torch, "save", full)
    saver.begin(1, "k-1", t.policy, t.updater.optimizer, t.state())
    deadline = time.monotonic() + 30
    with pytest.raises(LearnerError, match=r"step-1 could not be written: .*No space left"):
        while time.monotonic() < deadline:
            saver.check()
            time.sleep(0.01)
    assert not list(tmp_path.iterdir())
