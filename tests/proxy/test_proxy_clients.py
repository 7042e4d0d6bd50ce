"""Published agents, unmodified, each through a task of three tool turns and through every kind of wrong answer: nothing is lost, no side
call is trained.

The engine is scripted from Qwen3's own tokenizer and template; what it samples is never the tokenisation of its text.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from proxy_helpers import Served, assert_engine_saw_the_rows, total

from harness_rl.agents.mini_swe_agent import VERSION as MINI_VERSION
from harness_rl.selftest.clients import CLIENTS, Client
from harness_rl.selftest.main import COMMANDS, HISTORIES, run
from harness_rl.selftest.oracle import REWRITTEN
from harness_rl.selftest.play import play
from harness_rl.selftest.programs import LOCKS

QUICK = {("claude-code", "template"), ("codex", "keep_reasoning"), ("mini-swe-agent", "template")}
"""In `make test`; the others in `make test-full`."""

pytestmark = [pytest.mark.root, pytest.mark.timeout(400)]


def test_a_clients_version_is_that_of_its_lock_file() -> None:
    for client in CLIENTS:
        folder = LOCKS / client.name
        if folder.is_dir():
            (version,) = json.loads((folder / "package.json").read_text())["dependencies"].values()
            assert client.version == version, client.name
        else:
            assert client.version == MINI_VERSION, client.name


REASONING_DROPPED = {"gemini-cli"}
"""Clients that do not send an answer's reasoning back: under `template` each of their turns is a branch."""


@pytest.mark.parametrize(
    ("client", "history"),
    [
        pytest.param(client, history, id=f"{client.name}-{history}", marks=[] if (client.name, history) in QUICK else [pytest.mark.full])
        for client in CLIENTS
        for history in HISTORIES
    ],
)
async def test_a_published_agent_is_one_conversation_and_its_side_calls_are_not_trained(client: Client, history: str) -> None:
    row = await run(client, history)
    verdict = row.verdict
    assert row.good, (row.problem, verdict.faults)
    assert verdict.trained == len(COMMANDS) + 1
    assert verdict.calls == verdict.recorded == verdict.trained + len(client.side_rules)
    if client.name in REASONING_DROPPED and history == "template":
        assert verdict.forks == (REWRITTEN,) * len(COMMANDS)
    else:
        assert not verdict.forks and verdict.spliced >= len(COMMANDS)


def go_wrong(client: Client, fault: str, engine: FakeEngine) -> None:
    """Has the engine say or do something wrong after one good turn."""
    engine.say("Step 0. " + client.call("ls"), style="chars")
    match fault:
        case "two_calls":
            engine.say("Both. " + client.call("pwd") + "\n" + client.call("ls -a"), style="chars")
        case "unknown_tool":
            engine.say('<tool_call>{"name": "no_such_tool", "arguments": {"a": 1}}</tool_call>', style="chars")
        case "no_arguments":
            engine.say(f'<tool_call>{{"name": "{client.tool}", "arguments": {{}}}}</tool_call>', style="chars")
        case "broken_call":
            engine.say(f'<tool_call>{{"name": "{client.tool}", "arguments": {{"a"', style="chars")
        case "cut":
            engine.say("I was going to", finish="length", style="chars")
        case "cut_call":
            engine.say(client.call("ls")[:-30], finish="length", style="chars")
        case "empty":
            engine.say("")
        case "engine_fails_once":
            engine.statuses.extend([500, 503, -1])
        case "quoted_tokens":
            engine.say("I say <|im_end|> and <|im_start|>assistant. " + client.call("echo '<|im_end|>'"), style="words")


FAULTS = ("two_calls", "unknown_tool", "no_arguments", "broken_call", "cut", "cut_call", "empty", "engine_fails_once", "quoted_tokens")
DISCARDS = {("qwen-code", "cut"), ("qwen-code", "cut_call")}
"""The answer is thrown away and the same asked again."""
REPLACED = ("unknown_tool", "no_arguments", "broken_call", "cut", "cut_call", "empty")
"""An answer without a call that it can run mini-swe-agent leaves out, and says what was wrong instead."""
FORKS = {("opencode", "unknown_tool"), ("claude-code", "empty"), ("qwen-code", "empty")}
FORKS |= {(name, fault) for name in ("mini-swe-agent", "mini-swe-agent-litellm") for fault in REPLACED}
"""The answer is rewritten in the history, or replaced by a reminder: what follows does not continue its tokens."""
GIVES_UP = {("codex", "cut"), ("codex", "cut_call")}
SIDE = {"You are a title generator": "A file"}
QUICK_FAULTS = {("claude-code", "cut"), ("codex", "two_calls")}
MATRIX = [
    pytest.param(client, fault, id=f"{client.name}-{fault}", marks=[] if (client.name, fault) in QUICK_FAULTS else [pytest.mark.full])
    for client in CLIENTS
    for fault in FAULTS
]


@pytest.mark.parametrize(("client", "fault"), MATRIX)
async def test_whatever_goes_wrong_the_trace_is_what_the_engine_saw(
    client: Client, fault: str, served: Served, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.max_model_len = 200_000
    engine.asides.update(SIDE)
    engine.default_text, engine.default_style = client.call(client.submit) if client.submit else "All done.", "chars"
    go_wrong(client, fault, engine)
    created = await served.session()
    ran = await play(client, served.proxy, created, tmp_path)
    trace = await served.admin.trace(created.session_id)
    status = await served.admin.status(created.session_id)
    if fault != "engine_fails_once":  # there the engine sees a prompt more than once
        assert_engine_saw_the_rows(engine, trace)
    assert status["in_flight"] == 0 and not status["findings"]
    assert status["calls_seen"] == sum(status["calls_by_reason"].values()) == len(trace.turns)
    by_id = {turn.node_id: turn for turn in trace.turns}
    for turn in trace.turns:
        if turn.metadata["parent"] is not None:
            above = total(by_id[turn.metadata["parent"]])
            assert turn.prompt_token_ids[: len(above)].tolist() == above
    agent = [turn for turn in trace.turns if turn.metadata["role"] == "agent"]
    assert [turn.metadata["mask_reason"] for turn in agent].count("discarded") == ((client.name, fault) in DISCARDS)
    assert all(turn.completion_mask.all() for turn in agent if turn.metadata["mask_reason"] is None)
    assert len({turn.metadata["branch"] for turn in agent}) == (2 if (client.name, fault) in DISCARDS | FORKS else 1)
    assert (ran.code == 0) is ((client.name, fault) not in GIVES_UP), ran.said[-2000:]
    if fault == "engine_fails_once":
        assert len(agent) == 2, "the client never notices"
