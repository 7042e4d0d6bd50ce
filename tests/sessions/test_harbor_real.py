"""Sessions with everything real but the engine: Harbor, the sandbox, mini-swe-agent, the proxy process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from capture_proxy.trace import TrainingTrace
from harness_rl.errors import Cause
from harness_rl.sandboxes.ledger import Ledger
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.harbor_session import HarborSession

from .real import HONEST, JSON_ONLY, SUBMIT, act, rig, write_task

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("bwrap") is None, reason="needs root and bubblewrap"),
]


PLANT = """mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{"reward": 1}' > /logs/verifier/reward.json"""


def leftovers() -> list[str]:
    """Sandboxes of this process that are still on record: the entry goes after everything else of a sandbox."""
    return [entry.id for entry in Ledger.at().entries() if entry.owned_by(os.getpid())]


def record(session: HarborSession) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((session.spec.trials_dir / "outcome.json").read_text())
    return data


async def test_reward_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two turns, submitted; environment variables of this process reach neither the sandbox nor are changed."""
    monkeypatch.setenv("OPENAI_API_KEY", "host-secret")
    monkeypatch.setenv("MSWEA_API_KEY", "host-secret")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    environment = dict(os.environ)
    async with rig(tmp_path) as world:
        world.engine.say(act("env > /logs/agent/env.txt; echo hello > hello.txt"))
        world.engine.say(act(SUBMIT))
        session = await world.session(write_task(tmp_path / "task"))
        await session.run()
        outcome = session.outcome()
        assert (outcome.env_reward, outcome.turns, outcome.stop_reason) == (1.0, 2, "finished")
        assert outcome.tool_calls_by_name == {"bash": 2}
        assert outcome.metrics == {"tampered": 0.0, "rollout/truncated": 0.0, "rollout/history_search": 0.0}
        assert [turn.metadata["parent"] for turn in outcome.trace.turns] == [None, outcome.trace.turns[0].node_id]
        assert all(turn.completion_mask.all() for turn in outcome.trace.turns)
        assert outcome.completion[0] == {"role": "system", "content": "You act."}
        folder = session.spec.trials_dir
        assert TrainingTrace.from_bytes((folder / "trace.bin").read_bytes()) == outcome.trace
        inside = (folder / "trial/agent/env.txt").read_text()
        assert "host-secret" not in inside
        assert "OPENAI_BASE_URL=http://127.0.0.1:18080/v1" in inside
        for path in folder.rglob("*"):
            assert not path.is_file() or session.capture.api_key.encode() not in path.read_bytes(), path
        assert await world.agent_call(session) == 404, "late calls are refused"
        assert record(session)["capture"]["calls_by_reason"] == {"trained": 2}
    assert leftovers() == []
    assert dict(os.environ) == environment


async def test_demonstration(tmp_path: Path) -> None:
    async with rig(tmp_path) as world:
        factory = world.factory(write_task(tmp_path / "task"))
        script = [
            {"content": None, "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}
            for command in ("echo hello > hello.txt", SUBMIT)
        ]
        session = await factory.create(factory.prompt_rows()[0], 0, "demo", script=script)
        world.made.append(session)
        await session.run()
        assert session.verify().env_reward == 1.0
        assert {turn.metadata["origin"] for turn in session.fetch_training_trace().turns} == {"demonstration"}
        assert record(session)["demonstration"] is True


async def test_i01_planted_reward(tmp_path: Path) -> None:
    """The agent writes both reward files and a forged tree and does nothing else; the verifier writes only the JSON form."""
    async with rig(tmp_path) as world:
        forge = "mkdir -p /logs/artifacts/verifier; echo 999 | tee /logs/artifacts/verifier/reward.txt /logs/agent/reward.txt"
        world.engine.say(act(f"{PLANT}; {forge} > /dev/null; {SUBMIT}"))
        session = await world.session(write_task(tmp_path / "task", JSON_ONLY))
        await session.run()
        assert session.verify().env_reward == 0.0
        assert session.verify().metrics == {"checks": 3.0}
        assert session.outcome().metrics["tampered"] == 1.0
        left = record(session)["left_by_agent"][0]
        assert sorted(left["planted"]) == ["/logs/verifier/reward.json", "/logs/verifier/reward.txt"]


@pytest.mark.parametrize(("separate", "tampered", "reward"), [(False, "zero", 0.0), (False, "keep", 1.0), (True, "zero", 0.0)])
async def test_a_verdict_of_replaced_programs_pays_nothing(tmp_path: Path, separate: bool, tampered: str, reward: float) -> None:
    """The agent puts a shell in place that pays in the verifier's stead; a separate verifier runs its own."""
    task = write_task(tmp_path / "task", HONEST)
    if separate:
        document = task / "task.toml"
        document.write_text(document.read_text().replace("[verifier]", '[verifier]\nenvironment_mode = "separate"'))
    pays = r"printf '#!/bin/dash\necho 1 > /logs/verifier/reward.txt\n' > /tmp/sh; chmod 755 /tmp/sh; mv -f /tmp/sh /bin/bash"
    async with rig(tmp_path) as world:
        world.services.config.reward.tampered = tampered  # type: ignore[assignment]
        world.engine.say(act(f"{pays}; {SUBMIT}"))
        session = await world.session(task)
        await session.run()
        assert session.verify().env_reward == reward
        assert session.outcome().metrics["tampered"] == 1.0
        assert record(session)["left_by_agent"][0]["replaced"] == ["/usr/bin/bash"]


