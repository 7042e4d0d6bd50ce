"""What goes over the wire, in the TextArena Space's names."""

from typing import Any

from openenv.core.env_server import Action, Observation, State
from pydantic import BaseModel, Field


class TextArenaMessage(BaseModel):
    sender_id: int
    content: str
    category: str


class TextArenaAction(Action):
    message: str


class TextArenaObservation(Observation):
    prompt: str = ""
    messages: list[TextArenaMessage] = Field(default_factory=list)
    """One: everything that was said since the game began."""
    current_player_id: int = 0
    legal_players: list[int] = Field(default_factory=list)
    info: dict[str, Any] = Field(default_factory=dict)


class TextArenaState(State):
    env_id: str = ""
    num_players: int = 1
    turn: int = 0
    last_reward: float = 0.0
