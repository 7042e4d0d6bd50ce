"""The written table of reward-file forms: each is either a value or an error, never a silent 0 and never a fallback to another file.

Harbor parses the files too, but takes booleans as 1, the last of two duplicate keys, and Python's own spellings of numbers. So the raw
files are read again here, from the host's copy of the verifier's folder, and both readings must agree.

`reward.json` wins over `reward.txt`; when it is malformed, `reward.txt` is not consulted.

| reward.txt                                              | result                                     |
| `1`, `0.5`, `-2`, `1e-3`, ` 1 ` + line end              | value (`-0.0` is 0.0)                      |
| no file, empty, only blanks                             | error                                      |
| `1,0`, `0x1`, `1_0`, `1/2`, `one`, non-ASCII digits     | error: not a decimal number                |
| two lines, two numbers                                  | error: more than one number                |
| `nan`, `inf`, `1e400`                                   | error: not finite                          |
| byte-order mark, not UTF-8                              | error                                      |

| reward.json                                             | result                                     |
| `{"reward": 1, "aux": 0.5}`                             | value of the reward key, the rest metrics  |
| `{"score": 0.5}` while the reward key is `reward`       | value: the only number there is            |
| `{"a": 1, "b": 0}` without the reward key               | error: names the keys                      |
| `{}`, bare `0.5`, array, string, null                   | error: not an object of numbers            |
| a value true, "1", null, nested, NaN, Infinity, 1e400   | error: names the key                       |
| duplicate keys                                          | error: names the key                       |
| cut in half, byte-order mark, not UTF-8, over 1 MiB     | error                                      |

A link, a folder or a device in the file's place is an error in both forms.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

JSON_NAME = "reward.json"
TEXT_NAME = "reward.txt"
DEFAULT_KEY = "reward"
MAX_BYTES = 1 << 20

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)


class RewardError(ValueError):
    """The reward file has a form that is not a value; the message is one line and names the file."""


def read_rewards(verifier_dir: Path) -> dict[str, float]:
    """All numbers of the verifier's folder, by name (`reward` for the text form). Raises RewardError."""
    data = _read(verifier_dir / JSON_NAME)
    if data is not None:
        return parse_json(data)
    data = _read(verifier_dir / TEXT_NAME)
    if data is not None:
        return {DEFAULT_KEY: parse_text(data)}
    raise RewardError(f"the verifier left neither {JSON_NAME} nor {TEXT_NAME}")


def choose_reward(rewards: Mapping[str, float], key: str) -> tuple[float, dict[str, float]]:
    """The reward and the other metrics. Raises RewardError when `key` is missing and the choice is not obvious."""
    if key not in rewards:
        if key != DEFAULT_KEY or len(rewards) != 1:
            raise RewardError(f"the verifier's numbers are {', '.join(sorted(rewards))}: no {key!r}; set reward.key to one of them")
        key = next(iter(rewards))
    return rewards[key], {name: value for name, value in rewards.items() if name != key}


def parse_text(data: bytes) -> float:
    """The value of a `reward.txt`. Raises RewardError."""
    text = _decode(data, TEXT_NAME).strip(" \t\r\n")
    if not text:
        raise RewardError(f"{TEXT_NAME} is empty")
    if _NOT_FINITE.fullmatch(text):
        raise RewardError(f"{TEXT_NAME} holds {text}: not finite")
    if len(text.split()) > 1:
        raise RewardError(f"{TEXT_NAME} holds more than one number: {_shown(text)}")
    if not _NUMBER.fullmatch(text):
        raise RewardError(f"{TEXT_NAME} holds {_shown(text)}: not a decimal number")
    return _finite(float(text), TEXT_NAME, text)


def parse_json(data: bytes) -> dict[str, float]:
    """The numbers of a `reward.json`, by name. Raises RewardError."""
    text = _decode(data, JSON_NAME)
    if not text.strip():
        raise RewardError(f"{JSON_NAME} is empty")
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise RewardError(f"{JSON_NAME} is nested too deeply") from None
    except RewardError:
        raise
    except ValueError as error:
        raise RewardError(f"{JSON_NAME} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise RewardError(f"{JSON_NAME} holds {_shown(text.strip())}: not an object of numbers by name")
    if not document:
        raise RewardError(f"{JSON_NAME} holds an empty object")
    return {name: _number(name, value) for name, value in document.items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RewardError(f"{JSON_NAME}: {name} is {_shown(json.dumps(value))}: not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return _finite(number, f"{JSON_NAME}: {name}", _shown(str(value)) if isinstance(value, float) else "a huge integer")


def _finite(value: float, where: str, shown: str) -> float:
    if not math.isfinite(value):
        raise RewardError(f"{where} holds {shown}: not finite")
    return value or 0.0  # -0.0 is 0.0


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise RewardError(f"{JSON_NAME}: {name} occurs more than once")
        result[name] = value
    return result


def _decode(data: bytes, name: str) -> str:
    if data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise RewardError(f"{name} starts with a byte-order mark; write plain UTF-8")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise RewardError(f"{name} is not UTF-8") from None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _read(path: Path) -> bytes | None:
    """The file's bytes; None when nothing is there. Never follows a link, never blocks on a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RewardError(f"{path.name} cannot be read as a plain file: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RewardError(f"{path.name} is not a plain file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_BYTES:
        raise RewardError(f"{path.name} is larger than {MAX_BYTES} bytes")
    return data
