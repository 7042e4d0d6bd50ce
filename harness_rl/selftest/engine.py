"""vLLM's token API from a real tokenizer and template and a script of assistant turns: the engine of the self-test.

Invariant: everything but the choice of tokens is as vLLM does it (a parity test compares), and what it was asked and answered is kept, so
that a trace can be judged by it. The sampled ids are, where so told, not those into which their text would be tokenised again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from aiohttp import web

from harness_rl.selftest.qwen3 import Qwen3


@dataclass(frozen=True)
class Said:
    """One assistant turn, in the model's own spelling."""

    text: str
    finish: str = "stop"
    """`stop`: the end-of-turn id follows; `length`: it was cut here."""
    odd: bool = True
    """Sampled as ids that are not the text's tokenisation."""


@dataclass
class ScriptedEngine:
    """`async with ScriptedEngine(model) as engine:` serves at `engine.url`."""

    model: Qwen3
    name: str = "policy"
    max_model_len: int = 200_000
    script: deque[Said] = field(default_factory=deque)
    default: Said = field(default_factory=lambda: Said("<think>\nNothing is left.\n</think>\n\nAll done."))
    """After the script's end."""
    asides: dict[str, Said] = field(default_factory=dict)
    """Words of a prompt -> the answer to such prompts, beside the script."""
    sampled: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Prompt and answer of every generation, in order."""
    url: str = ""
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> ScriptedEngine:
        self._runner = web.AppRunner(self.app(), access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/chat/completions/render", self._render)
        app.router.add_post("/v1/chat/completions/derender", self._derender)
        app.router.add_post("/inference/v1/generate", self._generate)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.name, "max_model_len": self.max_model_len}]})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default"})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.model.render(body) if "messages" in body else self.model.encode(body["prompt"])
        return web.json_response({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": self.model.decode((await request.json())["tokens"])})

    async def _render(self, request: web.Request) -> web.Response:
        ids = self.model.render(await request.json())
        if len(ids) > self.max_model_len:
            text = f"This model's maximum context length is {self.max_model_len} tokens. However, your request has {len(ids)} input tokens."
            return web.json_response({"error": {"message": text, "type": "BadRequestError", "code": 400}}, status=400)
        return web.json_response({"token_ids": ids, "sampling_params": {"temperature": 1.0, "stop_token_ids": []}})

    async def _derender(self, request: web.Request) -> web.Response:
        body = await request.json()
        choice = body["generate_response"]["choices"][0]
        message = self.model.parse(choice["token_ids"], body["chat_request"])
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": choice["finish_reason"]}]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["token_ids"]
        ids, finish = self._answer(
            prompt, min(body["sampling_params"].get("max_tokens", self.max_model_len), self.max_model_len - len(prompt))
        )
        self.sampled.append((prompt, ids))
        entries = [{"token_id": i, "logprob": logprob_of(i, n), "rank": 1, "top_logprobs": []} for n, i in enumerate(ids)]
        choice = {"index": 0, "finish_reason": finish, "stop_reason": None, "token_ids": ids, "logprobs": {"content": entries}}
        choice["weight_versions"] = [{"version": "default", "start": 0, "end": len(ids)}]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return web.json_response({"request_id": f"generate-{len(self.sampled)}", "usage": usage, "choices": [choice]})

    def _answer(self, prompt: list[int], room: int) -> tuple[list[int], str]:
        shown = self.model.decode(prompt) if self.asides else ""
        said = next((answer for words, answer in self.asides.items() if words in shown), None)
        if said is None:
            said = self.script.popleft() if self.script else self.default
        ids = self.model.encode_oddly(said.text) if said.odd else self.model.encode(said.text)
        if said.finish == "stop":
            ids.append(self.model.end)
        return (ids[:room], "length") if len(ids) > room else (ids, said.finish)


def logprob_of(token: int, position: int) -> float:
    """Another logprob for each id and place, so that a swap shows."""
    return -0.01 - ((31 * token + 7 * position) % 97) / 16
