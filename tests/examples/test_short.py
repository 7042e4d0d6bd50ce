"""Every example's script as a person would type it, in its short form: its server, a warm start, two steps of a real model.

All share one engine, so that they take minutes. Whether a game is learned is for `make accept-games`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness_rl.metrics import read_metrics
from harness_rl.sessions.openenv_servers import openenv_server

pytestmark = [pytest.mark.examples, pytest.mark.engine]
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
CONTROL = ROOT / ".venv" / "bin" / "python"


def ran(script: str, folder: Path, engine_url: str, *flags: str, python: str | Path = sys.executable) -> list[dict[str, float]]:
    """The metrics of its two steps."""
    engine = ("--vllm-mode", "server", "--vllm-server-url", engine_url)
    done = subprocess.run(
        [str(python), f"examples/{script}", "--short", "--output-dir", str(folder), *engine, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    accounts = json.loads((folder / "accounts.json").read_text())
    assert accounts["unrecorded"] == 0 and accounts["failures"] == {}, accounts
    assert accounts["rollouts"]["trained"] >= 2, accounts["rollouts"]
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["sync/proof_mean_abs"] < 1e-4 for line in lines)
    return lines


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        ("openenv_echo.py", {"reward_echo"}),
        ("openenv_catch.py", {"reward_catch"}),
        ("openenv_wordle.py", {"reward_won", "reward_letters", "reward_valid"}),
        ("openenv_sudoku.py", {"reward_solved", "reward_filled"}),
        ("openenv_multi_env.py", {"wordle_reward", "catch_reward"}),
    ],
)
def test_a_game_on_its_own_server(script: str, parts: set[str], tmp_path: Path, engine_url: str) -> None:
    lines = ran(script, tmp_path / "run", engine_url)
    found = {name.split("/")[1] for line in lines for name in line if name.startswith("rewards/")}
    assert found == parts
    assert any(line["reward"] > 0 for line in lines)


def test_pages_in_a_browser(tmp_path: Path, engine_url: str) -> None:
    from envs.browsergym_env import chromium

    if chromium.missing():
        pytest.skip(chromium.missing())
    ran("train_browsergym.py", tmp_path / "run", engine_url)


def test_drives_on_a_road_that_stands_for_the_simulator(tmp_path: Path, engine_url: str) -> None:
    with openenv_server(app="envservers.carla:app", sessions=12) as url:
        ran("train_carla.py", tmp_path / "run", engine_url, "--env-url", url, "--sessions", "8")


def test_sums_of_an_open_reward_server(tmp_path: Path, engine_url: str) -> None:
    with openenv_server(app="envservers.openreward:app") as url:
        flags = (
            "--env-url",
            url,
            "--dataset-size",
            "6",
            "--demonstrations",
            f"{Path(__file__).parent}/sums_demonstration.py:demonstration",
        )
        ran("train_openreward.py", tmp_path / "run", engine_url, *flags)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="the local sandbox needs root")
def test_bash_in_the_quickstarts_sandboxes(tmp_path: Path, engine_url: str) -> None:
    ran("train_harbor_bash.py", tmp_path / "run", engine_url, python=CONTROL)