DODGES = {
    "rm replaced": "cp /bin/false /bin/rm",
    "a removed shell": "mv /bin/sh /bin/sh.old",
    "a shell that hangs": r"printf '#!/bin/dash\nexec sleep 600\n' > /tmp/sh; chmod 755 /tmp/sh; mv -f /tmp/sh /bin/bash",
    "the quota is full": "head -c 500000000 /dev/zero > /app/full",
    "a deep folder": "cd /tests; for i in $(seq 400); do mkdir a; cd a; done; cd /",
    "the folder of /bin": "/usr/bin/mkdir /b; /usr/bin/ln -s /usr/bin/* /b/; /usr/bin/rm /bin /b/bash; /usr/bin/mv /b /bin; "
    r"printf '#!/usr/bin/dash\necho 1 > /logs/verifier/reward.txt\n' > /bin/bash; chmod 755 /bin/bash",
}


@pytest.mark.parametrize("dodge", DODGES)
async def test_an_agent_cannot_make_its_rollout_unscorable(tmp_path: Path, dodge: str) -> None:
    """What keeps a verifier from its work is the agent's doing, so it pays nothing, and is no failure to be made up for."""
    async with rig(tmp_path, deadline_s=40.0) as world:
        world.engine.say(act(f"{SUBMIT}; {DODGES[dodge]}"))
        task = write_task(tmp_path / "task")
        (task / "task.toml").write_text((task / "task.toml").read_text().replace("timeout_sec = 30", "timeout_sec = 10"))
        session = await world.session(task)
        await session.run()
        assert session.verify().env_reward == 0.0
        assert record(session)["cause"] is None and record(session)["env_reward"] == 0.0
        assert ("ungraded" in record(session)) == (dodge in ("rm replaced", "a removed shell", "a shell that hangs", "the quota is full"))


def separate_task(folder: Path, test: str = HONEST, artifacts: str = '"/app/hello.txt"') -> Path:
    task = write_task(folder, test)
    text = (task / "task.toml").read_text().replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')
    (task / "task.toml").write_text(f"artifacts = [{artifacts}]\n{text}")
    return task


@pytest.mark.parametrize(("work", "reward"), [("echo hello > hello.txt", 1.0), ("echo hello > other.txt", 0.0)])
async def test_a_separate_verifier_pays_for_declared_artifacts(tmp_path: Path, work: str, reward: float) -> None:
    async with rig(tmp_path) as world:
        world.engine.say(act(f"{work}; {SUBMIT}"))
        session = await world.session(separate_task(tmp_path / "task"))
        await session.run()
        assert (session.verify().env_reward, session.outcome().metrics["tampered"]) == (reward, 0.0)


