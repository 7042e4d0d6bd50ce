"""What an acceptance report may stand on: a run is made once, and one of another config is none."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import runs

FAKE = """
import json, pathlib, sqlite3, sys
place = pathlib.Path(sys.argv[1])
place.mkdir()
with open(place.parent / "made", "a") as made:
    made.write("x")
journal = sqlite3.connect(place / "journal.sqlite")
journal.execute("CREATE TABLE meta (key, value)")
evaluations = [{"label": "start", "reward": 0.25}, {"label": "end", "reward": 0.75}]
journal.execute("INSERT INTO meta VALUES ('evaluations', ?)", [json.dumps(evaluations)])
journal.commit()
(place / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "reward": step / 10}) + "\\n" for step in range(1, 7)))
"""


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> runs.Run:
    monkeypatch.setattr(runs, "KEPT", tmp_path / "kept")
    config = tmp_path / "config.toml"
    config.write_text("[run]\nsteps = 6\n")
    place = tmp_path / "runs" / "learning-0"
    return runs.Run("learning", 0, [sys.executable, "-c", FAKE, str(place)], place, config, ["a=1"], [sys.executable, "-c", ""])


def made(one: runs.Run) -> int:
    return len((one.place.parent / "made").read_text())


def test_a_run_is_made_once_and_read_from_what_is_kept(one: runs.Run) -> None:
    assert one.kept() is None
    found = one.make()
    assert (found.first, found.last, found.gain) == (pytest.approx(0.2), pytest.approx(0.5), 0.5)
    assert one.make() == one.kept() == found and made(one) == 1
    one.make(again=True)
    assert made(one) == 2


def test_a_run_of_another_config_is_not_kept_and_a_comment_is_no_other_config(one: runs.Run) -> None:
    one.make()
    one.source.write_text("# six steps\n[run]\nsteps = 6\n")
    assert one.kept() is not None
    assert replace(one, settings=["a=2"]).kept() is None
    one.source.write_text("[run]\nsteps = 7\n")
    assert one.kept() is None
    one.make()
    assert made(one) == 2
