"""The CARLA Space's client. Its server needs the simulator and a GPU: a Space or an image of it, `openenv_server(url=...)`."""

from .client import CarlaEnv
from .models import CarlaAction, CarlaObservation, CarlaState

__all__ = ["CarlaAction", "CarlaEnv", "CarlaObservation", "CarlaState"]
