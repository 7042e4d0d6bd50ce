"""The part of the Dockerfile language that a task layer may use: FROM a known image, WORKDIR, ENV, RUN, COPY and ADD of files. Invariant:
an instruction is done as Docker does it or the file is refused, naming the line; nothing is skipped or guessed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from .errors import SandboxBuildFailedError
from .launch import DEFAULT_PATH

_Refuse = Callable[[str], SandboxBuildFailedError]
_SUPPORTED = "FROM, WORKDIR, ENV, RUN, COPY, ADD"
_VARIABLE = re.compile(r"\\(.)|\$\{(\w+)(?::([-+])([^}]*))?\}|\$(\w+)")


@dataclass(frozen=True)
class Run:
    argv: tuple[str, ...]
    cwd: str
    env: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Copy:
    sources: tuple[str, ...]
    """Paths or patterns below the context folder."""
    target: str
    """Absolute; a folder if it ends with a slash."""


@dataclass(frozen=True)
class Recipe:
    steps: tuple[Run | Copy, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    workdir: str | None = None


@dataclass
class _State:
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    seen_from: bool = False


def parse(path: Path, known_images: tuple[str, ...]) -> Recipe:
    """Read a Dockerfile. Raises SandboxBuildFailedError that names the file, the line and the remedy."""
    steps: list[Run | Copy] = []
    workdir: str | None = None
    state = _State()
    for number, line in _logical_lines(path.read_text(encoding="utf-8")):
        word, _, rest = line.partition(" ")
        name, rest = word.upper(), rest.strip()

        def refuse(why: str, number: int = number, name: str = name) -> SandboxBuildFailedError:
            return SandboxBuildFailedError(f"{path}:{number}: {name}: {why}; this sandbox builds only {_SUPPORTED}")

        if not state.seen_from and name != "FROM":
            raise refuse("the first instruction must be FROM")
        if name == "FROM":
            if state.seen_from:
                raise refuse("multi-stage builds are not supported")
            if rest not in known_images:
                raise refuse(f"unknown base image {rest!r} (known: {', '.join(known_images)})")
            state.seen_from = True
        elif name == "WORKDIR":
            if not rest:
                raise refuse("needs a folder")
            state.workdir = str(PurePosixPath(state.workdir) / _expand(rest, state.env))
            workdir = state.workdir
            steps.append(Run(("/bin/mkdir", "-p", workdir), "/", ()))
        elif name == "ENV":
            state.env.update(_environment(rest, state.env, refuse))
        elif name == "RUN":
            steps.append(_run(rest, state, refuse))
        elif name in ("COPY", "ADD"):
            steps.append(_copy(name, rest, state, refuse))
        else:
            raise refuse("is not supported")
    if not state.seen_from:
        raise SandboxBuildFailedError(f"{path}: no FROM instruction")
    return Recipe(tuple(steps), state.env, workdir)


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Instructions with their first line's number: comments dropped, continuations joined."""
    lines: list[tuple[int, str]] = []
    joined, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        stripped = raw.strip()
        if stripped.startswith("#") or (not stripped and not joined):
            continue
        start = start if joined else number
        if stripped.endswith("\\"):
            joined += stripped[:-1] + " "
            continue
        lines.append((start, (joined + stripped).strip()))
        joined = ""
    if joined:
        lines.append((start, joined.strip()))
    return lines


def _run(rest: str, state: _State, refuse: _Refuse) -> Run:
    if rest.startswith("--"):
        raise refuse(f"the option {rest.split()[0]} is not supported")
    if re.search(r"<<-?\s*[\"']?\w+", rest) and "<<<" not in rest:
        raise refuse("here-documents are not supported: put the script in a file and COPY it")
    argv = tuple(_json_words(rest, refuse)) if rest.startswith("[") else ("/bin/sh", "-c", rest)
    return Run(argv, state.workdir, tuple(state.env.items()))


def _copy(name: str, rest: str, state: _State, refuse: _Refuse) -> Copy:
    words = _json_words(rest, refuse) if rest.startswith("[") else shlex.split(rest)
    for word in words:
        if word.startswith("--"):
            raise refuse(f"the option {word.split('=')[0]} is not supported")
    if len(words) < 2:
        raise refuse("needs a source and a target")
    *sources, target = (_expand(word, state.env) for word in words)
    for source in sources:
        if "://" in source or source.startswith("git@"):
            raise refuse(f"{source} is not a file of the task")
        if name == "ADD" and re.search(r"\.(tar|tar\.\w+|tgz|tbz2?|txz)$", source):
            raise refuse(f"unpacking {source} is not supported: COPY it and unpack it with RUN")
        if ".." in PurePosixPath(source).parts:
            raise refuse(f"{source} is outside the task's environment folder")
    absolute = str(PurePosixPath(state.workdir) / target)
    if target.endswith("/") or target in (".", "./") or len(sources) > 1:
        absolute = absolute.rstrip("/") + "/"
    return Copy(tuple(sources), absolute)


def _json_words(rest: str, refuse: _Refuse) -> list[str]:
    try:
        words = json.loads(rest)
    except ValueError:
        raise refuse("is not a JSON list") from None
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise refuse("is not a JSON list of strings")
    return words


def _environment(rest: str, known: dict[str, str], refuse: _Refuse) -> dict[str, str]:
    if re.match(r"\w+\s+\S", rest) and "=" not in rest.split()[0]:
        key, _, value = rest.partition(" ")
        return {key: _expand(value.strip(), known)}
    pairs: dict[str, str] = {}
    for word in shlex.split(rest):
        key, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"\w+", key):
            raise refuse(f"{word!r} is not NAME=value")
        pairs[key] = _expand(value, known)
    return pairs


def _expand(text: str, env: dict[str, str]) -> str:
    """$NAME, ${NAME}, ${NAME:-default} and ${NAME:+other}, from earlier ENV instructions, as Docker does."""
    known = {"PATH": DEFAULT_PATH, **env}

    def value(match: re.Match[str]) -> str:
        escaped, braced, operator, word, plain = match.groups()
        if escaped is not None:
            return escaped if escaped == "$" else match.group(0)
        current = known.get(braced or plain, "")
        if operator == "-":
            return current or word
        return (word if current else "") if operator == "+" else current

    return _VARIABLE.sub(value, text)
