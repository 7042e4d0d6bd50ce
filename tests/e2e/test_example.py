"""The README's Python example, run to its end with fewer steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness_rl.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


def test_readme_shows_the_example_as_it_is() -> None:
    assert (ROOT / "examples" / "train_harness.py").read_text().partition('"""\n\n')[2].strip() in (ROOT / "README.md").read_text()


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.root
def test_the_example_trains_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "train_harness.py").read_text()
    text, changed = re.subn(r"max_steps=\d+", "max_steps=2", text)
    assert changed == 1
    text = text.replace("runs/python", str(tmp_path / "run"))
    script = tmp_path / "train.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "run" / "checkpoints" / "step-2" / "config.json").is_file()


@pytest.mark.full
@pytest.mark.engine
def test_the_white_box_example_trains_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "examples/train_echo.py", "--steps", "2", "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["rewards/EchoEnv/mean"] == pytest.approx(line["reward"]) for line in lines)
    assert (tmp_path / "run" / "checkpoints" / "step-2" / "config.json").is_file()
