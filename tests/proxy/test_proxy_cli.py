"""The command line: one clear line for wrong input."""

from __future__ import annotations

from pathlib import Path

import pytest

from capture_proxy.cli import main


def flags(tmp_path: Path, **changes: str) -> list[str]:
    key = tmp_path / "key"
    key.write_text("k" * 32)
    values = {
        "--engine": "http://127.0.0.1:1",
        "--model": "policy",
        "--store": str(tmp_path / "s"),
        "--admin-key-file": str(key),
        **changes,
    }
    return [part for pair in values.items() for part in pair]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"--admin-key-file": "/nowhere/key"}, "--admin-key-file"),
        ({"--engine": "localhost:8000"}, "--engine"),
        ({"--host": "0.0.0.0"}, "--host"),
        ({"--host": "example.org"}, "--host"),
        ({"--tls-key": "/nowhere/key"}, "--tls-cert"),
        ({"--tls-cert": "/nowhere/cert"}, "--tls-cert"),
        ({"--engine": "http://me:secret@127.0.0.1:1"}, "--engine"),
    ],
)
def test_wrong_input_ends_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], word: str
) -> None:
    assert main(flags(tmp_path, **changes)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("capture-proxy: ") and word in captured.err
    assert captured.err.count("\n") == 1


def test_short_admin_key_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short"
    short.write_text("abc")
    assert main(flags(tmp_path, **{"--admin-key-file": str(short)})) == 2
    assert "16 characters" in capsys.readouterr().err
