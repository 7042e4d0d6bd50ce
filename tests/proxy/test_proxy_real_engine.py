"""The same promises against a real vLLM: exact ids over turns, honest logprobs, grammar, chat capture, demonstrations."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest
from proxy_helpers import BASH, USER, Serve, assert_chain, tool_result, total

from capture_proxy.engine import Engine
from capture_proxy.trace import TrainingTrace, hash_ids
from capture_proxy.upstream import Retry

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SCRIPT: list[dict[str, Any]] = [
    {"content": None, "tool_calls": [{"name": "bash", "arguments": {"command": "ls -la"}}]},
    {"content": "All done.", "tool_calls": []},
]


async def scored(url: str, trace: TrainingTrace) -> float:
    """Largest difference between a recorded logprob and the engine's own score of the same tokens in one forward pass."""
    worst = 0.0
    engine = Engine(url, "policy", Retry(), 300.0)
    for turn in trace.turns:
        ids = np.array(total(turn), np.int32)
        again = await engine.score(ids, len(turn.prompt_token_ids))
        worst = max(worst, float(np.abs(again - turn.per_token_logps).max()))
    engine.close()
    return worst


async def test_conversations_of_a_real_model_chain_exactly(real_engine: str, serve: Serve) -> None:
    served = await serve(real_engine)
    for _ in range(2):
        agent, created = await served.agent(limits={"max_output_tokens_per_call": 24})
        for text in ("List the files.", "Why?", "Go on."):
            choice = await agent.ask({"role": "user", "content": text})
            if choice["message"].get("tool_calls"):
                agent.messages.append(tool_result(choice, "ok"))
        trace = await served.admin.trace(created.session_id)
        forks = [turn.metadata["fork_cause"] for turn in trace.turns if turn.metadata["fork_cause"]]
        assert not forks
        assert_chain(trace)
        for turn in trace.turns:
            assert turn.completion_mask.all()
            assert turn.metadata["prompt_hash"] == hash_ids(turn.prompt_token_ids)
            assert turn.metadata["weight_versions"][-1][2] == len(turn.completion_token_ids)
        assert await scored(real_engine, trace) < 2e-3


async def test_grammar_forced_call_is_constrained_and_continues(real_engine: str, serve: Serve) -> None:
    served = await serve(real_engine)
    agent, created = await served.agent(limits={"max_output_tokens_per_call": 64})
    choice = await agent.ask(tool_choice={"type": "function", "function": {"name": "bash"}})
    assert choice["finish_reason"] in ("tool_calls", "length")
    if choice["message"].get("tool_calls"):
        await agent.ask(tool_result(choice, "a.txt"), max_tokens=8)
    trace = await served.admin.trace(created.session_id)
    assert trace.turns[0].metadata["mask_reason"] == "constrained"
    assert not trace.turns[0].loss_mask.any()
    if len(trace.turns) == 2 and not trace.turns[1].metadata["fork_cause"]:
        assert_chain(trace)


async def test_demonstration_is_tokenised_as_the_model_would_sample_it(real_engine: str, serve: Serve) -> None:
    served = await serve(real_engine)
    agent, created = await served.agent(script=SCRIPT)
    first = await agent.ask()
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "ls -la"}'}
    second = await agent.ask(tool_result(first, "a.txt"))
    assert second["message"]["content"] == "All done."
    trace = await served.admin.trace(created.session_id)
    assert_chain(trace)
    assert [turn.metadata["origin"] for turn in trace.turns] == ["demonstration"] * 2
    assert all(turn.completion_mask.all() for turn in trace.turns)
    assert trace.turns[0].completion_token_ids[-1] == trace.turns[1].completion_token_ids[-1]
    assert await scored(real_engine, trace) < 2e-3


async def test_full_window_is_context_length_exceeded(real_engine: str, serve: Serve) -> None:
    served = await serve(real_engine)
    agent, created = await served.agent()
    status, answer = await agent.post({"model": "m", "messages": [{"role": "user", "content": "hello " * 40_000}]})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"limit": 1}


async def test_chat_capture_of_a_real_server(real_engine: str, serve: Serve) -> None:
    served = await serve(real_engine, capture="chat")
    agent, created = await served.agent(limits={"max_output_tokens_per_call": 16})
    await agent.ask()
    await agent.ask({"role": "user", "content": "Go on."})
    trace = await served.admin.trace(created.session_id)
    assert [turn.metadata["mask_reason"] for turn in trace.turns] == [None, None]
    assert await scored(real_engine, trace) < 2e-3


async def test_streamed_answer_of_a_real_model(real_engine: str, serve: Serve) -> None:
    served = await serve(real_engine)
    agent, created = await served.agent(limits={"max_output_tokens_per_call": 16})
    async with openai.AsyncOpenAI(base_url=agent.base, api_key=agent.key, max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=USER, tools=[BASH], stream=True)  # type: ignore[call-overload]
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"trained": 1}
