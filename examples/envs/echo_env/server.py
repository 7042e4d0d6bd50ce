"""The echo game: what is sent comes back, and is worth a tenth of its length."""

from __future__ import annotations

import os
import uuid
from typing import Any

from openenv.core.env_server import Environment, State, create_app

from .models import EchoAction, EchoObservation


class EchoEnvironment(Environment[EchoAction, EchoObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> EchoObservation:
        self._state = State(episode_id=episode_id or str(uuid.uuid4()))
        return EchoObservation(echoed_message="Ready.", reward=0.0)

    def step(self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any) -> EchoObservation:
        self._state.step_count += 1
        length = len(action.message)
        return EchoObservation(echoed_message=action.message, message_length=length, reward=length / 10)

    @property
    def state(self) -> State:
        return self._state


app = create_app(
    EchoEnvironment, EchoAction, EchoObservation, env_name="echo_env", max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "64"))
)
