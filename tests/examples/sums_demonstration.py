"""What a user of the Open Reward example writes for a warm start: the turns that solve one of the tests' sums."""

from __future__ import annotations

from typing import Any


def demonstration(row: dict[str, Any]) -> list[dict[str, Any]]:
    """See `numbers` of the server (tests/envservers/openreward.py)."""
    total = (row["index"] + 1) + (2 * row["index"] + 3)
    calls = [{"name": "part", "arguments": {"which": 0}}, {"name": "submit", "arguments": {"total": total}}]
    return [*({"content": None, "tool_calls": [call]} for call in calls), {"content": "Done."}]
