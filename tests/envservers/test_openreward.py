"""The Open Reward example over real HTTP. Its server is played by one that keeps the standard's routes and events (openreward.py)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import train_openreward
from environments.bench import Bench, call
from envs import openreward
from envs.openreward import client as clients
from envs.openreward.client import OpenReward, ToolError, events
from envs.openreward.environment import _content, _method
from envservers.openreward import TASKS, numbers
from hypothesis import given
from hypothesis import strategies as st

from harness_rl.errors import Cause, UserError
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.openenv_servers import openenv_server


@pytest.fixture(scope="module")
def sums() -> Iterator[str]:
    with openenv_server(app="envservers.openreward:app") as url:
        yield url


def prepared(bench: Bench, url: str, tmp_path: Path, *arguments: str) -> Any:
    """The example's own factory, in front of the test's proxy and engine."""
    options = train_openreward.parse(["--env-url", url, "--output-dir", str(tmp_path / "run"), "--model", "m", *arguments])
    factory = train_openreward.trainer(options, OpenReward(url)).factory
    factory.bind(bench.services())
    return factory


def counted(url: str) -> dict[str, int]:
    return dict(httpx.get(f"{url}/counts").json())


async def test_held_out_tasks_are_not_trained(sums: str, tmp_path: Path):
    arguments = ["--env-url", sums, "--output-dir", str(tmp_path / "run"), "--model", "m", "--dataset-size", "2", "--held-out", "2"]
    trainer = train_openreward.trainer(train_openreward.parse(arguments), OpenReward(sums))
    trained, held = trainer.factory.prompt_rows(), trainer._eval.prompt_rows()
    assert (len(trained), len(held)) == (2, 2) and not [row for row in held if row in trained]


async def test_a_whole_episode(bench: Bench, sums: str, tmp_path: Path):
    factory = prepared(bench, sums, tmp_path)
    assert len(factory.prompt_rows()) == TASKS
    for text in (call("part", which=0), call("part", which=5), call("submit", total=sum(numbers(3))), call("part", which=1)):
        bench.engine.say(text)
    session = await bench.play(factory, factory.prompt_rows()[3])
    first, part, wrong, right, after = bench.prompts()
    assert "Play 3: add up.\nThere are 2 parts." in first
    assert str(numbers(3)[0]) in part.removeprefix(first) and "input validation error" in wrong.removeprefix(part)
    assert "Right." in right.removeprefix(wrong) and "The episode has finished." in after.removeprefix(right)
    assert (session.verify().env_reward, session.outcome().tool_failure_count) == (1.125, 2)
    assert counted(sums)["open"] == 1
    await factory.close()
    assert counted(sums)["open"] == 0


async def test_the_policy_is_offered_what_the_server_says(bench: Bench, sums: str, tmp_path: Path):
    factory = prepared(bench, sums, tmp_path)
    await bench.play(factory)
    part, submit = (tool["function"] for tool in bench.engine.bodies("/render")[-1]["tools"])
    assert part == {
        "name": "part",
        "description": "One of the numbers.",
        "parameters": {"type": "object", "properties": {"which": {"type": "integer", "description": "which"}}, "required": ["which"]},
    }
    assert (submit["description"], submit["parameters"]["required"]) == ("The sum. It ends the task.", ["total"])
    assert submit["parameters"]["properties"]["total"] == {"type": "integer", "description": "All of them."}
    assert submit["parameters"]["properties"]["unit"] == {"type": "string", "enum": ["one", "dozen"], "description": "unit"}
    assert '"type": "null"' in submit["parameters"]["properties"]["note"]["description"]
    await factory.close()


async def test_an_environment_that_takes_the_last_message(bench: Bench, sums: str, tmp_path: Path):
    factory = prepared(bench, sums, tmp_path, "--environment", "said")
    rewards = []
    for text in (str(sum(numbers(0))), "no idea"):
        bench.engine.say(text)
        rewards.append((await bench.play(factory)).verify().env_reward)
    assert rewards == [1.0, 0.0]
    assert [tool["function"]["name"] for tool in bench.engine.bodies("/render")[-1]["tools"]] == ["part"]
    await factory.close()


async def test_a_call_whose_answer_was_lost_is_asked_for_and_not_made_again(bench: Bench, sums: str, tmp_path: Path):
    factory = prepared(bench, sums, tmp_path)
    before = counted(sums)["calls"]
    bench.engine.say(call("submit", total=sum(numbers(7))))
    session = await bench.play(factory, factory.prompt_rows()[7])
    assert session.verify().env_reward == 1.0
    assert counted(sums)["calls"] == before + 1
    await factory.close()


@pytest.mark.parametrize(
    ("index", "calls", "why"), [(8, 2, "404.*Active environment not found"), (9, 1, "failed on the server: division by zero")]
)
async def test_a_lost_session_has_no_reward(bench: Bench, sums: str, tmp_path: Path, index: int, calls: int, why: str):
    factory = prepared(bench, sums, tmp_path)
    for _ in range(calls):
        bench.engine.say(call("part", which=0))
    with pytest.raises(RolloutFailure, match=why) as caught:
        await bench.play(factory, factory.prompt_rows()[index])
    assert caught.value.cause is Cause.ENVIRONMENT_LOST
    await factory.close()


def test_a_session_gives_signs_of_life_until_it_is_closed(sums: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clients, "PING_S", 0.05)
    session = OpenReward(sums).session("sums", "train", 0)
    before = counted(sums)
    deadline = time.monotonic() + 30
    while counted(sums)["pings"] < before["pings"] + 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    session.close()
    session.close()
    assert counted(sums)["deleted"] == before["deleted"] + 1
    with pytest.raises(openreward.SessionLostError, match="404"):
        session.call("part", {"which": 0})


def test_what_the_server_refuses_is_said(sums: str):
    server = OpenReward(sums)
    with pytest.raises(UserError, match=r"refused POST http://127\.0\.0\.1:\d+/sums/num_tasks: 400: .*Invalid split"):
        openreward.rows(server, "sums", "test")
    with pytest.raises(UserError, match=r"server at http://127\.0\.0\.1:9 does not answer \(.*refused\); start it"):
        OpenReward("http://127.0.0.1:9").environments()
    with pytest.raises(httpx.HTTPStatusError, match="Invalid index"):
        server.session("sums", "train", TASKS)
    session = server.session("sums", "train", 0)
    with pytest.raises(ToolError, match="validation"):
        session.call("part", {})
    session.close()
    assert counted(sums)["open"] == 0


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        ({"name": "reset", "description": "x"}, "its name is taken"),
        ({"name": "get-it", "description": "x"}, "is none for Python"),
        ({"name": "a", "description": "x", "input_schema": {"properties": {"from": {"type": "string"}}}}, "'from' is no name"),
    ],
)
def test_a_tool_that_cannot_be_a_method_is_refused(tool: dict[str, Any], why: str):
    with pytest.raises(UserError, match=why):
        _method(tool)


def test_images_stay_images():
    blocks = [{"type": "text", "text": "See:"}, {"type": "image", "data": "aGk=", "mimeType": "image/png"}]
    assert _content(blocks) == [
        {"type": "text", "text": "See:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
    ]


@given(st.lists(st.tuples(st.sampled_from(["chunk", "end"]), st.lists(st.text("ab: ", max_size=5), min_size=1, max_size=3))))
def test_events_are_read_as_they_were_written(wanted: list[tuple[str, list[str]]]):
    lines = [[f"event: {name}", *(f"data: {line}" for line in data), ": comment", ""] for name, data in wanted]
    assert list(events(itertools.chain.from_iterable(lines))) == [(name, "\n".join(data)) for name, data in wanted]
