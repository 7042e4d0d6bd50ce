"""What a Responses client leaves to the server to remember: items of earlier answers by their ids, and whole earlier responses.

Invariant: only what this very session was answered is recalled, word for word; an id that the session does not know is refused by name.
"""

from __future__ import annotations

from typing import Any

from capture_proxy.dialects import responses
from capture_proxy.dialects.wire import BadRequest
from capture_proxy.graph import TurnGraph


def expanded(body: dict[str, Any], graph: TurnGraph) -> dict[str, Any]:
    """The body with what it refers to in place, as if the client had sent it all. Raises `BadRequest`."""
    given = body.get("input")
    before = body.get("previous_response_id")
    refers = isinstance(given, list) and any(isinstance(item, dict) and item.get("type") == "item_reference" for item in given)
    if before is None and not refers:
        return body
    items = _listed(given)
    if refers:
        known = {item.get("id"): item for answer in _answers(graph).values() for item in answer["output"]}
        items = [_recalled(item, known, f"input[{i}]") for i, item in enumerate(items)]
    if before is not None:
        items = [*_conversation(before, graph), *items]
    return {**body, "input": items, "previous_response_id": None}


def _conversation(response_id: Any, graph: TurnGraph) -> list[Any]:
    """The input and the output of an earlier response."""
    for node_id, answer in _answers(graph).items():
        if answer.get("id") == response_id:
            asked = expanded(graph.body(node_id), graph)
            return [*_listed(asked.get("input")), *answer["output"]]
    raise BadRequest(f"previous_response_id: this session has no response {response_id!r}")


def _answers(graph: TurnGraph) -> dict[str, dict[str, Any]]:
    return {node_id: turn.response for node_id, turn in graph.turns.items() if turn.meta.get("dialect") == responses.NAME}


def _recalled(item: Any, known: dict[Any, Any], where: str) -> Any:
    if not isinstance(item, dict) or item.get("type") != "item_reference":
        return item
    if item.get("id") not in known:
        raise BadRequest(f"{where}: no answer of this session has an item {item.get('id')!r}")
    return known[item["id"]]


def _listed(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return given if isinstance(given, list) else []