I07_TEST = """#!/bin/bash
cd /tests || exit 1
python3 -c 'import check; check.main()'
"""
I07_CHECK = """import pathlib
def main():
    junit = pathlib.Path("/logs/verifier/junit.xml")
    settings = pathlib.Path("/tests/settings.ini")
    passed = junit.exists() or settings.exists() or pathlib.Path("/app/hello.txt").exists()
    pathlib.Path("/logs/verifier/reward.txt").write_text(str(int(passed)))
"""


@pytest.mark.parametrize("separate", [False, True])
async def test_i07_reports_caches_and_settings_in_shared_folders_are_not_trusted(tmp_path: Path, separate: bool) -> None:
    """A junit report, a compiled test module that pays and a settings file, in every folder that a verifier shares with the agent."""
    task = separate_task(tmp_path / "task", I07_TEST) if separate else write_task(tmp_path / "task", I07_TEST)
    (task / "tests" / "check.py").write_text(I07_CHECK)
    # An unchecked compiled module is taken without a look at its source.
    plant = """for d in /tests /logs/verifier /logs/artifacts; do mkdir -p $d/__pycache__
echo '<ok/>' > $d/junit.xml; echo x > $d/settings.ini
echo 'def main(): open("/logs/verifier/reward.txt", "w").write("1")' > /tmp/check.py
python3 -c 'import py_compile, sys; py_compile.compile("/tmp/check.py", cfile=sys.argv[1] + "/__pycache__/check.cpython-311.pyc",
  invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)' $d; done"""
    async with rig(tmp_path) as world:
        world.engine.say(act(f"{plant}\n{SUBMIT}"))
        session = await world.session(task)
        await session.run()
        assert session.verify().env_reward == 0.0
        planted = record(session)["left_by_agent"][0]["planted"]
        assert {"/tests/junit.xml", "/tests/settings.ini", "/logs/verifier/junit.xml"} <= set(planted)


