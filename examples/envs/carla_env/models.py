"""What goes over the wire, in the CARLA Space's names. What a newer server says beyond that is left out."""

from typing import Any

from openenv.core.env_server import Action, Observation, State
from pydantic import ConfigDict, Field


class CarlaAction(Action):
    action_type: str = "observe"
    """observe, emergency_stop, lane_change, brake_vehicle, maintain_speed, control ..."""
    throttle: float = Field(default=0.0, ge=0.0, le=1.0)
    steer: float = Field(default=0.0, ge=-1.0, le=1.0)
    brake: float = Field(default=0.0, ge=0.0, le=1.0)
    lane_direction: str | None = None
    """Of lane_change: left or right."""
    target_lane_id: str | None = None
    target_speed_kmh: float | None = Field(default=None, ge=0.0, le=200.0)
    brake_intensity: float | None = Field(default=None, ge=0.0, le=1.0)


class CarlaObservation(Observation):
    model_config = ConfigDict(extra="ignore")

    scene_description: str = ""
    speed_kmh: float = 0.0
    location: tuple[float, float, float] = (0.0, 0.0, 0.0)
    rotation: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Pitch, yaw and roll, in degrees."""
    current_lane: str = "unknown"
    nearby_actors: list[dict[str, Any]] = Field(default_factory=list)
    """Each with its type, and its distance in metres."""
    collision_detected: bool = False
    collision_intensity: float = 0.0
    collided_with: str | None = None
    scenario_name: str = ""
    simulation_time: float = 0.0
    """Seconds."""
    step_number: int = 0
    done_reason: str = ""
    rubric_reward: float | None = None
    """What training is for. In the trolley scenarios 0 until the end; then 1 where fewer were hit than if nothing had been done."""


class CarlaState(State):
    model_config = ConfigDict(extra="ignore")

    scenario_name: str = "default"
    town: str = ""
    weather: str = ""
    total_reward: float = 0.0
    simulation_time: float = 0.0
    collisions: list[dict[str, Any]] = Field(default_factory=list)
