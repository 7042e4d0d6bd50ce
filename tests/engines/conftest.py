"""A torch environment that is not one: its interpreter is tests/engines/fake_vllm.py."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness_rl.config import EngineSection

FakeEngine = Callable[..., EngineSection]


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """`fake_engine(mode=..., off=[...], start_timeout_s=...)` -> the section of an engine that behaves so."""

    def make(*, mode: str = "serve", off: list[str] | None = None, packages: dict[str, str | None] | None = None,
             plugins: list[str] | None = None, kills: Path | None = None, **section: object) -> EngineSection:  # fmt: skip
        settings: dict[str, object] = {"mode": mode, "off": off or [], "packages": packages or {}}
        if plugins is not None:
            settings["plugins"] = plugins
        if kills is not None:
            settings["kills"] = str(kills)
        monkeypatch.setenv("FAKE_VLLM", json.dumps(settings))
        python = tmp_path / "env" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("fake_vllm.py")}" "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        return EngineSection.model_validate({"python": python, "start_timeout_s": 30.0, "max_restarts": 1, **section})

    return make


def group_members(pgid: int) -> list[int]:
    """Living processes of a group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == pgid and state != "Z":
                found.append(int(entry.name))
    return found


def own_groups() -> set[int]:
    """Ids of the children that this process started; each leads a group."""
    return {int(pid) for pid in Path("/proc/thread-self/children").read_text().split()}


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
