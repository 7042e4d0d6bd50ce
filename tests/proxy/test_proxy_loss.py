"""`kill -9` under load: what a client holds to its last byte is in the store, and whatever else is there is marked.

The proxy is a real process on one port, killed at random points (while it reads its store too) and started again on the same store. Clients
of all four dialects note what reached them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_engine import END, FakeEngine
from proxy_helpers import ADMIN_KEY, Serve, total
from wires import WIRES, Anthropic, Chat, Gemini, Responses, Wire

from capture_proxy.client import CreatedSession, ProxyClient
from capture_proxy.records import trace_from_log
from capture_proxy.store import MAGIC, read_log
from capture_proxy.trace import TrainingTrace

SESSIONS = 64
BOOT = "import sys; from capture_proxy.cli import main; sys.stdin.readline(); sys.exit(main(sys.argv[1:]))"
"""The proxy's own entry, with its imports done before it is its turn."""


class ProxyProcess:
    """A proxy on a fixed port and store, and the next one, which waits for this one's death."""

    def __init__(self, engine: FakeEngine, root: Path, durability: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.store = root / "store"
        (root / "key").write_text(ADMIN_KEY)
        self.flags = ["--engine", engine.url, "--model", "policy", "--store", str(self.store)]
        self.flags += ["--admin-key-file", str(root / "key"), "--port", str(self.port), "--durability", durability]
        self.child: asyncio.subprocess.Process | None = None
        self.next: asyncio.subprocess.Process | None = None

    async def _spawn(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", BOOT, *self.flags, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )

    async def start(self) -> None:
        """Lets the next one begin; `ready` waits for it."""
        self.child = self.next or await self._spawn()
        self.next = await self._spawn()
        assert self.child.stdin is not None
        self.child.stdin.write(b"go\n")

    async def ready(self) -> None:
        assert self.child is not None and self.child.stdout is not None
        line = await asyncio.wait_for(self.child.stdout.readline(), 120)
        assert line.startswith(b"capture-proxy listening"), line

    async def kill(self) -> None:
        assert self.child is not None
        self.child.send_signal(signal.SIGKILL)
        await self.child.wait()

    async def close(self) -> None:
        for child in (self.child, self.next):
            if child is not None and child.returncode is None:
                child.kill()
                await child.wait()


def plain_reply(wire: type[Wire], raw: str) -> dict[str, Any] | None:
    """The plain form of a streamed answer, or None where its terminal event is missing."""
    events = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
    if wire is Responses:
        return next((item["response"] for item in events if item["type"] == "response.completed"), None)
    if wire is Chat:
        text = "".join(choice["delta"].get("content") or "" for item in events for choice in item["choices"])
        ended = raw.endswith("data: [DONE]\n\n")
        return {"id": events[0]["id"], "choices": [{"message": {"role": "assistant", "content": text}}]} if ended else None
    if wire is Anthropic:
        text = "".join(item["delta"].get("text", "") for item in events if item["type"] == "content_block_delta")
        ended = any(item["type"] == "message_stop" for item in events)
        return {"id": events[0]["message"]["id"], "content": [{"type": "text", "text": text}]} if ended else None
    parts = [part for item in events for part in item["candidates"][0]["content"]["parts"]]
    ended = any(item["candidates"][0].get("finishReason") for item in events)
    content = {"role": "model", "parts": [{"text": "".join(part["text"] for part in parts)}]}
    return {"responseId": events[0]["responseId"], "candidates": [{"content": content}]} if ended else None


def node_of(reply: dict[str, Any]) -> str:
    return str(reply.get("id") or reply.get("responseId")).rpartition("chatcmpl-")[2]


@dataclass
class Client:
    """One session's agent: it asks, notes what it got to the last byte, and asks again what it did not get."""

    session: CreatedSession
    wire: type[Wire]
    stream: bool
    rng: random.Random
    got: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """Node id -> the answer's text, and the answer of this conversation before it."""
    failed: int = 0
    busy: bool = False

    async def run(self, url: str, http: aiohttp.ClientSession, up: asyncio.Event) -> None:
        talk, before, turns = self.wire("You are an agent.", True), None, 0
        talk.say("List the files.")
        while True:
            self.busy = False
            await up.wait()
            self.busy = True
            reply = await self._post(url, http, talk)
            if reply is None:
                self.failed += 1
                await asyncio.sleep(0.01)
                continue
            text, _ = self.wire.read(reply)
            node = node_of(reply)
            self.got[node] = (text, before)
            before, turns = node, turns + 1
            if turns == 6:
                talk, before, turns = self.wire("You are an agent.", True), None, 0
            else:
                talk.echo(reply)
            talk.say(f"Go on with {self.rng.random()}.")

    async def _post(self, url: str, http: aiohttp.ClientSession, talk: Wire) -> dict[str, Any] | None:
        path, body = talk.path, talk.body()
        if self.wire is Gemini:
            path = path.replace("generateContent", "streamGenerateContent?alt=sse") if self.stream else path
        else:
            body["stream"] = self.stream
        headers = {"Authorization": f"Bearer {self.session.api_key}"}
        raw = b""
        try:
            async with http.post(url + path, json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                async for chunk in response.content.iter_any():
                    raw += chunk
        except aiohttp.ClientError:
            # Cut: but a stream whose terminal event has arrived is an answer.
            return plain_reply(self.wire, raw.decode()) if self.stream and raw.endswith(b"\n\n") else None
        return plain_reply(self.wire, raw.decode()) if self.stream else json.loads(raw)


async def load_and_kill(
    engine: FakeEngine, root: Path, kills: int, durability: str, rng: random.Random
) -> tuple[ProxyProcess, list[Client]]:
    """Runs the clients over `kills` deaths. The last proxy is left running, idle."""
    proxy = ProxyProcess(engine, root, durability)
    up = asyncio.Event()
    drivers: list[asyncio.Task[None]] = []
    clients: list[Client] = []
    said = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        try:
            await proxy.start()
            await proxy.ready()
            async with ProxyClient(proxy.url, ADMIN_KEY) as admin:
                for index in range(SESSIONS):
                    wire, stream = WIRES[index % 4], index // 4 % 2 == 0
                    clients.append(Client(await admin.create_session(), wire, stream, random.Random(rng.random())))
            drivers += [asyncio.create_task(client.run(proxy.url, http, up)) for client in clients]
            for kill in range(kills):
                while len(engine.script) < 1000:
                    said += 1
                    engine.say(f"Answer {said}.", style=rng.choice(("words", "chars")), delay_s=rng.choice((0.001, 0.01, 0.05)))
                if kill:
                    await proxy.start()
                if kill and rng.random() < 0.2:
                    await asyncio.sleep(rng.uniform(0, 0.1))  # while it starts
                else:
                    if kill:
                        await proxy.ready()
                    enough = sum(len(client.got) for client in clients) + rng.randint(1, 16)
                    up.set()
                    async with asyncio.timeout(60):
                        while sum(len(client.got) for client in clients) < enough:
                            await asyncio.sleep(0.001)
                    await asyncio.sleep(rng.uniform(0, 0.02))
                await proxy.kill()
                up.clear()
                for driver in drivers:
                    if driver.done():
                        driver.result()
            await proxy.start()
            await proxy.ready()
        except BaseException:
            await proxy.close()
            raise
        finally:
            for driver in drivers:
                driver.cancel()
            await asyncio.gather(*drivers, return_exceptions=True)
    return proxy, clients


def check(engine: FakeEngine, trace: TrainingTrace, client: Client, sampled: set[tuple[tuple[int, ...], tuple[int, ...]]]) -> int:
    """How many turns a client holds but the store cannot know it: the process died between the last byte and the next record."""
    turns = {turn.node_id: turn for turn in trace.turns}
    assert set(client.got) <= set(turns), "an answer that a client holds is not in the store"
    used = {turn.metadata["continues"] for turn in trace.turns}
    unknown = 0
    for node, turn in turns.items():
        prompt, completion = tuple(turn.prompt_token_ids.tolist()), tuple(turn.completion_token_ids.tolist())
        assert (prompt, completion) in sampled, "ids that the engine never sampled"
        if node not in client.got:
            assert turn.metadata["mask_reason"] == "abandoned" and not turn.completion_mask.any()
            continue
        text, before = client.got[node]
        assert engine.tokenizer.decode([i for i in completion if i != END]) == text, "another text than the client holds"
        if before is not None:
            assert prompt[: len(total(turns[before]))] == tuple(total(turns[before])), "history lost its sampled ids"
            assert turn.metadata["continues"] == before
        if turn.metadata["mask_reason"] == "abandoned":
            assert node not in used
            unknown += 1
        else:
            assert turn.metadata["mask_reason"] is None and turn.completion_mask.all()
    assert TrainingTrace.model_validate(json.loads(trace.to_json())) == trace
    return unknown


@pytest.mark.parametrize(("kills", "durability"), [(17, "process"), (3, "host"), pytest.param(200, "process", marks=pytest.mark.full)])
async def test_no_kill_loses_an_answer_that_a_client_holds(engine: FakeEngine, tmp_path: Path, kills: int, durability: str) -> None:
    seed = int(os.environ.get("HARNESS_RL_TEST_SEED") or random.randrange(1 << 32))
    try:
        proxy, clients = await load_and_kill(engine, tmp_path, kills, durability, random.Random(seed))
        try:
            sampled = set(engine.sampled)
            unknown = 0
            async with ProxyClient(proxy.url, ADMIN_KEY) as admin:
                for client in clients:
                    trace = await admin.trace(client.session.session_id)
                    unknown += check(engine, trace, client, sampled)
                    status = await admin.status(client.session.session_id)
                    assert status["in_flight"] == 0
                    assert status["calls_seen"] == sum(status["calls_by_reason"].values())
                    assert trace_from_log(proxy.store / f"{client.session.session_id}.log") == trace
            held, failed = sum(len(client.got) for client in clients), sum(client.failed for client in clients)
            assert held >= kills * 0.7 and failed > kills, f"no load: {held} answers, {failed} cut"
            assert unknown <= kills, f"{unknown} answers that clients hold are marked: only the one being written at a kill may be"
            replay = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "capture_proxy", "replay", str(proxy.store), stdout=asyncio.subprocess.PIPE
            )
            said, _ = await replay.communicate()
            assert replay.returncode == 0, said.decode()
        finally:
            await proxy.close()
    except BaseException as error:
        error.add_note(f"repeat with HARNESS_RL_TEST_SEED={seed}")
        raise


@pytest.mark.parametrize("continued", [False, True])
async def test_an_answer_that_may_not_have_arrived_trains_only_if_a_later_request_holds_it(
    engine: FakeEngine, serve: Serve, tmp_path: Path, continued: bool
) -> None:
    """As a kill between the store and the last byte leaves it: the turn, and no word of its delivery."""
    served = await serve(engine.url)
    agent, created = await served.agent()
    await agent.ask()
    await served.proxy.close()
    path = served.proxy.store.path(created.session_id)
    ends = [record.header["t"] for record in read_log(path).records]
    assert ends == ["session", "begin", "turn", "delivered"]
    raw = path.read_bytes()
    again = tmp_path / "again"
    again.mkdir()
    (again / path.name).write_bytes(raw[: _end_of(path, "turn")])
    second = await serve(engine.url, store=again)
    agent.base = second.url + "/v1"
    if continued:
        await agent.ask({"role": "user", "content": "go on"})
    trace = await second.admin.trace(created.session_id)
    assert [turn.metadata["mask_reason"] for turn in trace.turns] == ([None, None] if continued else ["abandoned"])
    assert trace_from_log(again / path.name) == trace
    status = await second.admin.status(created.session_id)
    assert status["calls_by_reason"] == ({"trained": 2} if continued else {"abandoned": 1})


def _end_of(path: Path, kind: str) -> int:
    """Where the last record of this kind ends in the log."""
    raw = path.read_bytes()
    at, best = len(MAGIC), 0
    while at < len(raw):
        start = at + 8
        at = start + int.from_bytes(raw[at : at + 4], "little")
        if f'"t":"{kind}"'.encode() in raw[start:at]:
            best = at
    return best
