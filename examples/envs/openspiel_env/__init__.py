"""The OpenSpiel Space's client and its server, for a process of its own: `openenv_server(app="envs.openspiel_env.server:app")`."""

from .client import OpenSpielEnv
from .models import OpenSpielAction, OpenSpielObservation, OpenSpielState

__all__ = ["OpenSpielAction", "OpenSpielEnv", "OpenSpielObservation", "OpenSpielState"]
