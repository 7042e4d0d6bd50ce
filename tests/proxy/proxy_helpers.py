"""What the proxy's tests share: an agent that speaks raw Chat Completions, a served proxy, and the oracle on its trace."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from fake_engine import FakeEngine

from capture_proxy.app import Proxy
from capture_proxy.client import CreatedSession, ProxyClient
from capture_proxy.trace import TrainingTrace, hash_ids, hash_sample

ADMIN_KEY = "test-admin-key-0123456789"
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
USER = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "List the files."}]


@dataclass
class Agent:
    """A client without retries and without an SDK, so that a test sees the bytes."""

    base: str
    key: str
    http: aiohttp.ClientSession
    messages: list[dict[str, Any]] = field(default_factory=lambda: list(USER))

    async def post(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {self.key}", **(headers or {})}
        async with self.http.post(self.base + "/chat/completions", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def ask(self, *more: dict[str, Any], tools: Any = (BASH,), **fields: Any) -> dict[str, Any]:
        """Appends `more` to the conversation, asks, appends the answer as a well-behaved client does, and returns the choice."""
        self.messages = [*self.messages, *more]
        status, body = await self.post({"model": "m", "messages": self.messages, **({"tools": list(tools)} if tools else {}), **fields})
        assert status == 200, body
        choice = body["choices"][0]
        self.messages = [*self.messages, choice["message"]]
        return choice


def tool_result(choice: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": text}


@dataclass
class Served:
    """A running proxy and its clients."""

    proxy: Proxy
    url: str
    admin: ProxyClient
    http: aiohttp.ClientSession

    async def session(self, **spec: Any) -> CreatedSession:
        return await self.admin.create_session(**spec)

    async def agent(self, **spec: Any) -> tuple[Agent, CreatedSession]:
        created = await self.admin.create_session(**spec)
        return Agent(created.base_urls["openai"], created.api_key, self.http), created


Serve = Callable[..., Awaitable[Served]]


def assert_engine_saw_the_rows(engine: FakeEngine, trace: TrainingTrace) -> None:
    """The universal oracle: what the engine was given is what the trace says, hashes included."""
    sent = [body["token_ids"] for body in engine.bodies("/generate") if body["sampling_params"].get("prompt_logprobs") is None]
    assert [turn.prompt_token_ids.tolist() for turn in trace.turns] == sent
    for turn in trace.turns:
        assert turn.metadata["prompt_hash"] == hash_ids(turn.prompt_token_ids)
        assert turn.metadata["completion_hash"] == hash_ids(turn.completion_token_ids)
        assert turn.metadata["sample_hash"] == hash_sample(turn.completion_token_ids, turn.per_token_logps, turn.completion_mask)


def total(turn: Any) -> list[int]:
    return [*turn.prompt_token_ids.tolist(), *turn.completion_token_ids.tolist()]


def assert_chain(trace: TrainingTrace) -> None:
    """Each turn's prompt starts with the whole of the turn before it."""
    for before, after in zip(trace.turns, trace.turns[1:], strict=False):
        assert after.metadata["parent"] == before.node_id
        assert after.prompt_token_ids[: len(total(before))].tolist() == total(before)
        assert after.metadata["branch"] == 0


async def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    """Waits until `condition()` holds; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def process(engine: FakeEngine, root: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A real proxy process and its URL; killed at the end when it still runs. What it logs is in `root/log`."""
    key_file = root / "admin.key"
    key_file.write_text(ADMIN_KEY + "\n")
    args = ["--engine", engine.url, "--model", "policy", "--store", str(root / "store"), "--admin-key-file", str(key_file), "--port", "0"]
    with (root / "log").open("ab") as log:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "capture_proxy", *args, *flags, stdout=asyncio.subprocess.PIPE, stderr=log
        )
    try:
        assert child.stdout is not None
        line = (await asyncio.wait_for(child.stdout.readline(), 120)).decode()
        assert line.startswith("capture-proxy listening on http"), line
        yield child, line.split()[-1]
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
