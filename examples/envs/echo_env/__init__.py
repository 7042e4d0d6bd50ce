"""The echo Space's client and its server, for a process of its own: `openenv_server(app="envs.echo_env.server:app")`."""

from .client import EchoEnv
from .models import EchoAction, EchoObservation

__all__ = ["EchoAction", "EchoEnv", "EchoObservation"]
