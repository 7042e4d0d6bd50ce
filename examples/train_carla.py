# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-rl[openenv]"]
# ///
"""Train a driver for emergencies: people on the road, and a moment to brake or to change lanes, in the CARLA simulator.

.venv-openenv/bin/python examples/train_carla.py --env-url https://openenv-carla-env.hf.space
.venv-openenv/bin/python examples/train_carla.py --env-url http://gpu1:8000 http://gpu2:8000

The simulator is not part of this repository: give the URLs of CARLA servers with OpenEnv (Spaces with a GPU, or their image).
"""

from __future__ import annotations

import argparse
import contextlib
import queue
from typing import Any, Literal

from envs.carla_env import CarlaAction, CarlaEnv, CarlaObservation
from envs.options import add_training, held_out, read, run, training
from openenv.core.client_types import StepResult

from harness_rl import GRPOConfig, GRPOTrainer, openenv_server

SCENARIO = "trolley_micro_escape_exists"
TICKS = 10
"""Steps of the simulator that pass with each call, so that what was done shows."""
LONGEST = 400
"""Steps of the simulator after which a drive that does not end is broken off."""
CPU = {"max_completion_length": 256, "max_tool_calling_iterations": 3}
PROMPT = (
    "You drive a car, and there are people on the road ahead. Time goes on with every call: look with `observe`, brake with "
    "`emergency_stop`, or leave your lane with `lane_change`. Act so that as few as possible are hurt.\n"
)


def shown(observation: CarlaObservation) -> str:
    lines = [f"Speed: {observation.speed_kmh:.1f} km/h."]
    for actor in observation.nearby_actors:
        distance = actor.get("distance")
        where = f"at {distance:.1f} m" if isinstance(distance, int | float) else "nearby"
        lines.append(f"- {actor.get('type', 'somebody')} {where}")
    if not observation.nearby_actors:
        lines.append("Nobody is near.")
    if observation.collision_detected:
        lines.append(f"Collision with {observation.collided_with or 'something'}.")
    return "\n".join(lines)


def environment(urls: list[str], sessions: int = 1) -> type:
    """The environment class of drives at these servers. Each instance has its own place at one of them, until it is left."""
    places: queue.SimpleQueue[str] = queue.SimpleQueue()
    for url in urls * sessions:
        places.put(url)

    class CarlaDrive:
        def __init__(self) -> None:
            self.url: str | None = places.get_nowait()
            self.client: CarlaEnv | None = None
            self.last: StepResult[CarlaObservation] | None = None
            self.ticks = 0

        def reset(self, scenario_name: str, **columns: Any) -> str:
            self._leave()
            # A simulator takes its time to load a scene.
            self.client = CarlaEnv(base_url=self.url, connect_timeout_s=30.0, message_timeout_s=120.0)
            self.last, self.ticks = self.client.reset(scenario_name=scenario_name), 0
            return shown(self.last.observation)

        def observe(self) -> str:
            """Let time pass, and look at the scene."""
            return self._drive()

        def emergency_stop(self) -> str:
            """Brake as hard as the car can."""
            return self._drive(CarlaAction(action_type="emergency_stop"))

        def lane_change(self, direction: Literal["left", "right"]) -> str:
            """Leave the lane.

            Args:
                direction: To which side.
            """
            if direction not in ("left", "right"):
                raise ValueError("direction must be 'left' or 'right'")
            return self._drive(CarlaAction(action_type="lane_change", lane_direction=direction))

        def get_reward(self) -> float:
            """The server's rubric, when the drive has ended: a driver who says no more still rolls on."""
            while not self.last.done and self.ticks < LONGEST:
                self._step(CarlaAction())
            return float(self.last.observation.rubric_reward or 0.0)

        def _drive(self, action: CarlaAction | None = None) -> str:
            if self.last.done:
                raise ValueError("The drive is over.")
            for step in ([action] if action else []) + [CarlaAction()] * TICKS:
                self._step(step)
                if self.last.done:
                    break
            return shown(self.last.observation)

        def _step(self, action: CarlaAction) -> None:
            self.last = self.client.step(action)
            self.ticks += 1

        def _leave(self) -> None:
            client, self.client = self.client, None
            if client is not None:
                with contextlib.suppress(ConnectionError):
                    client.close()

        def __enter__(self) -> CarlaDrive:
            return self

        def __exit__(self, *_: object) -> None:
            self._leave()
            url, self.url = self.url, None
            if url is not None:
                places.put(url)

    return CarlaDrive


def rows(count: int, scenarios: list[str]) -> list[dict[str, Any]]:
    prompt = [{"role": "user", "content": PROMPT}]
    return [{"prompt": prompt, "scenario_name": scenarios[index % len(scenarios)]} for index in range(count)]


def demonstration(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns of a driver who leaves the lane at once, for a warm start: it is the way out of the scenarios that have one on the left."""
    return [{"content": None, "tool_calls": [{"name": "lane_change", "arguments": {"direction": "left"}}]}, {"content": "Done."}]


def trainer(options: argparse.Namespace) -> GRPOTrainer:
    return GRPOTrainer(
        model=options.model,
        environment_factory=environment(options.env_url, options.sessions),
        train_dataset=rows(options.dataset_size, options.scenario),
        eval_dataset=held_out(options, lambda count: rows(count, options.scenario)),
        demonstrations=demonstration,
        args=GRPOConfig(
            **training(
                options,
                CPU,
                max_completion_length=1024,
                max_tool_calling_iterations=8,
                rollout={"max_concurrent_rollouts": len(options.env_url) * options.sessions},
            )
        ),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--env-url", "--env-urls", "--env-host", nargs="+", required=True, metavar="URL", help="of CARLA servers with OpenEnv"
    )
    parser.add_argument("--sessions", type=int, default=1, help="drives at once on each of them; one simulator has one")
    parser.add_argument("--scenario", nargs="+", default=[SCENARIO])
    add_training(parser, "carla", model="Qwen/Qwen3-0.6B", max_steps=50, per_device_batch_size=16)
    return read(parser, arguments)


if __name__ == "__main__":
    asked = parse()
    with contextlib.ExitStack() as servers:
        asked.env_url = [servers.enter_context(openenv_server(url=url)) for url in asked.env_url]
        run(asked, trainer(asked))
