"""A Python function as a tool that a model can call: its JSON schema from type hints and a Google-style docstring.

Invariant: what a model is shown is what the function takes. A parameter without a type or a description is an error that names the function
and the fix, never a schema with a gap. The schema is what `transformers.utils.get_json_schema` gives for the same function, without its
`return` part, which no engine reads.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin

from harness_rl.errors import UserError

Schema = dict[str, Any]

_SCALARS: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_CONTAINERS: dict[Any, str] = {list: "array", tuple: "array", dict: "object"}
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(?P<indent>\s+)\*{0,2}(?P<name>\w+)\s*(?:\([^()]*\))?\s*:\s*(?P<text>.*)$")
_CHOICES = re.compile(r"\(choices:\s*(?P<values>.*?)\)\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Docstring:
    description: str
    arguments: dict[str, str]


def tool_schema(function: Callable[..., Any], owner: str | None = None) -> Schema:
    """The tool in OpenAI's form. `owner` is the class of a method, for messages. Raises UserError."""
    name = function_name(function)
    where = f"tool {owner}.{name}" if owner else f"tool {name}"
    text = inspect.getdoc(_plain(function))
    if not text or not text.strip():
        raise UserError(
            f"{where} has no docstring; say what it does and describe its arguments under 'Args:', or start its name with '_' to hide it"
        )
    doc = parse_docstring(text)
    if not doc.description:
        raise UserError(f"{where}: its docstring does not say what it does; begin it with one sentence for the model")
    properties, required = _parameters(function, doc, where)
    parameters: Schema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": doc.description, "parameters": parameters}}


def function_name(function: Any) -> str:
    """Its own name, seen through `functools.partial`."""
    plain = _plain(function)
    return str(getattr(plain, "__name__", type(plain).__name__))


def _plain(function: Any) -> Any:
    """The function that a `functools.partial` was made of."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def parse_docstring(text: str) -> Docstring:
    """Description and argument descriptions of a Google-style docstring (as `inspect.getdoc` returns it)."""
    lines = inspect.cleandoc(text).splitlines()
    starts = [index for index, line in enumerate(lines) if _SECTION.match(line)]
    description = "\n".join(lines[: starts[0]] if starts else lines).strip()
    arguments: dict[str, str] = {}
    for start, end in pairwise([*starts, len(lines)]):
        if lines[start].strip() in ("Args:", "Arguments:", "Parameters:"):
            arguments |= _arguments(lines[start + 1 : end])
    return Docstring(description, arguments)


def _arguments(lines: list[str]) -> dict[str, str]:
    """`name: text` entries; a line that is indented deeper than the first entry goes on with the entry above it."""
    found: dict[str, list[str]] = {}
    indent: int | None = None
    name = ""
    for line in lines:
        entry = _ARGUMENT.match(line)
        if entry is not None and (indent is None or len(entry["indent"]) <= indent):
            indent = len(entry["indent"])
            name = entry["name"]
            found[name] = [entry["text"].strip()]
        elif name and line.strip():
            found[name].append(line.strip())
    return {name: " ".join(part for part in parts if part) for name, parts in found.items()}


def _parameters(function: Callable[..., Any], doc: Docstring, where: str) -> tuple[dict[str, Schema], list[str]]:
    try:
        hints = typing.get_type_hints(inspect.unwrap(_plain(function)))
    except (NameError, TypeError) as error:
        raise UserError(f"{where}: its type hints cannot be read: {error}") from None
    properties: dict[str, Schema] = {}
    required = []
    for name, parameter in _signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError(f"{where}: *args and **kwargs cannot be shown to a model; name its arguments")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(f"{where}: argument {name} is positional-only, and a model calls by name; remove the '/'")
        if name not in hints:
            raise UserError(f"{where}: argument {name} has no type hint; write {name}: str, or what it is")
        if not doc.arguments.get(name):
            raise UserError(f"{where}: argument {name} is not described; add '{name}: ...' under 'Args:' in its docstring")
        try:
            schema = hint_schema(hints[name])
        except TypeError as error:
            raise UserError(f"{where}: argument {name}: {error}") from None
        properties[name] = _described(schema, doc.arguments[name], f"{where}: argument {name}")
        if parameter.default is parameter.empty:
            required.append(name)
    return properties, required


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Without the receiver of a method that was taken from its class, and without what a partial gives by name."""
    signature = inspect.signature(function)
    bound = function.keywords if isinstance(function, functools.partial) else {}
    parameters = [parameter for name, parameter in signature.parameters.items() if name not in bound]
    if parameters and parameters[0].name == "self" and parameters[0].annotation is inspect.Parameter.empty:
        parameters = parameters[1:]
    return signature.replace(parameters=parameters)


def _described(schema: Schema, text: str, where: str) -> Schema:
    """With its description, from which a trailing `(choices: [...])` becomes an enum."""
    choices = _CHOICES.search(text)
    if choices is not None:
        try:
            values = json.loads(choices["values"])
        except ValueError:
            raise UserError(f'{where}: its choices are not a JSON list; write (choices: ["a", "b"])') from None
        schema = {**schema, "enum": values}
        text = text[: choices.start()].strip()
    return {**schema, "description": text}


def hint_schema(hint: Any) -> Schema:
    """JSON schema of a type hint. Raises TypeError for a type that has none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin is typing.Annotated:
        return hint_schema(arguments[0])
    if origin is Literal:
        return _enum(list(arguments), str(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum([member.value for member in hint], hint.__name__)
    if hint in _SCALARS or hint in _CONTAINERS:
        return {"type": _SCALARS.get(hint) or _CONTAINERS[hint]}
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is list and arguments:
        return {"type": "array", "items": hint_schema(arguments[0])}
    if origin is tuple and len(arguments) > 1 and Ellipsis not in arguments:
        return {"type": "array", "prefixItems": [hint_schema(argument) for argument in arguments]}
    if origin is dict and arguments:
        return {"type": "object", "additionalProperties": hint_schema(arguments[1])}
    shown = getattr(hint, "__name__", None) if isinstance(hint, type) and origin is None else str(hint)
    raise TypeError(
        f"a model cannot be shown the type {shown}; use int, float, str, bool, a Literal or Enum of them, list[...], dict[str, ...], "
        "a tuple of fixed length, or a Union of these"
    )


def _union(arguments: tuple[Any, ...]) -> Schema:
    schemas = [hint_schema(argument) for argument in arguments if argument is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return {**schema, "nullable": True} if type(None) in arguments else schema


def _enum(values: list[Any], shown: str) -> Schema:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise TypeError(f"{shown} has values that are not strings, numbers, booleans or None")
    kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
