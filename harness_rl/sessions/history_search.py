"""Commands of a policy that look for an answer in a repository's history instead of finding one.

Invariant: a flag is a report. It changes no reward: ordinary work reads history too, and what to make of it is the user's to say (a
`rollout_reward_fn` may return None or 0 where `outcome.metrics["rollout/history_search"]` is set).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

_GIT = r"\bgit\b(?:\s+-[cC]\s*\S+|\s+--?[\w-]+(?:=\S+)?)*\s+"
_ELSEWHERE = r"(?:--(?:all|reflog|branches|remotes|tags)\b|\s-g\b|\b(?:origin|upstream|refs)/|@\{|\b(?:FETCH|ORIG|MERGE)_HEAD\b|\bstash\b)"
_SEARCHES = re.compile(
    rf"{_GIT}(?:reflog|fsck|rev-list|cat-file|verify-pack|unpack-objects|for-each-ref|show-ref|unbundle)\b"
    rf"|{_GIT}(?:log|show|diff|checkout|switch|restore|cherry-pick|merge|grep|bisect|format-patch)\b[^\n;|&]*{_ELSEWHERE}"
    rf"|{_GIT}(?:fetch|pull|stash\s+(?:list|show|pop|apply))\b"
    r"|\.git/(?:packed-refs|logs|objects|refs|ORIG_HEAD|FETCH_HEAD)"
)


def searches_history(command: str) -> bool:
    """Whether a shell command reads commits that are not in the history of what is checked out."""
    return _SEARCHES.search(command) is not None


def search_count(messages: Iterable[dict[str, Any]]) -> int:
    """How many tool calls of the assistant messages search the history."""
    return sum(any(searches_history(text) for text in _texts(call)) for message in messages for call in message.get("tool_calls") or [])


def _texts(call: Any) -> Iterator[str]:
    """Every text in a call's arguments, whatever the tool calls them."""
    arguments = (call.get("function") or {}).get("arguments") if isinstance(call, dict) else None
    try:
        todo = [json.loads(arguments) if isinstance(arguments, str) else arguments]
    except ValueError:
        todo = [arguments]
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list):
            todo += value
