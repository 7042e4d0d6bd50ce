"""Side calls of known clients: each rule on the call that it was written for, on a near miss, and switched off or added by a session."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine
from proxy_helpers import BASH, Agent, Served
from pydantic import ValidationError

from capture_proxy import volatile
from capture_proxy.cli import main
from capture_proxy.messages import AgentCall
from capture_proxy.roles import RULES, RoleRules, Rule

SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
CALLS: dict[str, dict[str, Any]] = {
    "opencode_title": {"system": "You are a title generator. You output ONLY a thread title."},
    "opencode_compaction": {"system": "You are a context summarization agent."},
    "opencode_subagent": {"tools": True, "headers": {"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}},
    "claude_quota": {"dialect": "anthropic", "user": "quota", "max_tokens": 1},
    "claude_compaction": {"dialect": "anthropic", "user": "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.", "tools": True},
    "claude_subagent": {"dialect": "anthropic", "tools": True, "headers": {"x-claude-code-agent-id": "a1"}},
    "codex_compaction": {"dialect": "responses", "user": "You are performing a CONTEXT CHECKPOINT COMPACTION."},
    "codex_subagent": {"dialect": "responses", "tools": True, "headers": {"x-openai-subagent": "collab_spawn"}},
    "qwen_memory": {"system": "You are the managed memory extraction subagent.", "tools": True},
    "qwen_compaction": {"user": "You are the component that summarizes a conversation", "tools": True},
    "gemini_router": {"dialect": "gemini", "response_format": SCHEMA},
    "pi_compaction": {"system": "You are a context summarization assistant."},
    "aider_commit": {"system": "You are an expert software engineer that generates concise, one-line Git commit messages"},
}


def call_of(system: str = "You are an agent.", user: str = "Fix it.", tools: bool = False, headers: Any = None, **fields: Any) -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": [{"type": "text", "text": user}]}]
    return AgentCall(fields.pop("dialect", "chat"), "m", messages, [BASH] if tools else [], **fields), headers or {}


def test_every_rule_has_its_call_here() -> None:
    assert [rule.name for rule in RULES] == list(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_rule_knows_its_call(name: str) -> None:
    found = RoleRules().find(*call_of(**CALLS[name]))
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": True},
        {"system": "You are a title generator.", "tools": True},
        {"user": "What is a context summarization agent?"},
        {"user": "fix the quota bug", "max_tokens": 1, "dialect": "anthropic"},
        {"user": "quota", "max_tokens": 1},
        {"system": "CRITICAL: Respond with TEXT ONLY"},
        {"response_format": SCHEMA, "tools": True, "dialect": "gemini"},
        {"response_format": SCHEMA},
        {"headers": {"x-session-id": "ses_1"}},
    ],
)
def test_a_near_miss_is_nobodys_side_call(fields: dict[str, Any]) -> None:
    assert RoleRules().find(*call_of(**fields)) is None


async def turns(served: Served, engine: FakeEngine, **spec: Any) -> list[tuple[str, str | None, str | None]]:
    """Role, rule and mask reason of a first call, a compaction in its own conversation, and what comes after it."""
    agent, created = await served.agent(**spec)
    await agent.ask()
    asked = [*agent.messages, {"role": "user", "content": "The conversation is long.\nSummarise now."}]
    assert (await agent.post({"model": "m", "messages": asked, "tools": [BASH]}))[0] == 200
    after = Agent(agent.base, agent.key, agent.http, [agent.messages[0], {"role": "user", "content": "Summary: all is well."}])
    await after.ask()
    trace = await served.admin.trace(created.session_id)
    return [(turn.metadata["role"], turn.metadata["role_rule"], turn.metadata["mask_reason"]) for turn in trace.turns]


async def test_a_compaction_is_told_from_its_agent_and_trained(served: Served, engine: FakeEngine) -> None:
    rule = {"name": "mine", "role": "compaction", "last_user": "Summarise"}
    assert await turns(served, engine, roles={"add": [rule]}) == [
        ("agent", None, None),
        ("compaction", "mine", None),
        ("agent", None, None),
    ]


def test_a_session_switches_a_rule_off() -> None:
    assert RoleRules(off=["claude_quota"]).find(*call_of(**CALLS["claude_quota"])) is None


async def test_a_session_adds_a_rule_of_its_own(served: Served, engine: FakeEngine) -> None:
    mine = {"name": "mine", "role": "auxiliary", "last_user": "Summarise now."}
    assert (await turns(served, engine, roles={"add": [mine]}))[1] == ("auxiliary", "mine", "auxiliary")


async def test_a_side_call_that_comes_first_is_not_taken_for_the_agent(served: Served, engine: FakeEngine) -> None:
    """Two calls with tools: only the rule can tell which of them is the agent."""
    agent, created = await served.agent()
    memory = [{"role": "system", "content": "You are the managed memory extraction subagent."}, {"role": "user", "content": "Remember."}]
    assert (await agent.post({"model": "m", "messages": memory, "tools": [BASH]}))[0] == 200
    await agent.ask()
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["role"] for turn in trace.turns] == ["auxiliary", "agent"]
    assert [bool(turn.completion_mask.any()) for turn in trace.turns] == [False, True]


async def test_what_follows_a_side_call_is_placed_by_itself(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent(roles={"add": [{"name": "mine", "role": "auxiliary", "last_user": "Summarise"}]})
    await agent.ask({"role": "user", "content": "Summarise."}, tools=())
    await agent.ask({"role": "user", "content": "Now work."}, tools=())
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["role"] for turn in trace.turns] == ["auxiliary", "agent"]
    assert trace.turns[1].metadata["parent"] == trace.turns[0].node_id


def test_a_rule_without_a_condition_and_an_unknown_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="has no condition"):
        Rule(name="all", role="auxiliary")
    with pytest.raises(ValidationError, match="there is no rule 'opencode_titel'; rules: opencode_title"):
        RoleRules(off=["opencode_titel"])


def test_the_rules_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [rule.name for rule in (*RULES, *volatile.RULES)]
    assert "auxiliary" in lines[0] and "'You are a title generator'" in lines[0]
