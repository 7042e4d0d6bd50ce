"""JSON schemas that an engine may compile into a grammar.

Invariant: no schema that reaches an engine names anything outside itself, so that no validator there can be made to fetch it.
"""

from __future__ import annotations

from typing import Any

from capture_proxy.dialects.wire import BadRequest
from capture_proxy.messages import AgentCall

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def check_references(call: AgentCall) -> None:
    """Raises `BadRequest` for a schema of the call that an engine would compile and that refers to another document."""
    if call.response_format is not None:
        _check(call.response_format, "the answer's schema")
    forced = call.tool_choice not in (None, "auto", "none")
    for tool in call.tools:
        if forced or tool.get("function", {}).get("strict"):
            _check(tool, "tools")


def _check(schema: Any, where: str) -> None:
    todo = [schema]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            for name in _REFERENCES:
                if isinstance(target := item.get(name), str) and not target.startswith("#"):
                    raise BadRequest(f"{where}: {name} {target!r} is not in this schema; nothing is fetched, put it below $defs")
            todo += item.values()
        elif isinstance(item, list):
            todo += item
