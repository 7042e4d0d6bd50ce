"""A RunConfig from a TOML file and `--set section.key=value`, and back to TOML text.

Invariant: what is written reads back equal; an unknown key is refused with the nearest valid name, a wrong value with what it is.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness_rl.config import RunConfig
from harness_rl.errors import UserError


def load_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a TOML file and apply `section.key=value` overrides (values are TOML literals; a bare word is a string).

    Relative paths in the file are relative to the working directory. Raises UserError.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"config: {path} does not exist; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"config: {path} cannot be read: {error}") from None
    return resolve_config(data, overrides or [], str(path))


def resolve_config(data: dict[str, Any], overrides: list[str], where: str) -> RunConfig:
    """A RunConfig from plain data and overrides. Raises UserError with one line per mistake's first."""
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or len(parts) != 2:
            raise UserError(f"--set {text}: write --set section.key=value")
        section = data.setdefault(parts[0], {})
        if not isinstance(section, dict):
            raise UserError(f"{where}: {parts[0]} is not a section")
        section[parts[1]] = _literal(value.strip())
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise UserError(_first_mistake(error, where)) from None


def to_toml(config: RunConfig) -> str:
    """The resolved config as TOML text that `load_config` reads back to an equal config."""
    lines: list[str] = []
    for name, section in config:
        lines.append(f"[{name}]")
        for key, value in section:
            if value is not None:
                lines.append(f"{key} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_value(str(key))} = {_toml_value(item)}" for key, item in value.items()) + "}"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _first_mistake(error: ValidationError, where: str) -> str:
    mistake = error.errors()[0]
    location = ".".join(str(part) for part in mistake["loc"])
    if mistake["type"] == "extra_forbidden":
        *parents, unknown = mistake["loc"]
        model: Any = RunConfig
        for parent in parents:
            model = model.model_fields[parent].annotation
        near = difflib.get_close_matches(str(unknown), list(model.model_fields), n=1)
        hint = f"did you mean {'.'.join([*map(str, parents), near[0]])}?" if near else f"valid: {', '.join(model.model_fields)}"
        return f"{where}: unknown key {location}; {hint}"
    return f"{where}: {location or 'config'}: {mistake['msg']} (got {mistake.get('input')!r:.80})"
