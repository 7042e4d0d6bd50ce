"""The loop of a white-box episode: ask the policy, run the tools that it calls, show it the results, until it calls none or a budget ends.

Invariant: the conversation holds only what the policy was shown or said. Tool results that did not fit are taken out again and the episode
ends as truncated; a tool that fails is a result that says so; nothing is executed after the last answer that the budget allows.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness_rl.errors import first_error
from harness_rl.sessions.base import RolloutFailure, StopReason

Message = dict[str, Any]
Tool = Callable[[dict[str, Any]], Awaitable[Any]]
"""Runs one call with these arguments. What it raises is shown to the policy, except for a RolloutFailure: that ends the episode."""
MAX_RESULT_CHARS = 4 << 20
"""Of one answer's results: more fits no model's context, and is not sent to find that out."""


@dataclass(frozen=True)
class Answer:
    message: Message
    finish_reason: str
    node_id: str = ""
    """Of the turn in the capture session's trace."""


class Policy(Protocol):
    async def ask(self, messages: list[Message], tools: list[dict[str, Any]]) -> Answer | None:
        """The next assistant message; None where the session's budget is used up. Raises RolloutFailure."""
        ...


@dataclass
class Episode:
    """What became of one conversation; also while it goes on, so that a deadline leaves what there was."""

    prompt: list[Message]
    completion: list[Message] = field(default_factory=list)
    """Everything after the prompt: assistant and tool messages."""
    stop: StopReason = StopReason.FINISHED
    truncated: bool = False
    """A token or length budget ended it."""
    exhausted: bool = False
    """The policy wanted further tool calls than `max_calls` answers allow."""
    calls: Counter[str] = field(default_factory=Counter)
    """Executed tool calls, by the name that the policy gave."""
    failures: Counter[str] = field(default_factory=Counter)
    """Those among them that raised, or could not be made."""
    unknown: int = 0
    """Calls of tools that do not exist."""
    tool_seconds: float = 0.0

    @property
    def messages(self) -> list[Message]:
        return [*self.prompt, *self.completion]


async def play(policy: Policy, episode: Episode, tools: Mapping[str, Tool], schemas: list[dict[str, Any]], max_calls: int) -> None:
    """Play the episode to its end, in place. `max_calls` answers at most (0: no such limit); the calls of the last are not executed."""
    answers = shown = 0
    while True:
        answer = await policy.ask(episode.messages, schemas)
        if answer is None:
            del episode.completion[shown:]
            episode.stop, episode.truncated = StopReason.LIMIT, True
            return
        answers += 1
        episode.completion.append(answer.message)
        shown = len(episode.completion)
        wanted = answer.message.get("tool_calls") or []
        if not wanted:
            if answer.finish_reason == "length":
                episode.stop, episode.truncated = StopReason.LIMIT, True
            return
        if answers == max_calls:
            episode.stop, episode.exhausted = StopReason.LIMIT, True
            return
        results = await _execute(episode, wanted, tools)
        if sum(len(str(message["content"])) for message in results) > MAX_RESULT_CHARS:
            episode.stop, episode.truncated = StopReason.LIMIT, True
            return
        episode.completion += results


async def _execute(episode: Episode, wanted: list[dict[str, Any]], tools: Mapping[str, Tool]) -> list[Message]:
    """The results of one answer's calls, in their order. They start in that order; those that can run beside each other do."""
    started = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(_call(episode, call, tools)) for call in wanted]
    except BaseExceptionGroup as group_error:
        raise first_error(group_error) from None
    finally:
        episode.tool_seconds += time.monotonic() - started
    return [task.result() for task in running]


async def _call(episode: Episode, call: dict[str, Any], tools: Mapping[str, Tool]) -> Message:
    function = call.get("function") or {}
    name = str(function.get("name"))
    episode.calls[name] += 1
    try:
        if name not in tools:
            episode.unknown += 1
            raise LookupError(f"Tool {name} not found.")
        result = await tools[name](_arguments(function.get("arguments")))
    except RolloutFailure:
        raise
    except Exception as error:  # noqa: BLE001 - a tool may raise anything; the policy gets it
        episode.failures[name] += 1
        result = {"error": str(error) or type(error).__name__}
    return {"role": "tool", "tool_call_id": call.get("id"), "name": name, "content": shown_result(result)}


def _arguments(text: Any) -> dict[str, Any]:
    """Raises ValueError: not a JSON object."""
    try:
        arguments = json.loads(text) if isinstance(text, str) and text.strip() else text or {}
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments are not a JSON object: {str(text)[:200]}")
    return arguments


def shown_result(result: Any) -> Any:
    """A tool's result as a message's content: a list of content blocks as it is, anything else as text."""
    if isinstance(result, list) and result and all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in result):
        return result
    return str(result).encode("utf-8", "replace").decode()  # lone surrogates, which no wire can carry, become question marks
