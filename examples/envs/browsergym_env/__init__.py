"""The BrowserGym Space's client and a server of our own pages: `openenv_server(app="envs.browsergym_env.server:app")`."""

from .client import BrowserGymEnv
from .models import BrowserGymAction, BrowserGymObservation, BrowserGymState

__all__ = ["BrowserGymAction", "BrowserGymEnv", "BrowserGymObservation", "BrowserGymState"]
