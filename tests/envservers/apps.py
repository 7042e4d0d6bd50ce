"""A ledger that never notices that it was not reset, and a server's WebSockets that do not last.

The ledger counts in silence: a game whose session was lost would go on from 0 in the next one, and only the number would be wrong.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class LedgerAction(Action):
    amount: int


class LedgerObservation(Observation):
    total: int = 0


class LedgerEnvironment(Environment[LedgerAction, LedgerObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> LedgerObservation:
        self.total = 0
        return LedgerObservation(reward=0.0)

    def step(self, action: LedgerAction, timeout_s: float | None = None, **kwargs: Any) -> LedgerObservation:
        if action.amount < 0:
            raise ValueError("only what is earned")
        self.total += action.amount
        return LedgerObservation(total=self.total, reward=float(self.total))

    @property
    def state(self) -> State:
        return State(step_count=self.total)


def ledger(sessions: int = 64) -> Any:
    app = create_app(LedgerEnvironment, LedgerAction, LedgerObservation, max_concurrent_envs=sessions)
    app.add_api_route("/pid", os.getpid)
    return app


class LedgerClient(EnvClient[LedgerAction, LedgerObservation, State]):
    def _step_payload(self, action: LedgerAction) -> dict[str, Any]:
        return {"amount": action.amount}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[LedgerObservation]:
        return StepResult(LedgerObservation(**payload["observation"]), payload.get("reward"), bool(payload.get("done")))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


class Closing:
    """Closes every WebSocket of `app` after so many seconds, in good form."""

    def __init__(self, app: Any, seconds: float) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        over = asyncio.Event()

        async def close() -> None:
            await asyncio.sleep(self._seconds)
            over.set()
            await send({"type": "websocket.close", "code": 1001})

        async def received() -> Any:
            ends, message = asyncio.create_task(over.wait()), asyncio.create_task(receive())
            await asyncio.wait({ends, message}, return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                ends.cancel()
                return message.result()
            message.cancel()
            return {"type": "websocket.disconnect", "code": 1001}

        async def sent(message: Any) -> None:
            if not over.is_set():
                await send(message)

        closer = asyncio.create_task(close())
        try:
            await self._app(scope, received, sent)
        finally:
            closer.cancel()


alone = ledger()
