from __future__ import annotations

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult

from .models import CarlaAction, CarlaObservation, CarlaState


class CarlaEnv(EnvClient[CarlaAction, CarlaObservation, CarlaState]):
    """One session: `CarlaEnv(base_url=...)`, `reset(scenario_name=...)`, `step(CarlaAction(action_type="observe"))`."""

    def _step_payload(self, action: CarlaAction) -> dict[str, Any]:
        return action.model_dump(exclude_none=True, exclude={"metadata"})

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[CarlaObservation]:
        seen = payload["observation"]
        about = {"reward": payload.get("reward"), "done": bool(payload.get("done") or seen.get("done"))}
        return StepResult(CarlaObservation(**{**seen, **about}), **about)

    def _parse_state(self, payload: dict[str, Any]) -> CarlaState:
        return CarlaState(**payload)
