"""The white-box loop's side of the capture proxy: one agent that speaks Chat Completions with its session's key.

Invariant: an answer is either the proxy's own, or a named failure, or "the budget is used up"; nothing is made up. What is worth asking
again (the policy is being replaced, an engine is being started) is asked again, a bounded number of times and never faster than told.
"""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any

import aiohttp

from capture_proxy.client import CreatedSession
from capture_proxy.refusal import CONTEXT_FULL
from harness_rl.errors import Cause
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.toolloop import Answer, Message

MAX_TRIES = 6
MAX_PAUSE_S = 30.0


class ChatClient:
    """One session's calls. `async with` it: leaving closes its connections, and with them a call that is still running."""

    def __init__(self, session: CreatedSession, model: str) -> None:
        self._url = session.base_urls["openai"] + "/chat/completions"
        self._key = session.api_key
        self._model = model
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ChatClient:
        # Its callers bound the time: an answer may have to wait for a weight update.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._key}"}, timeout=timeout)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._http is not None:
            await self._http.close()

    async def ask(self, messages: list[Message], tools: list[dict[str, Any]]) -> Answer | None:
        """The next assistant message; None where a budget leaves nothing to sample. Raises RolloutFailure."""
        body: dict[str, Any] = {"model": self._model, "messages": messages}
        if tools:
            body["tools"] = tools
        for tries in range(1, MAX_TRIES + 1):
            status, answer, pause = await self._post(body)
            if status == 200:
                choice = answer["choices"][0]
                return Answer(choice["message"], str(choice["finish_reason"]), str(answer["id"]).removeprefix("chatcmpl-"))
            error = answer.get("error") or {}
            words = f"{status} {error.get('message', '')}".strip()
            if error.get("code") == CONTEXT_FULL:
                return None
            if status not in (429, 503):
                raise RolloutFailure(_CAUSES.get(status, Cause.ENGINE), f"the model call was refused: {words}")
            if tries < MAX_TRIES:
                await asyncio.sleep(min(pause, MAX_PAUSE_S))
        raise RolloutFailure(Cause.ENGINE, f"no answer in {MAX_TRIES} tries: {words}")

    async def _post(self, body: dict[str, Any]) -> tuple[int, dict[str, Any], float]:
        """(status, JSON object, seconds to wait before trying again)."""
        assert self._http is not None, "used inside `async with`"
        try:
            async with self._http.post(self._url, json=body, allow_redirects=False) as response:
                raw = await response.read()
                status, pause = response.status, response.headers.get("Retry-After", "1")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RolloutFailure(Cause.CAPTURE, f"the capture proxy gave no answer: {error or type(error).__name__}") from error
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = {}
        return status, answer if isinstance(answer, dict) else {}, float(pause) if pause.isdigit() else 1.0


_CAUSES = {400: Cause.ENVIRONMENT, 401: Cause.CAPTURE, 404: Cause.CAPTURE}
"""Of refusals that would be refused again: 400 is about what the environment or the data set gave to show."""