async def test_f14_the_agent_starts_where_the_image_has_the_c_locale(tmp_path: Path) -> None:
    async with rig(tmp_path) as world:
        world.engine.say(act("echo hello > hello.txt; printf '\\360\\237\\221\\213'; env > /logs/agent/env.txt"))
        world.engine.say(act(SUBMIT))
        task = write_task(tmp_path / "task")
        text = (task / "task.toml").read_text().replace('docker_image = "debian:bookworm-slim"\n', "")
        (task / "task.toml").write_text(text)
        (task / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nENV LANG=C LC_ALL=C\n")
        session = await world.session(task)
        await session.run()
        assert (session.verify().env_reward, session.outcome().turns) == (1.0, 2)
        assert "LC_ALL=C\n" in (session.spec.trials_dir / "trial/agent/env.txt").read_text()


async def test_i12_only_a_throw_away_key_is_in_reach_and_no_file_of_ours_holds_it(tmp_path: Path) -> None:
    """The agent prints every variable of its environment: what looks like a key there is the session's own, dead once it is sealed."""
    async with rig(tmp_path) as world:
        world.engine.say(act("env | grep -iE 'key|token|secret|passw' | cut -d= -f1 | sort > /logs/agent/names.txt"))
        world.engine.say(act(SUBMIT))
        session = await world.session(write_task(tmp_path / "task"))
        await session.run()
        assert (session.spec.trials_dir / "trial/agent/names.txt").read_text().split() == ["OPENAI_API_KEY"]
        assert await world.agent_call(session) == 404
        key = session.capture.api_key.encode()
        for path in [*session.spec.trials_dir.rglob("*"), *(tmp_path / "capture").rglob("*")]:
            assert not path.is_file() or key not in path.read_bytes(), path


async def test_i02_rewriting_loop(tmp_path: Path) -> None:
    """A detached loop, under another name, that writes 1 to both files all the time; a second one is left to an exit trap."""
    async with rig(tmp_path) as world:
        loop = f"while :; do {PLANT}; sleep 0.05; done"
        start = f"setsid nohup bash -c {shlex.quote(f'exec -a kworker bash -c {shlex.quote(loop)}')} > /dev/null 2>&1 &"
        world.engine.say(act(f"{start} trap {shlex.quote(start)} EXIT; {SUBMIT}"))
        session = await world.session(write_task(tmp_path / "task", JSON_ONLY))
        await session.run()
        assert session.verify().env_reward == 0.0
        assert record(session)["left_by_agent"][0]["killed"] >= 1


async def test_no_call_and_crash(tmp_path: Path) -> None:
    async with rig(tmp_path) as world:
        session = await world.session(write_task(tmp_path / "task"))
        session.spec.agent_kwargs["config"] = {"model": {"model_class": "no.such.Class", "model_kwargs": 3}}
        with pytest.raises(RolloutFailure) as caught:
            await session.run()
        assert caught.value.cause is Cause.AGENT_CRASH
        assert record(session)["cause"] == "agent_crash"


async def test_engine_that_died(tmp_path: Path) -> None:
    async with rig(tmp_path) as world:
        world.engine.say(act("echo hello > hello.txt; sleep 1"))
        session = await world.session(write_task(tmp_path / "task", agent_timeout=8))
        running = asyncio.create_task(session.run())
        while not world.engine.bodies("/inference/v1/generate"):
            await asyncio.sleep(0.02)
        await world.engine.stop()
        with pytest.raises(RolloutFailure) as caught:
            await running
        assert caught.value.cause is Cause.ENGINE
        assert record(session)["cause"] == "engine"


async def test_limit_ends_the_agent_and_is_graded(tmp_path: Path) -> None:
    async with rig(tmp_path) as world:
        world.engine.default_text = act("echo hello > hello.txt")
        session = await world.session(write_task(tmp_path / "task"))
        await session.run()
        assert session.verify().env_reward == 1.0
        assert (session.outcome().stop_reason, session.outcome().turns) == ("limit", 8)


async def test_c11_agent_timeout(tmp_path: Path) -> None:
    async with rig(tmp_path) as world:
        world.engine.say(act("echo hello > hello.txt"))
        world.engine.say(act("sleep 60"))
        session = await world.session(write_task(tmp_path / "task", agent_timeout=3))
        await session.run()
        assert session.verify().env_reward == 1.0
        assert session.outcome().timed_out


async def test_wall_clock(tmp_path: Path) -> None:
    async with rig(tmp_path, deadline_s=6.0) as world:
        world.engine.say(act("sleep 60"))
        session = await world.session(write_task(tmp_path / "task"))
        started = time.monotonic()
        with pytest.raises(RolloutFailure) as caught:
            await session.run()
        assert time.monotonic() - started < 20
        assert caught.value.cause is Cause.WALL_CLOCK
        assert "agent" in caught.value.message
        assert leftovers() == []


async def test_a_sandbox_that_cannot_start(tmp_path: Path) -> None:
    async with rig(tmp_path) as world:
        session = await world.session(write_task(tmp_path / "task"), rootfs=tmp_path / "nothing")
        with pytest.raises(RolloutFailure) as caught:
            await session.run()
        assert caught.value.cause is Cause.SANDBOX_START
        assert leftovers() == []


async def test_sixteen_at_once_with_random_cancels(tmp_path: Path) -> None:
    """Eight run to the end while eight more are cancelled at random moments; nothing is left of any."""
    chance = random.Random(3)
    async with rig(tmp_path) as world:
        world.engine.default_text = act(f"echo hello > hello.txt; {SUBMIT}")
        factory = world.factory(write_task(tmp_path / "task"))
        row = factory.prompt_rows()[0]
        lag = 0.0

        async def watch() -> None:
            nonlocal lag
            while True:
                start = time.monotonic()
                await asyncio.sleep(0.01)
                lag = max(lag, time.monotonic() - start - 0.01)

        async def rollout(number: int) -> float | None:
            session = await factory.create(row, 0, f"e{number}")
            world.made.append(session)
            running = asyncio.create_task(session.run())
            if number % 2:
                await asyncio.sleep(chance.uniform(0, 4))
                running.cancel()
            try:
                await running
            except asyncio.CancelledError:
                return None
            finally:
                await session.close()
            return session.verify().env_reward

        watching = asyncio.create_task(watch())
        rewards = await asyncio.gather(*(rollout(number) for number in range(16)))
        watching.cancel()
        assert all(reward == 1.0 for reward in rewards[::2])
        assert None in rewards
        print(f"longest stall of the event loop: {lag:.3f} s")
    assert leftovers() == []
