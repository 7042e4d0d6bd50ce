"""Tool calls that an engine's parser found and that are not what a client can run: named, so that whoever reads the session knows.

Invariant: a call is passed on as the model made it, or as its dialect writes such a call; it is never repaired and never left unsaid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from capture_proxy.dialects.wire import arguments_object
from capture_proxy.messages import ToolCall

Dispute = Literal["cut", "malformed", "unknown_tool"]


def disputes(calls: tuple[ToolCall, ...], tools: list[dict[str, Any]], finish_reason: str) -> Iterator[tuple[str, Dispute]]:
    """(the tool's name, what is wrong) of each such call: the answer's length cut it, its arguments are no JSON object, or the request
    offers no such tool."""
    offered = {tool["function"]["name"] for tool in tools}
    for at, call in enumerate(calls):
        if arguments_object(call.arguments) is None:
            last = at == len(calls) - 1
            yield call.name, "cut" if last and finish_reason == "length" else "malformed"
        elif call.name not in offered:
            yield call.name, "unknown_tool"
