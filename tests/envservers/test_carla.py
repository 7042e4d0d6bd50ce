"""The driving example over real WebSockets. The simulator is played by a road that arithmetic can follow (carla.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import train_carla
from environments.bench import Bench, call
from envs.carla_env import CarlaAction, CarlaEnv
from envservers.carla import AHEAD_M, SPEED_KMH, TICK_S

from harness_rl import GRPOTrainer
from harness_rl.errors import UserError
from harness_rl.sessions.openenv_servers import openenv_server


@pytest.fixture(scope="module")
def road() -> Iterator[str]:
    with openenv_server(app="envservers.carla:app", sessions=8) as url:
        yield url


def trainer(urls: list[str], tmp_path: Path) -> GRPOTrainer:
    return train_carla.trainer(
        train_carla.parse(["--env-url", *urls, "--dataset-size", "2", "--output-dir", str(tmp_path / "run"), "--model", "m"])
    )


def prepared(bench: Bench, url: str, tmp_path: Path) -> Any:
    """The example's own factory, in front of the test's proxy and engine."""
    factory = trainer([url], tmp_path).factory
    factory.bind(bench.services())
    return factory


@pytest.mark.parametrize(
    ("calls", "reward", "ending"),
    [
        ([call("observe"), call("lane_change", direction="left")], 1.0, "Nobody is near."),
        ([call("lane_change", direction="left")], 1.0, ""),  # it says no more, and is past them a moment later
        ([call("lane_change", direction="right"), call("observe")], 0.0, "Collision with wall."),
        ([call("emergency_stop"), call("observe"), call("observe")], 0.0, "Collision with pedestrian."),
        ([], 0.0, ""),
    ],
)
async def test_a_whole_drive(bench: Bench, road: str, tmp_path: Path, calls: list[str], reward: float, ending: str):
    factory = prepared(bench, road, tmp_path)
    for text in calls:
        bench.engine.say(text)
    session = await bench.play(factory)
    assert (session.verify().env_reward, session.outcome().tool_failure_count) == (reward, 0)
    assert session.outcome().tool_call_count == len(calls) == len(bench.prompts()) - 1
    assert bench.prompts()[-1].rstrip().count("Speed: ") == len(calls) + 1 and ending in bench.prompts()[-1]
    await factory.close()


async def test_the_driver_sees_speed_and_distance_as_they_are(bench: Bench, road: str, tmp_path: Path):
    factory = prepared(bench, road, tmp_path)
    bench.engine.say(call("observe"))
    bench.engine.say(call("lane_change", direction="up"))
    session = await bench.play(factory)
    left = AHEAD_M - SPEED_KMH / 3.6 * TICK_S * train_carla.TICKS
    assert f"Speed: 75.0 km/h.\n- pedestrian at {AHEAD_M:.1f} m" in bench.prompts()[0]
    assert f"Speed: 75.0 km/h.\n- pedestrian at {left:.1f} m" in bench.prompts()[1].removeprefix(bench.prompts()[0])
    assert session.outcome().tool_failure_count == 1 and "'left' or 'right'" in bench.prompts()[2]
    await factory.close()


class Loop:
    """As TRL's example has it: one client for all drives, from before the first, and a loop of the environment's own."""

    url = ""

    def __init__(self) -> None:
        self.client = CarlaEnv(base_url=type(self).url, connect_timeout_s=30, message_timeout_s=120)
        self._loop = asyncio.new_event_loop()

    def _run(self, result: Any) -> Any:
        return self._loop.run_until_complete(result) if asyncio.iscoroutine(result) else result

    def reset(self, **columns: Any) -> str:
        self.reward = 0.0
        return train_carla.shown(self._run(self.client.reset(scenario_name="trolley_micro_escape_exists")).observation)

    def lane_change(self, direction: str) -> str:
        """Change lanes.

        Args:
            direction: left or right.
        """
        self._run(self.client.step(CarlaAction(action_type="lane_change", lane_direction=direction)))
        for _ in range(25):
            result = self._run(self.client.step(CarlaAction(action_type="observe")))
            if result.done:
                break
        self.reward = result.observation.rubric_reward or 0.0
        return train_carla.shown(result.observation)


async def test_a_class_as_the_seed_writes_it(bench: Bench, road: str):
    Loop.url = road
    factory = bench.factory(Loop, reward_funcs=lambda environments, **columns: [each.reward for each in environments])
    rewards = []
    for direction in ("left", "right", "left"):
        bench.engine.say(call("lane_change", direction=direction))
        rewards.append((await bench.play(factory)).verify().env_reward)
    assert (rewards, factory.kinds[""].made) == ([1.0, 0.0, 1.0], 1)
    await factory.close()


def test_the_client_speaks_the_servers_fields_and_leaves_out_what_it_does_not_know(road: str):
    with CarlaEnv(base_url=road).sync() as client:
        assert client.reset(scenario_name="trolley_micro_x").done is False
        result = client.step(CarlaAction(action_type="lane_change", lane_direction="left"))
        assert (result.observation.speed_kmh, result.observation.rubric_reward) == (pytest.approx(SPEED_KMH), 0.0)
        assert not hasattr(result.observation, "camera_image")
        assert (client.state().scenario_name, client.state().step_count) == ("trolley_micro_x", 1)
        with pytest.raises(RuntimeError, match="no scenario 'maze'"):
            client.reset(scenario_name="maze")


def test_a_drive_that_does_not_end_is_broken_off(road: str, monkeypatch: pytest.MonkeyPatch):
    drive = train_carla.environment([road])()
    with drive:
        drive.reset(scenario_name="trolley_micro_x")
        monkeypatch.setattr(train_carla, "LONGEST", 3)
        assert (drive.get_reward(), drive.ticks) == (0.0, 3)
        drive.lane_change("left")
        drive.observe()
        with pytest.raises(ValueError, match="The drive is over"):
            drive.observe()
        assert drive.get_reward() == 1.0
    assert drive.client is None


def test_servers_with_one_simulator_each_are_enough_for_as_many_drives(tmp_path: Path):
    async def run() -> Any:
        return "ran"

    with contextlib.ExitStack() as servers:
        one, other = (servers.enter_context(openenv_server(app="envservers.carla:app", sessions=1)) for _ in range(2))
        assert asyncio.run(trainer([one, other], tmp_path)._with_servers(run())) == "ran"
        with pytest.raises(UserError, match=rf"{one} takes 1 sessions at once, and 2 episodes are to run at once"):
            asyncio.run(trainer([one, one], tmp_path)._with_servers(run()))


async def test_each_drive_has_a_place_of_its_own_and_gives_it_back():
    drive = train_carla.environment(["a", "b"], sessions=2)
    drives = [drive() for _ in range(4)]
    assert [each.url for each in drives] == ["a", "b", "a", "b"]
    with pytest.raises(queue.Empty):
        drive()
    drives[2].__exit__()
    drives[2].__exit__()
    assert drive().url == "a"
    with pytest.raises(queue.Empty):
        drive()


def test_the_rows_are_plain_data():
    assert json.loads(json.dumps(train_carla.rows(2, ["a"]))) == train_carla.rows(2, ["a"])
