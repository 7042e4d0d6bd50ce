"""Episodes without a model: a person, a script or a list of turns plays, to try an environment and its rewards before anything is trained.

Invariant: it is the loop, the tools, the errors and the rewards of a training episode; only the policy differs, and nothing is captured:
there are no tokens, and reward functions get empty `completion_ids`.
"""

from __future__ import annotations

import inspect
import itertools
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness_rl.errors import UserError
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.environment_session import sample_of
from harness_rl.sessions.environments import EnvironmentKind, begun, tools_of
from harness_rl.sessions.ownthread import OwnThread
from harness_rl.sessions.rewardfuncs import Scored, WeightedReward, score_sample
from harness_rl.sessions.toolloop import Answer, Episode, Message, Policy, play
from harness_rl.sessions.toolschema import Schema

Call = dict[str, Any]
"""`{"name": ..., "arguments": {...}}`"""
Turn = str | Call | Sequence[Call] | None
"""What a scripted policy answers: a text (or None) ends the episode, calls go on with it."""


@dataclass
class Played:
    """One episode, and what it is worth."""

    episode: Episode | None
    """None where it did not begin."""
    scored: Scored | None
    failure: RolloutFailure | None

    @property
    def reward(self) -> float | None:
        return self.scored.reward if self.scored is not None else None


async def play_episode(
    kind: EnvironmentKind, rewards: Sequence[WeightedReward], row: Mapping[str, Any], policy: Policy, max_calls: int = 0
) -> Played:
    """Play one episode of `kind` on `row` (its columns, and a prompt if it has one). A failure is part of what is returned."""
    episode: Episode | None = None
    instance, whole = None, False
    try:
        instance = await kind.take()
        episode = Episode(await begun(instance, kind, row, row))
        await play(policy, episode, tools_of(instance, kind), kind.schemas, max_calls)
        scored = await score_sample(rewards, sample_of(row, episode, instance, kind, []))
        whole = True
        return Played(episode, scored, None)
    except RolloutFailure as failure:
        return Played(episode, None, failure)
    finally:
        if instance is not None:
            if whole:
                kind.put(instance)
            else:
                await instance.retire()


class Scripted:
    """A function `(messages, tools) -> turn` as a policy; it may be async. Raises UserError for what is no turn."""

    def __init__(self, function: Callable[[list[Message], list[Schema]], Any]) -> None:
        self._function = function
        self._serial = itertools.count()

    async def ask(self, messages: list[Message], tools: list[Schema]) -> Answer:
        try:
            turn: Any = self._function(messages, tools)
            turn = await turn if inspect.isawaitable(turn) else turn
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            raise UserError(f"the policy raised {type(error).__name__}: {error}") from None
        return answer_of(turn, self._serial)


class Turns:
    """The turns of a demonstration, one after the other; after the last, the end."""

    def __init__(self, turns: Sequence[Mapping[str, Any]]) -> None:
        self._turns = iter(turns)
        self._serial = itertools.count()

    async def ask(self, messages: list[Message], tools: list[Schema]) -> Answer:
        turn = next(self._turns, {})
        return answer_of(turn.get("tool_calls") or turn.get("content"), self._serial)


class Person:
    """Shows what is new, and reads a call or an answer from a line: `guess crane`, `move {"direction": "left"}`, `say Done.`"""

    def __init__(self, say: Callable[[str], None], read: Callable[[], str]) -> None:
        self._say, self._read = say, read
        self._keyboard = OwnThread("keyboard")
        self._shown = 0
        self._serial = itertools.count()

    async def ask(self, messages: list[Message], tools: list[Schema]) -> Answer:
        if self._shown == 0:
            self._say(described(tools))
        for message in messages[self._shown :]:
            if message["role"] != "assistant":
                self._say(f"[{message['role']}] {message['content']}")
        self._shown = len(messages)
        while True:
            try:
                line = (await self._keyboard.call(self._read)).strip()
            except EOFError:
                line = ""
            if line == "help":
                self._say(described(tools))
                continue
            try:
                return answer_of(read_line(line, tools), self._serial)
            except UserError as error:
                self._say(str(error))


def answer_of(turn: Turn, serial: itertools.count[int]) -> Answer:
    """The turn as a model's message. Raises UserError."""
    if turn is None or isinstance(turn, str):
        return Answer({"role": "assistant", "content": turn or ""}, "stop")
    calls: list[Any] = [turn] if isinstance(turn, Mapping) else list(turn) if isinstance(turn, Sequence) else []
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise UserError(f'the policy answered {turn!r:.100}; answer a text, None, or calls: {{"name": ..., "arguments": {{...}}}}')
    made = [
        {
            "id": f"call-{next(serial)}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call.get("arguments") or {})},
        }
        for call in calls
    ]
    return Answer({"role": "assistant", "content": None, "tool_calls": made}, "tool_calls")


def read_line(line: str, tools: Sequence[Schema]) -> Turn:
    """`say TEXT` or an empty line ends the episode; `TOOL {"json": ...}` and `TOOL value value` (in the order of its arguments) call.

    Raises UserError.
    """
    name, _, rest = line.partition(" ")
    if not line or name == "say":
        return rest
    known = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}
    if name not in known:
        raise UserError(f"there is no tool {name}: {', '.join(known) or 'none'}; `say TEXT` answers, an empty line ends")
    rest = rest.strip()
    if rest.startswith("{"):
        try:
            return {"name": name, "arguments": json.loads(rest)}
        except ValueError as error:
            raise UserError(f"{name}: not JSON: {error}") from None
    try:
        values = shlex.split(rest)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    if len(known[name]) == 1 and len(values) > 1:
        values = [rest]  # the one argument is all of the line
    if len(values) > len(known[name]):
        raise UserError(f"{name} takes {len(known[name])} values ({', '.join(known[name])}), not {len(values)}")
    arguments = {argument: _value(text, known[name][argument]) for argument, text in zip(known[name], values, strict=False)}
    return {"name": name, "arguments": arguments}


def _value(text: str, schema: Schema) -> Any:
    """By the argument's type; what cannot be read stays a text, for the environment to judge."""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def described(tools: Sequence[Schema]) -> str:
    """The tools as a person reads them."""
    lines = []
    for tool in (tool["function"] for tool in tools):
        lines.append(f"{tool['name']}({', '.join(tool['parameters']['properties'])}): {' '.join(tool['description'].split())}")
        for name, schema in tool["parameters"]["properties"].items():
            choices = f" ({', '.join(map(str, schema['enum']))})" if "enum" in schema else ""
            lines.append(f"    {name}: {schema.get('description', '')}{choices}")
    return "\n".join([*lines, "A line calls a tool (guess crane), `say TEXT` answers, an empty line ends, `help` shows this again."])
