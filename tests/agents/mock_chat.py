"""A chat endpoint that plays a script of tool calls, one shell command per turn, whatever the messages say; on any listening socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

from aiohttp import web

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class MockChat:
    """The turn is the number of assistant messages in the request, so that one instance serves many sessions."""

    def __init__(self, commands: Sequence[str], status: int = 200) -> None:
        self.commands = [*commands, SUBMIT]
        self.status = status
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self._runners: list[web.AppRunner] = []

    async def serve(self, listener: socket.socket) -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self._runners.append(runner)
        await web.SockSite(runner, listener).start()

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        if self.status != 200:
            error = {"type": "invalid_request_error", "code": "model_not_found", "message": "closed"}
            return web.json_response({"error": error}, status=self.status)
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        call = {
            "id": f"call_{turn}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"command": self.commands[min(turn, len(self.commands) - 1)]})},
        }
        message = {"role": "assistant", "content": f"Step {turn}.", "tool_calls": [call]}
        return web.json_response(
            {
                "id": f"chatcmpl-{turn}",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
                "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
            }
        )
