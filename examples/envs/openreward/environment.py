"""An environment of an Open Reward server as a class for `environment_factory`: one method for each of its tools.

Invariant: what a policy is shown of a tool is what the server says of it, and what the server gives as rewards is summed and nothing else.
An episode whose session is lost has no reward; one that earned none has 0.
"""

from __future__ import annotations

import inspect
import json
import keyword
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from harness_rl.errors import UserError

from .client import OpenReward, Session

_TYPES: dict[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}


class Episode:
    """What all such classes share; their tools are methods that `environment` adds."""

    _server: ClassVar[OpenReward]
    _name: ClassVar[str]
    _split: ClassVar[str]

    def __init__(self) -> None:
        self._session: Session | None = None
        self._reward, self._over = 0.0, False

    def reset(self, index: int, **columns: Any) -> Any:
        self.__exit__()
        self._session = self._server.session(self._name, self._split, index)
        self._reward, self._over = 0.0, False
        unknown = {tool["name"] for tool in self._session.tools["tools"]} - set(dir(self))
        if unknown:
            raise UserError(
                f"{self._name}: task {index} has tools of its own ({', '.join(sorted(unknown))}); only shared tools are offered"
            )
        return _content(self._session.prompt)

    def _call(self, tool: str, arguments: dict[str, Any]) -> Any:
        output = self._opened.call(tool, arguments)
        self._reward += output.get("reward") or 0.0
        self._over = self._over or bool(output.get("finished"))
        return _content(output["blocks"])

    def _end(self, last: str) -> float:
        """The reward, once the environment was given the last message, where it asks for that."""
        terminal = self._opened.tools.get("terminal_tool")
        if terminal and not self._over:
            self._call(terminal["name"], {terminal["arg"]: last} if terminal.get("arg") else {})
        return self._reward

    @property
    def _opened(self) -> Session:
        if self._session is None:
            raise RuntimeError("reset it first")
        return self._session

    def __enter__(self) -> Episode:
        return self

    def __exit__(self, *_: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


def openreward_reward(completions: list[Any], environments: list[Any], **columns: Any) -> list[float]:
    """For `reward_funcs`: all that the tools gave."""
    return [environment._end(_last(completion)) for completion, environment in zip(completions, environments, strict=True)]


def environment(server: OpenReward, name: str, split: str) -> type[Episode]:
    """The class of episodes in one of the server's environments. Raises UserError."""
    methods = {tool["name"]: _method(tool) for tool in server.tools(name)["tools"]}
    return type(name, (Episode,), {**methods, "_server": server, "_name": name, "_split": split})


def rows(server: OpenReward, name: str, split: str) -> list[dict[str, Any]]:
    """One for each task; its prompt is what `reset` returns."""
    return [{"prompt": [{"role": "user", "content": ""}], "index": index} for index in range(server.num_tasks(name, split))]


def _method(tool: Mapping[str, Any]) -> Callable[..., Any]:
    name, schema = str(tool["name"]), tool.get("input_schema") or {}
    where = f"the environment's tool {name!r}"
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_") or hasattr(Episode, name):
        raise UserError(f"{where} cannot be a method: its name is taken, or is none for Python")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    parameters, described = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)], []
    for argument, about in sorted(properties.items(), key=lambda item: item[0] not in required):
        if not argument.isidentifier() or keyword.iskeyword(argument):
            raise UserError(f"{where}: its argument {argument!r} is no name for Python")
        default = inspect.Parameter.empty if argument in required else about.get("default")
        hint = _TYPES.get(str(about.get("type")), Any)
        parameters.append(inspect.Parameter(argument, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default))
        described.append(f"    {argument}: {_description(argument, about)}")

    def method(self: Episode, **arguments: Any) -> Any:
        return self._call(name, arguments)

    method.__name__, method.__doc__ = name, "\n".join([" ".join(str(tool["description"] or name).split()), "", "Args:", *described])
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    method.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters[1:]}
    return method


def _description(argument: str, about: Mapping[str, Any]) -> str:
    """In one line; what a type hint cannot say of it stands there as JSON."""
    text = " ".join(str(about.get("description") or about.get("title") or argument).split())
    if "enum" in about:
        return f"{text} (choices: {json.dumps(about['enum'])})"
    return text if about.get("type") in ("string", "integer", "number", "boolean") else f"{text}; JSON schema: {json.dumps(about)}"


def _content(blocks: list[dict[str, Any]]) -> Any:
    """A text, or content blocks where there are images among them."""
    if all(block["type"] == "text" for block in blocks):
        return "\n".join(str(block["text"]) for block in blocks)
    return [_block(block) for block in blocks]


def _block(block: Mapping[str, Any]) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    return {"type": "image_url", "image_url": {"url": f"data:{block['mimeType']};base64,{block['data']}"}}


def _last(completion: Any) -> str:
    """What the policy said last."""
    if isinstance(completion, str):
        return completion
    said = [message.get("content") for message in completion if message["role"] == "assistant"]
    return said[-1] if said and isinstance(said[-1], str) else ""
