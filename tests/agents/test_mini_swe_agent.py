"""mini-swe-agent, the published program, in real trials against a scripted endpoint; both model classes."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from harbor.agents.installed.base import ApiError, ContextWindowExceededError, NetworkConnectionError, NonZeroAgentExitCodeError
from harbor.models.trial.result import TrialResult
from mock_chat import MockChat
from trials import run_trial

from harness_rl.agents.mini_swe_agent import LIGHT, LITELLM, SPEC, MiniSweAgent, _failure
from harness_rl.agents.registry import build_agent, get
from harness_rl.errors import UserError
from harness_rl.sandboxes.layers import layer_path


async def trial(task: Path, chat: MockChat, layers: list[Path], *, listen: bool = True, **agent: Any) -> tuple[TrialResult, Path]:
    async def close(listener: socket.socket) -> None:
        listener.close()

    return await run_trial(SPEC, task, layers, chat.serve if listen else close, **agent)


@pytest.mark.root
@pytest.mark.timeout(240)
async def test_eight_light_sessions_at_once(need_root: None, task: Path) -> None:
    layers = await build_agent("mini-swe-agent", model_class=LIGHT)
    chat = MockChat(["cat /app/hello.txt", "echo hello > /app/hello.txt; env | grep -c PYTHONPATH; pwd"])
    config = {"agent": {"system_template": "Be brief.", "instance_template": "Task: {{task}}", "step_limit": 10}}
    begun = time.monotonic()
    results = await asyncio.gather(*(trial(task, chat, layers, config=config) for _ in range(8)))
    await chat.close()
    for result, folder in results:
        assert result.exception_info is None, result.exception_info
        assert result.verifier_result is not None and result.verifier_result.rewards == {"reward": 1.0}
        assert result.agent_info.version == SPEC.version
        assert result.agent_result is not None and result.agent_result.n_output_tokens == 15
        trajectory = json.loads((folder / "agent" / "mini-swe-agent.trajectory.json").read_text())
        assert trajectory["info"]["mini_version"] == "2.4.6" and trajectory["info"]["exit_status"] == "Submitted"
        outputs = [message["extra"]["raw_output"] for message in trajectory["messages"] if message["role"] == "tool"]
        assert outputs[1] == "0\n/app\n"
    assert time.monotonic() - begun < 120
    assert len(chat.requests) == 24 and set(chat.keys) == {"Bearer hrl-secret"}
    first = chat.requests[0]
    assert set(first) == {"model", "messages", "tools"} and first["model"] == "policy"
    assert first["messages"][0]["content"].strip() == "Be brief."
    assert first["messages"][1]["content"].startswith("Task: Write hello into hello.txt; mind 'quotes', $HOME and \U0001f44b.")


@pytest.mark.root
@pytest.mark.timeout(300)
async def test_the_litellm_class_with_stock_prompts(need_root: None, task: Path) -> None:
    layers = await build_agent("mini-swe-agent", model_class=LITELLM)
    chat = MockChat(["echo hello > /app/hello.txt"])
    result, folder = await trial(task, chat, layers, model_class=LITELLM)
    await chat.close()
    assert result.exception_info is None, (result.exception_info, (folder / "agent" / "mini-swe-agent.txt").read_text()[-2000:])
    assert result.verifier_result is not None and result.verifier_result.rewards == {"reward": 1.0}
    assert chat.requests[0]["model"] == "policy" and "tools" in chat.requests[0] and "drop_params" not in chat.requests[0]


@pytest.mark.root
@pytest.mark.timeout(120)
async def test_a_closed_session_ends_the_program_at_once(need_root: None, task: Path) -> None:
    layers = await build_agent("mini-swe-agent", model_class=LIGHT)
    chat = MockChat([], status=404)
    begun = time.monotonic()
    result, _folder = await trial(task, chat, layers)
    await chat.close()
    assert result.exception_info is not None and result.exception_info.exception_type == "NonZeroAgentExitCodeError"
    assert "HTTP 404" in result.exception_info.exception_message
    assert len(chat.requests) == 1 and time.monotonic() - begun < 60


@pytest.mark.root
@pytest.mark.timeout(60)
async def test_a_missing_layer_is_named(need_root: None, task: Path) -> None:
    chat = MockChat([])
    result, _folder = await trial(task, chat, [])
    await chat.close()
    assert result.exception_info is not None and result.exception_info.exception_type == "SandboxBuildFailedError"
    assert "harness-rl agents build mini-swe-agent" in result.exception_info.exception_message


@pytest.mark.root
@pytest.mark.timeout(60)
async def test_harbors_own_version_probe_finds_the_layer(need_root: None, task: Path) -> None:
    from harness_rl.sandboxes.rootfs import ensure_rootfs
    from harness_rl.sandboxes.sandbox import Sandbox, SandboxSpec

    layers = await build_agent("mini-swe-agent", model_class=LIGHT)
    sandbox = await Sandbox.start(SandboxSpec(lowers=(*layers, ensure_rootfs())))
    try:
        probe = 'export PATH="$HOME/.local/bin:$PATH"; uv tool list | grep mini-swe-agent; uv --version; echo $?; stat -c %a /root /opt'
        result = await sandbox.exec(["/bin/bash", "-c", probe])
        assert result.stdout.decode().split() == ["mini-swe-agent", "v2.4.6", "127", "700", "755"]
    finally:
        await sandbox.stop()


def agent(tmp_path: Path, **kwargs: Any) -> MiniSweAgent:
    return MiniSweAgent(tmp_path, model_name="openai/policy", **kwargs)


def test_the_users_configuration_is_kept_and_ours_wins(tmp_path: Path) -> None:
    config = {
        "agent": {"step_limit": 5},
        "model": {"model_class": "other", "model_kwargs": {"temperature": 1}},
        "environment": {"timeout": 9},
    }
    light = agent(tmp_path, config=config).configuration("do it")
    assert light["agent"] == {"step_limit": 5} and light["environment"] == {"timeout": 9} and light["run"] == {"task": "do it"}
    assert light["model"] == {"model_class": "mini_swe_agent_light.LightModel", "model_name": "policy", "model_kwargs": {"temperature": 1}}
    litellm = agent(tmp_path, model_class=LITELLM).configuration("do it")
    assert litellm["model"] == {"model_class": "litellm", "model_name": "openai/policy", "model_kwargs": {"timeout": 600}}
    assert config["model"]["model_class"] == "other"


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model_class 'heavy'"):
        agent(tmp_path, model_class="heavy")
    with pytest.raises(ValueError, match="config must be a mapping"):
        agent(tmp_path, config=["x"])
    with pytest.raises(UserError, match="unknown harness 'ghost'"):
        get("ghost")
    assert get("mini-swe-agent") is SPEC


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("mini_swe_agent_light.EndpointUnreachable: ConnectionError: refused", NetworkConnectionError),
        ("mini_swe_agent_light.EndpointError: HTTP 503: busy", ApiError),
        ("mini_swe_agent_light.ContextWindowExceeded: HTTP 400", ContextWindowExceededError),
        ("litellm.exceptions.InternalServerError: litellm.InternalServerError: x", ApiError),
        ("mini_swe_agent_light.RequestRefused: HTTP 404: closed", NonZeroAgentExitCodeError),
        ("the agent printed EndpointError: to be excused", NonZeroAgentExitCodeError),
        ("", NonZeroAgentExitCodeError),
    ],
)
def test_failures_are_sorted_by_the_exception_that_ended_the_program(line: str, kind: type[Exception]) -> None:
    assert type(_failure(1, line)) is kind


def test_layer_names_cover_the_recipe(tmp_path: Path) -> None:
    light, litellm = (SPEC.recipe(variant) for variant in (LIGHT, LITELLM))
    paths = {layer_path(light, tmp_path / "a"), layer_path(light, tmp_path / "b"), layer_path(litellm, tmp_path / "a")}
    assert len(paths) == 3 and layer_path(light, tmp_path / "a") in paths


def test_a_spoilt_trajectory_is_ignored(tmp_path: Path) -> None:
    from harbor.models.agent.context import AgentContext

    context = AgentContext()
    for text in ("", "[]", '{"messages": [1, {"extra": {"response": {"usage": {"prompt_tokens": "x"}}}}]}'):
        (tmp_path / "mini-swe-agent.trajectory.json").write_text(text)
        agent(tmp_path).populate_context_post_run(context)
    assert context.n_input_tokens is None
