"""I-01, I-07: the verifier's folders are emptied without following what the agent put there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness_rl.sandboxes.clean import remove_below, reset_folders


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


def test_a_folder_deeper_than_open_files_is_emptied(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("a", dir_fd=fd)
        below = os.open("a", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    report = reset_folders([str(folder)], 5)
    assert (report["count"], report["failed"]) == (3000, "") and list(folder.iterdir()) == []


def test_a_folder_without_end_is_said_to_be_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").touch()
    monkeypatch.setattr("harness_rl.sandboxes.clean._CPU_S", 0.0)
    report = reset_folders([str(tmp_path)], 5)
    assert report["failed"].startswith(f"{tmp_path} cannot be emptied: it holds more than can be removed")


def test_a_report_stays_small_whatever_the_names(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / (f"{number}" + '\x01"' * 100)).touch()
    assert len(json.dumps(reset_folders([str(tmp_path)], 100))) < 30_000


def test_removal_below_a_tree_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "root" / "cache" / "deep").mkdir(parents=True)
    (tmp_path / "keep").mkdir()
    (tmp_path / "root" / "cache" / "link").symlink_to(tmp_path / "keep")
    root = os.open(tmp_path / "root", os.O_RDONLY)
    remove_below(root, ["cache"])
    os.close(root)
    assert list((tmp_path / "root").iterdir()) == [] and (tmp_path / "keep").is_dir()
