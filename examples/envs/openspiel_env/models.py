"""What goes over the wire, in the OpenSpiel Space's names."""

from typing import Any

from openenv.core.env_server import Action, Observation, State
from pydantic import Field


class OpenSpielAction(Action):
    action_id: int
    game_name: str = "catch"
    game_params: dict[str, Any] = Field(default_factory=dict)


class OpenSpielObservation(Observation):
    info_state: list[float] = Field(default_factory=list)
    legal_actions: list[int] = Field(default_factory=list)
    game_phase: str = "playing"
    current_player_id: int = 0
    opponent_last_action: int | None = None


class OpenSpielState(State):
    game_name: str = "catch"
    num_players: int = 1
