from __future__ import annotations

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult

from .models import OpenSpielAction, OpenSpielObservation, OpenSpielState


class OpenSpielEnv(EnvClient[OpenSpielAction, OpenSpielObservation, OpenSpielState]):
    """One session: `OpenSpielEnv(base_url=...)`, `reset(seed=3)`, `step(OpenSpielAction(action_id=2))`."""

    def _step_payload(self, action: OpenSpielAction) -> dict[str, Any]:
        return action.model_dump(exclude={"metadata"})

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[OpenSpielObservation]:
        about = {"reward": payload.get("reward"), "done": bool(payload.get("done"))}
        return StepResult(OpenSpielObservation(**payload["observation"], **about), **about)

    def _parse_state(self, payload: dict[str, Any]) -> OpenSpielState:
        return OpenSpielState(**payload)
