"""The tool-calling loop under random policies, tools and budgets: what always holds, whatever is said."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from harness_rl.sessions.base import StopReason
from harness_rl.sessions.toolloop import MAX_RESULT_CHARS, Answer, Episode, play

NAMES = ("good", "slow", "fails", "huge", "unknown")
calls = st.tuples(st.sampled_from(NAMES), st.sampled_from(['{"n": 1}', "{}", "", "[1]", "{broken", '{"n": 2}']))
answers = st.tuples(st.lists(calls, max_size=3), st.sampled_from(["stop", "length", "tool_calls"]))


class Policy:
    """Says what it is told; refuses once `budget` answers are given."""

    def __init__(self, script: list[Any], budget: int) -> None:
        self.script, self.budget, self.shown = script, budget, []
        self.said: list[dict[str, Any]] = []

    async def ask(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Answer | None:
        self.shown.append(json.loads(json.dumps(messages)))
        if len(self.said) == min(self.budget, len(self.script)):
            return None
        wanted, finish = self.script[len(self.said)]
        number = len(self.said)
        tool_calls = [
            {"id": f"c{number}.{i}", "type": "function", "function": {"name": name, "arguments": text}}
            for i, (name, text) in enumerate(wanted)
        ]
        self.said.append({"role": "assistant", "content": "...", **({"tool_calls": tool_calls} if tool_calls else {})})
        return Answer(self.said[-1], finish)


@given(st.lists(answers, min_size=1, max_size=6), st.integers(0, 6), st.integers(0, 5))
def test_a_conversation_is_well_formed_and_counts_what_was_executed(script, budget, max_calls):
    executed: list[str] = []

    async def good(arguments: dict[str, Any]) -> Any:
        executed.append("good")
        return arguments.get("n")

    async def slow(arguments: dict[str, Any]) -> Any:
        executed.append("slow")
        await asyncio.sleep(0)
        return [{"type": "text", "text": "slow"}]

    async def fails(arguments: dict[str, Any]) -> Any:
        executed.append("fails")
        raise ValueError("no")

    async def huge(arguments: dict[str, Any]) -> Any:
        executed.append("huge")
        return "x" * (MAX_RESULT_CHARS + 1)

    policy, episode = Policy(script, budget), Episode([{"role": "user", "content": "Play."}])
    tools = {"good": good, "slow": slow, "fails": fails, "huge": huge}
    asyncio.run(play(policy, episode, tools, [], max_calls))

    said = [message for message in episode.completion if message["role"] == "assistant"]
    assert said == policy.said  # everything that was sampled stays
    for before, after in zip(policy.shown, policy.shown[1:], strict=False):
        assert after[: len(before)] == before  # the policy is never shown another past
    at = 0
    for index, message in enumerate(said):
        assert episode.completion[at] == message
        results = episode.completion[at + 1 : at + 1 + len(message.get("tool_calls") or [])]
        if index < len(said) - 1:  # every call of an answer that was followed by another has its result, in order
            assert [result["tool_call_id"] for result in results] == [call["id"] for call in message.get("tool_calls") or []]
            at += 1 + len(results)
    assert episode.completion[at + 1 :] == []  # nothing after the last answer: results that led nowhere are taken back
    known = [name for message in said for call in message.get("tool_calls") or [] if (name := call["function"]["name"]) in tools]
    assert len(executed) <= len(known) and episode.calls.total() >= len(executed)
    assert episode.failures.total() >= executed.count("fails")
    assert episode.unknown == episode.calls["unknown"]
    if max_calls:
        assert len(said) <= max_calls
        if len(said) == max_calls and said and said[-1].get("tool_calls") and episode.exhausted:
            last = [call["function"]["name"] for call in said[-1]["tool_calls"]]
            assert episode.calls.total() == sum(len(message.get("tool_calls") or []) for message in said) - len(last)
    ended_by_itself = bool(said) and not said[-1].get("tool_calls")
    assert (episode.stop is StopReason.FINISHED) == (ended_by_itself and not episode.truncated)
    assert not (episode.truncated and episode.exhausted)
