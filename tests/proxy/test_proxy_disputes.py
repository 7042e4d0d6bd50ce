"""Tool calls that a parser found and no client can run as they are: told as what they are, and passed on as the model made them."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine
from proxy_helpers import ADMIN_KEY, BASH, Served

from capture_proxy.disputes import disputes
from capture_proxy.messages import ToolCall

GOOD, BROKEN = '{"command": "ls"}', '{"command": "ls'


@pytest.mark.parametrize(
    ("calls", "finish", "found"),
    [
        ([("bash", GOOD)], "stop", []),
        ([("bash", "")], "stop", []),
        ([("bash", BROKEN)], "stop", ["malformed"]),
        ([("bash", "[1]")], "stop", ["malformed"]),
        ([("bash", '{"timeout": NaN}')], "stop", ["malformed"]),
        ([("bash", BROKEN)], "length", ["cut"]),
        ([("bash", BROKEN), ("bash", GOOD)], "length", ["malformed"]),
        ([("rm", GOOD)], "stop", ["unknown_tool"]),
        ([("rm", GOOD), ("bash", BROKEN)], "stop", ["unknown_tool", "malformed"]),
    ],
)
def test_each_dispute_by_its_name(calls: list[tuple[str, str]], finish: str, found: list[str]) -> None:
    made = tuple(ToolCall(f"c{n}", name, arguments) for n, (name, arguments) in enumerate(calls))
    assert [what for _, what in disputes(made, [BASH], finish)] == found


async def test_c50_an_unknown_tool_reaches_the_client_and_is_a_finding(served: Served, engine: FakeEngine) -> None:
    """Whether it runs is the client's affair: agents answer an unknown tool with an error that the model learns from."""
    agent, created = await served.agent()
    engine.say('<tool_call>{"name": "delete", "arguments": {"path": "/"}}</tool_call>')
    choice = await agent.ask()
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "delete"
    (turn,) = (await served.admin.trace(created.session_id)).turns
    assert turn.metadata["disputed_tool_calls"] == [["delete", "unknown_tool"]] and turn.completion_mask.all()
    status = await served.admin.status(created.session_id)
    assert status["findings"] == [{"code": "disputed_tool_call", "detail": "unknown_tool: 'delete'", "call": 1}]
    async with served.http.get(served.url + "/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as response:
        assert "capture_proxy_disputed_tool_calls_total 1" in await response.text()
