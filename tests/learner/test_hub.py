"""The real huggingface_hub client against a Hub on a loopback socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, serve_hub

SCRIPT = Path(__file__).parent / "hub_script.py"
FILES = {"model.safetensors": b"weights", "config.json": b"{}", "tokenizer.json": b"t", "adapter/adapter_model.safetensors": b"a"}
PRIVATE = {"COMPLETE": b"{}", "trainer.pt": b"s", "optimizer/__0_0.distcp": b"o", "optimizer/.metadata": b"m"}


@pytest.fixture
def hub() -> Iterator[tuple[FakeHub, str]]:
    made = FakeHub(token="hf_secret")
    made.may_commit.set()
    with serve_hub(made) as url:
        yield made, url


def checkpoint_at(root: Path, step: int) -> Path:
    folder = root / f"step-{step}"
    for name, data in (FILES | PRIVATE).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data + (str(step).encode() if name == "model.safetensors" else b""))
    return folder


@contextmanager
def pushing(url: str, folders: list[Path], home: Path, token: str = "hf_secret") -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "HF_ENDPOINT": url, "HF_TOKEN": token, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, str(SCRIPT), "me/policy", *map(str, folders)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def ended(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


def test_a_commit_holds_the_model_and_not_the_optimizer(hub: tuple[FakeHub, str], tmp_path: Path) -> None:
    made, url = hub
    made.refuse = [503]  # passes
    with pushing(url, [checkpoint_at(tmp_path, 3)], tmp_path / "home") as process:
        go(process)
        assert ended(process) == [{"step": 3, "where": "me/policy", "wrong": None}]
    assert made.repositories == {"me/policy": True}
    (commit,) = made.commits
    assert commit.message == "Step 3 (k-3)"
    assert commit.files == FILES | {"model.safetensors": b"weights3"}


def test_h02_of_checkpoints_that_come_during_an_upload_only_the_newest_is_pushed(hub: tuple[FakeHub, str], tmp_path: Path) -> None:
    made, url = hub
    made.may_commit.clear()
    folders = [checkpoint_at(tmp_path, step) for step in (1, 2, 3)]
    with pushing(url, folders, tmp_path / "home") as process:
        go(process)
        deadline = time.monotonic() + 60
        while not made.asked and time.monotonic() < deadline:
            time.sleep(0.05)
        go(process)
        go(process)
        time.sleep(0.5)  # both are read before the first commit ends
        made.may_commit.set()
        assert [line["step"] for line in ended(process)] == [1, 3]
    assert [commit.message for commit in made.commits] == ["Step 1 (k-1)", "Step 3 (k-3)"]


def test_a_refusal_is_told_in_one_line_and_not_tried_again(hub: tuple[FakeHub, str], tmp_path: Path) -> None:
    made, url = hub
    made.refuse = [403]
    with pushing(url, [checkpoint_at(tmp_path, 1)], tmp_path / "home") as process:
        go(process)
        (line,) = ended(process)
    assert made.asked == 1 and "403" in line["wrong"] and "\n" not in line["wrong"]


def test_a_checkpoint_that_has_gone_is_told(hub: tuple[FakeHub, str], tmp_path: Path) -> None:
    with pushing(hub[1], [tmp_path / "step-9"], tmp_path / "home") as process:
        go(process)
        (line,) = ended(process)
    assert "not there any more" in line["wrong"]
