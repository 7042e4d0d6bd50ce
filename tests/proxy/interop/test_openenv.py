"""Our traces in OpenEnv's own classes and theirs in ours; runs in the OpenEnv environment.

The traces are real: a proxy, and OpenEnv's capture server, recorded them in front of the fake engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from openenv.core.harness.capture.server import create_app
from openenv.core.harness.training import TrainingTrace as TheirTrace
from proxy_helpers import BASH, USER, Served, tool_result, total

from capture_proxy.trace import TrainingTrace

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


async def captured(served: Served, engine: FakeEngine) -> TrainingTrace:
    """Turns that are spliced, branched, cut, masked as side calls and retries, and one whose logprobs did not hold up."""
    agent, created = await served.agent()
    engine.say(CALL, style="chars")
    choice = await agent.ask()
    engine.say("It is écrit ✓ \U0001f600.")
    await agent.ask(tool_result(choice, "a.py\nb.py"))
    engine.say("Third.")
    await agent.ask({"role": "user", "content": "And?"})
    agent.messages[1] = {"role": "user", "content": "Rewritten."}
    engine.say("On a branch", finish="length")
    await agent.ask({"role": "user", "content": "More?"})
    engine.say("A title")
    await agent.ask({"role": "user", "content": "Title?"}, tools=())
    engine.fault = "nan"
    engine.say("Logprobs that are none")
    await agent.ask({"role": "user", "content": "Last."})
    engine.fault = None
    await served.admin.seal(created.session_id)
    return await served.admin.trace(created.session_id)


async def test_our_trace_loads_in_openenv_and_comes_back_equal(served: Served, engine: FakeEngine) -> None:
    trace = await captured(served, engine)
    assert [turn.metadata["mask_reason"] for turn in trace.turns] == [None, None, None, None, "auxiliary", "token_count_mismatch"]
    assert len({turn.metadata["branch"] for turn in trace.turns}) > 1 and any(turn.metadata["spliced"] for turn in trace.turns)
    assert not len(trace.turns[-1].completion_token_ids)
    for theirs in (TheirTrace.model_validate_json(trace.to_json()), TheirTrace.model_validate(json.loads(trace.to_json()))):
        for turn, other in zip(trace.turns, theirs.turns, strict=True):
            assert other.prompt_token_ids + other.completion_token_ids == total(turn)
            assert other.per_token_logps == turn.per_token_logps.tolist()
            assert other.loss_mask == turn.loss_mask.tolist()
        assert TrainingTrace.from_json(theirs.model_dump_json()) == trace


async def test_their_capture_loads_in_ours_and_says_the_same_of_the_same_conversation(served: Served, engine: FakeEngine) -> None:
    """Each server captures the same two turns and side call; where both train, the tokens are the same."""

    async def converse(post: Callable[[dict[str, Any]], Any]) -> None:
        engine.say(CALL)
        engine.say("Two files.")
        messages: list[dict[str, Any]] = list(USER)
        first = (await post({"model": "policy", "messages": messages, "tools": [BASH]}))["choices"][0]
        result = tool_result(first, "a.py\nb.py")
        await post({"model": "policy", "messages": [*messages, first["message"], result], "tools": [BASH]})

    agent, created = await served.agent()

    async def ask_ours(body: dict[str, Any]) -> Any:
        status, answer = await agent.post(body)
        assert status == 200, answer
        return answer

    await converse(ask_ours)
    ours = await served.admin.trace(created.session_id)

    app = create_app(llm_url=engine.url, model="policy", capture_level="tokens")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://openenv") as http:
        session = (await http.post("/sessions", json={"sampling": {"temperature": 1.0}})).json()["session_id"]

        async def ask_theirs(body: dict[str, Any]) -> Any:
            answer = await http.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {session}"})
            assert answer.status_code == 200, answer.text
            return answer.json()

        await converse(ask_theirs)
        entries = (await http.get(f"/sessions/{session}/trace_entries")).json()["entries"]
    theirs = TheirTrace.from_entries(entries)
    loaded = TrainingTrace.from_json(theirs.model_dump_json())
    assert len(loaded.turns) == len(ours.turns) == 2
    for turn, other in zip(ours.turns, loaded.turns, strict=True):
        for name in ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask"):
            assert getattr(turn, name).tolist() == getattr(other, name).tolist(), name
    assert TheirTrace.model_validate_json(loaded.to_json()) == theirs
    assert TrainingTrace.from_bytes(loaded.to_bytes()) == loaded


GOOD: dict[str, Any] = {
    "node_id": "n1", "prompt_token_ids": [10, 11], "completion_token_ids": [20, 21, 22], "per_token_logps": [-0.5, -0.25, 0.0],
    "loss_mask": [0, 0, 1, 0, 1], "request": {}, "response": {}, "metadata": {},
}  # fmt: skip


def accepts(load: Callable[[str], Any], document: Any) -> bool:
    try:
        load(json.dumps(document))
    except ValueError:
        return False
    return True


def verdicts(turn: dict[str, Any], **top: Any) -> tuple[bool, bool]:
    """Whether we, and they, accept a document with this one turn."""
    document = {"schema_version": 1, "turns": [turn], **top}
    return accepts(TrainingTrace.from_json, document), accepts(TheirTrace.model_validate_json, document)


@pytest.mark.parametrize(
    "change",
    [
        {"node_id": ""}, {"node_id": 7}, {"prompt_token_ids": []}, {"prompt_token_ids": [10, -1]}, {"prompt_token_ids": [10, True]},
        {"prompt_token_ids": [10, 11.0]}, {"completion_token_ids": [20, 21]}, {"per_token_logps": [-0.5, -0.25]},
        {"per_token_logps": [-0.5, -0.25, 0.1]}, {"per_token_logps": [-0.5, -0.25, float("nan")]},
        {"per_token_logps": [-0.5, -0.25, float("-inf")]}, {"per_token_logps": [-0.5, -0.25, None]}, {"per_token_logps": [-0.5, False, -1]},
        {"loss_mask": [0, 0, 1, 0]}, {"loss_mask": [0, 1, 1, 0, 1]}, {"loss_mask": [0, 0, 2, 0, 1]}, {"loss_mask": [0, 0, True, 0, 1]},
        {"loss_mask": [0, 0, 1.0, 0, 1]}, {"request": []}, {"metadata": None}, {"reward": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_both_refuse(change: dict[str, Any]) -> None:
    assert verdicts({**GOOD, **change}) == (False, False)


@pytest.mark.parametrize(
    "change",
    [
        {}, {"per_token_logps": [-1, 0, -2]}, {"loss_mask": [0, 0, 0, 0, 0]},
        {"completion_token_ids": [], "per_token_logps": [], "loss_mask": [0, 0]},
    ],
    ids=str,
)  # fmt: skip
def test_both_accept(change: dict[str, Any]) -> None:
    assert verdicts({**GOOD, **change}) == (True, True)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": [10, 2**31]},  # no vocabulary has it, and our ids are int32
        {"per_token_logps": [-0.5, -0.25, -1e39]},  # finite as float64 only
    ],
    ids=str,
)
def test_they_are_laxer(change: dict[str, Any]) -> None:
    assert verdicts({**GOOD, **change}) == (False, True)


@pytest.mark.parametrize("field", ["request", "response", "metadata"])
def test_a_missing_record_is_an_error_to_us_only(field: str) -> None:
    assert verdicts({name: value for name, value in GOOD.items() if name != field}) == (False, True)


def test_versions_and_names_of_turns() -> None:
    assert verdicts(GOOD, schema_version=2) == (False, False)
    assert verdicts(GOOD, schema_version="1") == (False, False)
    assert verdicts(GOOD, schema_version=True) == (False, True)
    assert verdicts(GOOD, turns=[GOOD, GOOD]) == (False, False)
    assert verdicts(GOOD, extra=1) == (False, False)


def test_logprobs_of_theirs_become_the_nearest_single() -> None:
    """Theirs are float64; ours are what the engine has, and every one of ours is exact in theirs."""
    loaded = TrainingTrace.from_json(json.dumps({"turns": [{**GOOD, "per_token_logps": [-0.1, -1e-50, 0.0]}]}))
    assert loaded.turns[0].per_token_logps.tolist() == [-0.10000000149011612, 0.0, 0.0]
    assert TheirTrace.model_validate_json(loaded.to_json()).turns[0].per_token_logps == [-0.10000000149011612, 0.0, 0.0]
