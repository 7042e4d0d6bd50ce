"""The one line of an engine log that says why it died.

vLLM's processes each print a traceback, and the last ones only report that another failed; the line that helps is the last error that is
not such an echo.
"""

from __future__ import annotations

import re
from pathlib import Path

_PREFIX = re.compile(r"^(\x1b\[[0-9;]*m)*\((?:APIServer|EngineCore|Worker)\S*(?: pid=\d+)?\)(\x1b\[[0-9;]*m)*\s*")
_STAMP = re.compile(r"^(?:ERROR|CRITICAL|WARNING|INFO) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
_HARMLESS = re.compile(r"\b(?:WARNING|INFO) \d\d-\d\d \d\d:\d\d:\d\d ")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(
    r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)\b.*[:(]|: error: |^error:|\[Errno \d+\]|Out of memory|Killed|died unexpectedly",
    re.IGNORECASE,
)
_ECHO = re.compile(
    r"Engine core initialization failed|See root cause|EngineDeadError|cancelled|CancelledError|Engine process failed|leaked \w+ objects"
    r"|RequestValidationError|JSONDecodeError"  # a refused request, a tool call that is no JSON; no process dies of it
)
_TAIL = 256 * 1024


def last_error(path: Path, start: int = 0) -> str:
    """The most telling line after byte `start`: an error that is no echo, else the last line that says anything, else ''."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(start, size - _TAIL))
            raw = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line for line in map(_clean, raw) if line]
    grave = [line for line in (_clean(line) for line in raw if not _HARMLESS.search(line)) if line]
    errors = [_with_reason(line, after) for line, after in zip(grave, [*grave[1:], ""], strict=False) if _ERROR.search(line)]
    telling = [line for line in errors if not _ECHO.search(line)] or errors or lines
    return telling[-1][:300] if telling else ""


def _with_reason(line: str, after: str) -> str:
    """A validation error names its reason on the next line."""
    return f"{line} {after}" if "validation error" in line else line


def _clean(line: str) -> str:
    return _STAMP.sub("", _PREFIX.sub("", _ANSI.sub("", line))).strip()
