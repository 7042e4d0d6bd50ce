"""opencode, the published program, in real trials behind the capture proxy: offline, one conversation, no side call."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from proxy.fake_engine import FakeEngine
from trials import run_trial

from capture_proxy.app import Proxy, agent_app, server
from capture_proxy.auth import key_hash
from capture_proxy.records import Snapshot
from capture_proxy.settings import Settings
from capture_proxy.spec import SessionSpec
from capture_proxy.upstream import Retry
from harness_rl.agents.opencode import SPEC, VERSION, Opencode
from harness_rl.agents.registry import HARNESSES, build_agent, check_name, get
from harness_rl.errors import UserError

SHORT = Path(__file__).parents[2] / "examples" / "configs" / "opencode_short.js"
CONFIG = {"agent": {"build": {"prompt": "Be brief."}}}
SHORT_CONFIG = {"agent": {"build": {"tools": {"*": False, "bash": True}}}, "plugin": [str(SHORT)]}
ANSWERS = (
    'I look.\n<tool_call>{"name": "bash", "arguments": {"command":  "ls -a", "description": "d"}}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": {"command": "echo hello > hello.txt; pwd", "description": "d"}}</tool_call>',
    "All done.",
)


@pytest.mark.root
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("config", "system", "longest"),
    [pytest.param(CONFIG, "Be brief.", 100_000, id="whole"), pytest.param(SHORT_CONFIG, "Solve the task", 1_500, id="short")],
)
async def test_a_task_is_solved_offline_in_one_conversation(
    need_root: None, task: Path, tmp_path: Path, config: dict[str, Any], system: str, longest: int
) -> None:
    layers = await build_agent("opencode")
    async with FakeEngine(max_model_len=100_000) as engine:
        for text in ANSWERS:
            engine.say(text, style="chars")
        settings = Settings((engine.url,), "policy", tmp_path / "store", key_hash("x" * 20), retry=Retry(total_s=1.0, base_s=0.01))
        proxy = Proxy(settings)
        session, key = proxy.create_session(SessionSpec())
        runner = server(agent_app(proxy, session.id), 0.5)
        await runner.setup()

        async def serve(listener: socket.socket) -> None:
            await web.SockSite(runner, listener).start()

        try:
            result, folder = await run_trial(SPEC, task, layers, serve, key, config=config)
            trace, status = await asyncio.to_thread(Snapshot.of(session.graph).trace), session.status()
        finally:
            await runner.cleanup()
            await proxy.close()
    log = (folder / "agent" / "opencode.jsonl").read_text()
    assert result.exception_info is None, (result.exception_info, log[-3000:])
    assert result.verifier_result is not None and result.verifier_result.rewards == {"reward": 1.0}
    assert result.agent_info.version == VERSION and result.agent_result is not None and result.agent_result.n_output_tokens
    assert status["calls_seen"] == len(trace.turns) == len(ANSWERS)
    assert [turn.metadata["role"] for turn in trace.turns] == ["agent"] * len(ANSWERS)
    assert [turn.metadata["branch"] for turn in trace.turns] == [0] * len(ANSWERS)
    assert all(turn.completion_mask.all() for turn in trace.turns)
    assert trace.turns[0].request["messages"][0]["content"].startswith(system)
    assert len(json.dumps(trace.turns[0].request)) < longest
    assert trace.turns[0].request["messages"][1]["content"] == "Write hello into hello.txt; mind 'quotes', $HOME and \U0001f44b.\n"
    assert "/app" in trace.turns[2].request["messages"][-1]["content"]


def agent(tmp_path: Path, **kwargs: Any) -> Opencode:
    return Opencode(tmp_path, model_name="openai/policy", **kwargs)


def test_the_users_configuration_is_kept_and_the_endpoint_is_ours(tmp_path: Path) -> None:
    limit = {"context": 9, "output": 3}
    theirs = {"npm": "evil", "models": {"policy": {"limit": limit, "options": {"a": 1}}}}
    user = {"model": "other/m", "agent": {"title": {"disable": False}}, "provider": {"capture": theirs, "more": {"npm": "x"}}}
    found = agent(tmp_path, config=user).configuration()
    assert found["model"] == "capture/policy" and found["agent"]["title"] == {"disable": False}
    assert found["provider"]["capture"]["npm"] == "@ai-sdk/openai-compatible" and found["provider"]["more"] == {"npm": "x"}
    assert found["provider"]["capture"]["models"]["policy"] == {"limit": limit, "options": {"a": 1}}
    assert agent(tmp_path).configuration()["agent"]["title"] == {"disable": True}


def test_plugins_that_are_files_go_into_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "short.js").write_text("export const P = async () => ({})")
    made = agent(tmp_path, config={"plugin": ["some-package", str(tmp_path / "short.js")]})
    assert made.configuration()["plugin"] == ["some-package", "file:///installed-agent/plugins/1-short.js"]
    with pytest.raises(ValueError, match=r"plugin \./no\.js is not a file"):
        agent(tmp_path, config={"plugin": ["./no.js"]})


def test_spoilt_events_are_passed_over(tmp_path: Path) -> None:
    from harbor.models.agent.context import AgentContext

    good = '{"type": "step_finish", "part": {"tokens": {"input": 7, "output": 2}}}'
    (tmp_path / "opencode.jsonl").write_text(f'{good}\nno json\n[]\n{{"part": {{"tokens": {{"input": "x"}}}}}}\n{good}\n')
    context = AgentContext()
    agent(tmp_path).populate_context_post_run(context)
    assert (context.n_input_tokens, context.n_output_tokens) == (14, 4)


def test_a_wrong_name_or_model_class_is_the_users_mistake() -> None:
    for name, harness in HARNESSES.items():
        assert get(name).variants == harness.model_classes
    with pytest.raises(UserError, match="unknown harness 'ghost'; known: mini-swe-agent, opencode"):
        check_name("ghost")
    with pytest.raises(UserError, match="opencode has no 'light'; it has: default"):
        check_name("opencode", "light")
