"""I-01, I-07: the verifier's folders are emptied without following what the agent put there."""

from __future__ import annotations

import os
from pathlib import Path

from harness_rl.sandboxes.clean import replaced_tools, reset_folders


def test_i01_planted_files_are_removed_and_reported(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "verifier"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "reward.txt").write_text("1")
    (folder / "deep" / "er" / "x").write_text("1")
    report = reset_folders([str(folder)], 100)
    assert report["count"] == 4 and f"{folder}/reward.txt" in report["found"]
    assert list(folder.iterdir()) == [] and folder.stat().st_mode & 0o777 == 0o777


def test_links_are_removed_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("x")
    (tmp_path / "logs").symlink_to(outside)
    (outside / "verifier").mkdir()
    report = reset_folders([str(tmp_path / "logs" / "verifier")], 100)
    assert report["count"] == 1 and "was not a directory" in report["found"][0]
    assert (outside / "keep").exists() and not (tmp_path / "logs").is_symlink()
    (tmp_path / "logs" / "verifier" / "link").symlink_to(outside)
    reset_folders([str(tmp_path / "logs" / "verifier")], 100)
    assert (outside / "keep").exists()


def test_many_entries_are_counted_but_not_all_named(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"f{number}").touch()
    report = reset_folders([str(tmp_path)], 10)
    assert report["count"] == 30 and len(report["found"]) == 10


def test_replaced_tools_are_named(tmp_path: Path) -> None:
    assert replaced_tools(str(tmp_path)) == []
    (tmp_path / "usr" / "local" / "bin").mkdir(parents=True)
    (tmp_path / "usr" / "local" / "bin" / "python3").touch()
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "ld.so.preload").touch()
    os.symlink("/tmp", tmp_path / "usr" / "bin")
    found = replaced_tools(str(tmp_path))
    assert {"/usr/local/bin/python3", "/etc/ld.so.preload", "/usr/bin (was not a directory)"} == set(found)
