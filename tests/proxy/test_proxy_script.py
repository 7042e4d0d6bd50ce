"""Demonstrations: scripted turns are tokenised in place, scored by the engine, and marked."""

from __future__ import annotations

from typing import Any

import numpy as np
from fake_engine import END, FakeEngine, logprob_of
from proxy_helpers import BASH, USER, Serve, Served, assert_chain, tool_result

SCRIPT: list[dict[str, Any]] = [
    {"content": "I look.", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]},
    {"content": None, "tool_calls": [{"name": "bash", "arguments": {"command": "echo done"}}]},
]


async def test_scripted_turns_are_given_in_order_scored_and_marked(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent(script=SCRIPT)
    first = await agent.ask()
    assert first["message"]["content"].strip() == "I look."
    assert first["finish_reason"] == "tool_calls"
    second = await agent.ask(tool_result(first, "a"))
    assert second["message"]["tool_calls"][0]["function"]["arguments"] == '{"command": "echo done"}'
    ended = await agent.ask(tool_result(second, "done"))
    assert ended["finish_reason"] == "stop" and "tool_calls" not in ended["message"]
    trace = await served.admin.trace(created.session_id)
    assert len(trace.turns) == 2
    assert_chain(trace)
    for turn in trace.turns:
        assert turn.metadata["origin"] == "demonstration"
        assert turn.metadata["mask_reason"] is None
        assert turn.completion_mask.all()
        assert turn.completion_token_ids[-1] == END
        start = len(turn.prompt_token_ids)
        expected = [logprob_of(int(i), start + n) for n, i in enumerate(turn.completion_token_ids)]
        assert turn.per_token_logps.tolist() == np.array(expected, np.float32).tolist()
        assert turn.metadata["weight_versions"] == [["default", 0, len(turn.completion_token_ids)]]
    shown = engine.tokenizer.decode(trace.turns[0].completion_token_ids.tolist())
    assert shown == 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
    status = await served.admin.status(created.session_id)
    assert status["calls_by_reason"] == {"demonstration": 2, "script_ended": 1}
    assert [finding["code"] for finding in status["findings"]] == ["script_ended"]


async def test_script_position_survives_a_restart(engine: FakeEngine, serve: Serve, tmp_path: Any) -> None:
    served = await serve(engine.url, store=tmp_path / "a")
    agent, created = await served.agent(script=SCRIPT)
    first = await agent.ask()
    await served.proxy.close()
    again = await serve(engine.url, store=tmp_path / "a")
    agent.base = again.url + "/v1"
    second = await agent.ask(tool_result(first, "a"))
    assert second["message"]["tool_calls"][0]["function"]["arguments"] == '{"command": "echo done"}'
    assert len((await again.admin.trace(created.session_id)).turns) == 2


async def test_chat_only_servers_cannot_demonstrate(engine: FakeEngine, serve: Serve) -> None:
    engine.token_routes = False
    served = await serve(engine.url)
    agent, _ = await served.agent(script=SCRIPT)
    status, answer = await agent.post({"model": "m", "messages": USER, "tools": [BASH]})
    assert status == 502
    assert "--enable-scale-out" in answer["error"]["message"]
