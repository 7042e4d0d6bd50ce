from __future__ import annotations

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult

from .models import TextArenaAction, TextArenaObservation, TextArenaState


class TextArenaEnv(EnvClient[TextArenaAction, TextArenaObservation, TextArenaState]):
    """One session: `TextArenaEnv(base_url=...)`, `reset(seed=3)`, `step(TextArenaAction(message="[crane]"))`."""

    def _step_payload(self, action: TextArenaAction) -> dict[str, Any]:
        return {"message": action.message}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[TextArenaObservation]:
        about = {"reward": payload.get("reward"), "done": bool(payload.get("done"))}
        return StepResult(TextArenaObservation(**payload["observation"], **about), **about)

    def _parse_state(self, payload: dict[str, Any]) -> TextArenaState:
        return TextArenaState(**payload)
