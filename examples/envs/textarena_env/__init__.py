"""The TextArena Space's client and its server, for a process of its own: `openenv_server(app="envs.textarena_env.server:app")`."""

from .client import TextArenaEnv
from .models import TextArenaAction, TextArenaMessage, TextArenaObservation, TextArenaState

__all__ = ["TextArenaAction", "TextArenaEnv", "TextArenaMessage", "TextArenaObservation", "TextArenaState"]
