from __future__ import annotations

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server import State

from .models import EchoAction, EchoObservation


class EchoEnv(EnvClient[EchoAction, EchoObservation, State]):
    """One session: `EchoEnv(base_url=...)`, `step(EchoAction(message="hello"))`."""

    def _step_payload(self, action: EchoAction) -> dict[str, Any]:
        return {"message": action.message}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[EchoObservation]:
        about = {"reward": payload.get("reward"), "done": bool(payload.get("done"))}
        return StepResult(EchoObservation(**payload["observation"], **about), **about)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
