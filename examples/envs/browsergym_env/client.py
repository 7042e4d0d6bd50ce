from __future__ import annotations

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult

from .models import BrowserGymAction, BrowserGymObservation, BrowserGymState


class BrowserGymEnv(EnvClient[BrowserGymAction, BrowserGymObservation, BrowserGymState]):
    """One session: `BrowserGymEnv(base_url=...)`, `reset(task_name="click-test")`, `step(BrowserGymAction(action_str="click('3')"))`."""

    def _step_payload(self, action: BrowserGymAction) -> dict[str, Any]:
        return {"action_str": action.action_str}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[BrowserGymObservation]:
        about = {"reward": payload.get("reward"), "done": bool(payload.get("done"))}
        return StepResult(BrowserGymObservation(**payload["observation"], **about), **about)

    def _parse_state(self, payload: dict[str, Any]) -> BrowserGymState:
        return BrowserGymState(**payload)
