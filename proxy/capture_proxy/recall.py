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
    answers = {node_id: turn.response for node_id, turn in graph.turns.items() if turn.meta.get("dialect") == responses.NAME}
    nodes = {answer.get("id"): node_id for node_id, answer in answers.items()}
    known = {item.get("id"): item for answer in answers.values() for item in answer["output"]}
    # From the last exchange back to the first: each is what was asked, and what was answered to it.
    exchanges = [_recalled(_listed(given), known)]
    while before is not None:
        if (node_id := nodes.get(before)) is None:
            raise BadRequest(f"previous_response_id: this session has no response {before!r}")
        asked = graph.body(node_id)
        exchanges.append([*_recalled(_listed(asked.get("input")), known), *answers[node_id]["output"]])
        before = asked.get("previous_response_id")
    return {**body, "input": [item for exchange in reversed(exchanges) for item in exchange], "previous_response_id": None}


def _recalled(items: list[Any], known: dict[Any, Any]) -> list[Any]:
    """The items, references replaced by what they refer to. Raises `BadRequest`."""
    return [_item(item, known, f"input[{i}]") for i, item in enumerate(items)]


def _item(item: Any, known: dict[Any, Any], where: str) -> Any:
    if not isinstance(item, dict) or item.get("type") != "item_reference":
        return item
    if item.get("id") not in known:
        raise BadRequest(f"{where}: no answer of this session has an item {item.get('id')!r}")
    return known[item["id"]]


def _listed(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return given if isinstance(given, list) else []
