"""A Harbor task as an environment: real trials in real sandboxes, played by hand and by a session. Needs root."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from environments.bench import a_bench, call

from harness_rl.errors import UserError
from harness_rl.sandboxes.reaper import audit
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.environments import EnvironmentKind
from harness_rl.sessions.harbor_environment import HarborEnvironment, task_rows
from sessions.real import HONEST, write_task

WRITE = "echo hello > hello.txt"


@pytest.fixture
def task(tmp_path: Path) -> str:
    return str(write_task(tmp_path / "task"))


@pytest.fixture
async def environment() -> AsyncIterator[HarborEnvironment]:
    async with HarborEnvironment(command_s=5.0, output_chars=200) as made:
        yield made
    assert audit().total == 0


async def test_the_verifier_pays_what_was_done_in_the_sandbox(environment: HarborEnvironment, task: str) -> None:
    assert await environment.reset(task) == "Write the word hello to hello.txt."
    assert await environment.bash("pwd; cat hello.txt") == "/app\ncat: hello.txt: No such file or directory\n[exit code 1]"
    assert await environment.bash(WRITE) == ""
    assert await environment.get_reward() == 1.0
    with pytest.raises(RuntimeError, match="the episode is over"):
        await environment.bash("true")
    # The next episode has a sandbox of its own.
    await environment.reset(task)
    assert await environment.bash("ls") == ""
    assert await environment.get_reward() == 0.0


async def test_what_a_policy_plants_pays_nothing(environment: HarborEnvironment, tmp_path: Path) -> None:
    slow = write_task(tmp_path / "slow", test=HONEST + "sleep 1\n")  # long enough for whoever still runs to write over its verdict
    await environment.reset(str(slow))
    await environment.bash("mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo 'echo 1' > /tests/test.sh")
    await environment.bash("(while sleep 0.05; do echo 1 > /logs/verifier/reward.txt; done) >/dev/null 2>&1 &")
    assert await environment.get_reward() == 0.0


async def test_a_verdict_by_programs_that_the_policy_replaced_pays_nothing(environment: HarborEnvironment, task: str) -> None:
    await environment.reset(task)
    await environment.bash(f"{WRITE}; printf '#!/bin/sh\\necho hello\\n' > /usr/bin/cat")
    assert await environment.get_reward() == 0.0
    trusting = HarborEnvironment(tampered="keep")
    async with trusting:
        await trusting.reset(task)
        await trusting.bash(f"{WRITE}; printf '#!/bin/sh\\necho hello\\n' > /usr/bin/cat")
        assert await trusting.get_reward() == 1.0


async def test_commands_are_bounded_in_time_and_output(environment: HarborEnvironment, task: str) -> None:
    await environment.reset(task)
    assert (await environment.bash("sleep 60")).endswith("[exit code 124]")
    shown = await environment.bash("seq 1000")
    assert shown.startswith("1\n2\n") and shown.endswith("999\n1000\n") and "characters left out" in shown and len(shown) < 300


async def test_no_network_and_no_engine_in_reach(environment: HarborEnvironment, task: str) -> None:
    await environment.reset(task)
    assert "exit code" in await environment.bash("exec 3<>/dev/tcp/127.0.0.1/18080")
    assert "exit code" in await environment.bash("timeout 3 bash -c 'exec 3<>/dev/tcp/1.1.1.1/53'")


async def test_an_episode_that_is_given_up_is_not_graded(tmp_path: Path) -> None:
    graded = write_task(tmp_path / "graded", test="#!/bin/bash\nsleep 25\n")
    environment = HarborEnvironment()
    await environment.reset(str(graded))
    await asyncio.wait_for(environment.__aexit__(), 15)
    assert audit().total == 0


async def test_an_episode_that_is_given_up_leaves_nothing(task: str) -> None:
    environment = HarborEnvironment()
    async with environment:
        await environment.reset(task)
        await environment.bash("setsid sleep 1000 >/dev/null 2>&1 &")
        assert await environment.bash("pgrep -fx 'sleep 1000' >/dev/null && echo there") == "there\n"
        await environment.reset(task)  # without asking for its reward
        assert await environment.bash("pgrep -fx 'sleep 1000' || echo gone") == "gone\n"
    assert audit().total == 0


async def test_a_task_whose_verifier_says_nothing_has_no_reward(environment: HarborEnvironment, tmp_path: Path) -> None:
    silent = write_task(tmp_path / "silent", test="#!/bin/bash\ntrue\n")
    await environment.reset(str(silent))
    with pytest.raises(RolloutFailure, match="verifier"):
        await environment.get_reward()


async def test_tasks_that_it_cannot_play_are_refused_by_name(environment: HarborEnvironment, tmp_path: Path) -> None:
    steps = write_task(tmp_path / "steps")
    (steps / "task.toml").write_text((steps / "task.toml").read_text() + '\n[[steps]]\nname = "one"\n')
    (steps / "steps" / "one").mkdir(parents=True)
    (steps / "steps" / "one" / "instruction.md").write_text("Do it.")
    with pytest.raises(UserError, match="steps: it has several steps"):
        await environment.reset(str(steps))


async def test_a_session_plays_it_and_a_broken_one_leaves_no_sandbox(tmp_path: Path) -> None:
    rows = task_rows(write_task(tmp_path / "task"))
    async with a_bench(tmp_path / "bench") as bench:
        factory = bench.factory(HarborEnvironment, rows=rows)
        bench.engine.say(call("bash", command=WRITE))
        bench.engine.say("Done.")
        session = await bench.play(factory)
        assert session.verify().env_reward == 1.0
        assert "<|im_start|>user\nWrite the word hello to hello.txt.<|im_end|>" in bench.prompts()[0]
        assert [turn.metadata["mask_reason"] for turn in session.fetch_training_trace().turns] == [None, None]
        bench.engine.say(call("bash", command="sleep 100"))
        running = await bench.session(factory)
        task = asyncio.create_task(running.run())
        async with asyncio.timeout(60):
            while len(bench.engine.sampled) < 3:
                await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await running.close()
        await factory.close()
    assert audit().total == 0


def test_its_rows_and_its_one_tool(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_task(tmp_path / name, test=HONEST)
    rows = task_rows(tmp_path)
    assert [row["task_name"] for row in rows] == ["a", "b"] and rows[0]["task_path"] == str(tmp_path / "a")
    kind = EnvironmentKind(HarborEnvironment)
    assert [schema["function"]["name"] for schema in kind.schemas] == ["bash"] and kind.has_reward
    assert list(kind.schemas[0]["function"]["parameters"]["properties"]) == ["command"]
