"""F-10: every form of a reward file is either a value or an error, as the table in `harness_rl.sessions.rewards` says."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from harness_rl.sessions.rewards import RewardError, choose_reward, parse_json, parse_text, read_rewards

TEXT_VALUES = [
    (b"1", 1.0),
    (b"1\n", 1.0),
    (b" 0.5 \r\n", 0.5),
    (b"-2", -2.0),
    (b"+.5", 0.5),
    (b"1e-3", 0.001),
    (b"-0.0", 0.0),
    (b"0", 0.0),
]
TEXT_ERRORS = [
    (b"", "empty"),
    (b"\n", "empty"),
    (b" \t\r\n", "empty"),
    (b"1,0", "not a decimal number"),
    (b"0x1", "not a decimal number"),
    (b"1_0", "not a decimal number"),
    (b"1/2", "not a decimal number"),
    (b"one", "not a decimal number"),
    ("１".encode(), "not a decimal number"),
    (b"true", "not a decimal number"),
    (b"1\n0", "more than one number"),
    (b"1 0", "more than one number"),
    (b"nan", "not finite"),
    (b"-inf", "not finite"),
    (b"Infinity", "not finite"),
    (b"1e400", "not finite"),
    (b"\xef\xbb\xbf1", "byte-order mark"),
    (b"\xff\xfe1\x00", "byte-order mark"),
    (b"\x81", "not UTF-8"),
    (b"1\x000", "not a decimal number"),
]
JSON_VALUES = [
    (b'{"reward": 1}', {"reward": 1.0}),
    (b'{"reward": 0.5, "aux": -0.0}', {"reward": 0.5, "aux": 0.0}),
    (b'\n{"score": 1e-3}\n', {"score": 0.001}),
]
JSON_ERRORS = [
    (b"", "empty"),
    (b"  \n", "empty"),
    (b"{}", "empty object"),
    (b"0.5", "not an object"),
    (b"[1]", "not an object"),
    (b'"1"', "not an object"),
    (b"null", "not an object"),
    (b"true", "not an object"),
    (b'{"reward": true}', "reward is 'true': not a number"),
    (b'{"reward": "1"}', "not a number"),
    (b'{"reward": null}', "not a number"),
    (b'{"reward": 1, "note": {"a": 1}}', "note is"),
    (b'{"reward": NaN}', "not finite"),
    (b'{"reward": Infinity}', "not finite"),
    (b'{"reward": 1e400}', "not finite"),
    (b'{"reward": 1' + b"0" * 400 + b"}", "not finite"),
    (b'{"reward": 0, "reward": 1}', "more than once"),
    (b'{"reward": 1, "rew', "not valid JSON"),
    (b'{"reward": 1} {"reward": 0}', "not valid JSON"),
    (b'\xef\xbb\xbf{"reward": 1}', "byte-order mark"),
    (b'{"reward": "\x81"}', "not UTF-8"),
    (b"[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("data", "value"), TEXT_VALUES)
def test_text_value(data: bytes, value: float) -> None:
    parsed = parse_text(data)
    assert parsed == value
    assert math.copysign(1, parsed) == math.copysign(1, value) or value != 0


@pytest.mark.parametrize(("data", "words"), TEXT_ERRORS)
def test_text_error(data: bytes, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        parse_text(data)


@pytest.mark.parametrize(("data", "rewards"), JSON_VALUES)
def test_json_value(data: bytes, rewards: dict[str, float]) -> None:
    assert parse_json(data) == rewards


@pytest.mark.parametrize(("data", "words"), JSON_ERRORS)
def test_json_error(data: bytes, words: str) -> None:
    with pytest.raises(RewardError, match=words) as caught:
        parse_json(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_f09_no_file(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"neither reward\.json nor reward\.txt"):
        read_rewards(tmp_path)


def test_a_malformed_json_never_falls_back_to_the_text(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("1")
    (tmp_path / "reward.json").write_text('{"reward": ')
    with pytest.raises(RewardError, match="not valid JSON"):
        read_rewards(tmp_path)
    (tmp_path / "reward.json").write_text('{"reward": 0}')
    assert read_rewards(tmp_path) == {"reward": 0.0}
    (tmp_path / "reward.json").unlink()
    assert read_rewards(tmp_path) == {"reward": 1.0}


def test_only_a_plain_file_is_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1")
    folder = tmp_path / "verifier"
    folder.mkdir()
    target = folder / "reward.txt"
    target.symlink_to(secret)
    with pytest.raises(RewardError, match="plain file"):
        read_rewards(folder)
    target.unlink()
    target.mkdir()
    with pytest.raises(RewardError, match="plain file"):
        read_rewards(folder)
    target.rmdir()
    os.mkfifo(target)
    with pytest.raises(RewardError, match="plain file"):
        read_rewards(folder)
    target.unlink()
    target.write_bytes(b" " * (2 << 20) + b"1")
    with pytest.raises(RewardError, match="larger"):
        read_rewards(folder)


def test_reward_key() -> None:
    assert choose_reward({"reward": 1.0, "aux": 0.5}, "reward") == (1.0, {"aux": 0.5})
    assert choose_reward({"score": 0.5}, "reward") == (0.5, {})
    assert choose_reward({"a": 1.0, "b": 0.0}, "b") == (0.0, {"a": 1.0})
    with pytest.raises(RewardError, match="a, b"):
        choose_reward({"a": 1.0, "b": 0.0}, "reward")
    with pytest.raises(RewardError, match=r"reward\.key"):
        choose_reward({"reward": 1.0}, "accuracy")
