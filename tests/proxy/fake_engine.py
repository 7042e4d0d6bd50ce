"""A small engine that speaks the part of vLLM's HTTP surface that the proxy uses, from a toy tokenizer and a script of answers.

It can misbehave on purpose. In a test: `async with FakeEngine() as engine:` then `engine.say("text")`; alone:
`python tests/proxy/fake_engine.py`.

Tokens: `<|im_start|>` is 1, `<|im_end|>` is 2, an image is three times 3, every word, run of spaces and other character is one id in order
of first use. An answer in the style `chars` is sampled as one id per character, which is never how its text is tokenised again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

START, END, PAD = 1, 2, 3
PADS = 3
"""Ids that stand for an image."""
_PIECE = re.compile(r"<\|im_start\|>|<\|im_end\|>|<\|image_pad\|>|\w+|\s+|[^\w\s]")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINK = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


class ToyTokenizer:
    """Reversible and deliberately not unique: any text also has a one-id-per-character spelling."""

    def __init__(self) -> None:
        self.pieces = ["", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}

    def id_of(self, piece: str) -> int:
        if piece not in self.ids:
            self.ids[piece] = len(self.pieces)
            self.pieces.append(piece)
        return self.ids[piece]

    def encode(self, text: str) -> list[int]:
        return [self.id_of(piece) for piece in _PIECE.findall(text)]

    def encode_chars(self, text: str) -> list[int]:
        return [self.id_of(char) for char in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids)


@dataclass
class Said:
    """One scripted answer."""

    text: str
    finish: str = "stop"
    style: str = "words"
    """`words`: as the text is tokenised; `chars`: one id per character."""
    stop_reason: int | str | None = None
    delay_s: float = 0.0
    end: int | None = END
    """The id that ends the turn; None: the server keeps it to itself."""


@dataclass
class FakeEngine:
    """State and faults of the engine; change them while it runs."""

    model: str = "policy"
    max_model_len: int = 4096
    token_routes: bool = True
    tokenize_route: bool = True
    weight_info: bool = True
    version: str = "default"
    """Of its own model's weights."""
    adapters: set[str] = field(default_factory=set)
    """Names beside `model` that it samples for."""
    answers_as: str | None = None
    """The model that its answers say sampled them, in place of the one that was asked."""
    default_text: str = "ok"
    default_style: str = "words"
    delay_s: float = 0.0
    """Before every generation ends."""
    held_up: asyncio.Event | None = None
    """No generation ends before it is set."""
    fault: str | None = None
    """Of the next generations: `no_logprobs`, `short`, `doubled`, `shuffled`, `swapped`, `nan`, `null`, `floor`, `positive`, `bool_ids`,
    `no_ids`, `no_versions`, `bad_versions`, `two_choices`."""
    sees_images: bool = True
    drop_think: bool = False
    """The template shows no `<think>` block before the last message."""
    never_show_think: bool = False
    """The template shows no `<think>` block at all."""
    reads_thinking: bool = False
    """The parser gives a leading `<think>` block as reasoning."""
    one_call: bool = False
    """As vLLM 0.33: a render tells with what an answer can be read, and a generation reads its own."""
    names_ids: bool = True
    """In that form its logprobs name ids, not texts (`--return-tokens-as-token-ids`)."""
    refuses_reading: bool = False
    misreads: bool = False
    """What that form reads is not what its parser reads."""
    statuses: deque[int] = field(default_factory=deque)
    """HTTP statuses that the next generate or chat requests get instead of an answer; -1 resets the connection, 302 redirects."""
    redirect_to: str = "http://127.0.0.1:9/"
    gzip: bool = False
    """Answers are compressed."""
    asides: dict[str, str] = field(default_factory=dict)
    """Words of a prompt -> the answer to such prompts, beside the script."""
    script: deque[Said] = field(default_factory=deque)
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """Prompt and answer of every generation that came to its end."""
    active: int = 0
    cancelled: int = 0
    tokenizer: ToyTokenizer = field(default_factory=ToyTokenizer)
    url: str = ""
    _runner: web.AppRunner | None = None

    def say(self, text: str, **options: Any) -> None:
        """Scripts the next answer."""
        self.script.append(Said(text, **options))

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """The requests seen on a path that ends like this."""
        return [body for seen, body in self.requests if seen.endswith(path)]

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        self._runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.5, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._compress])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/chat/completions/render", self._render)
        app.router.add_post("/v1/chat/completions/derender", self._derender)
        app.router.add_post("/inference/v1/generate", self._generate)
        return app

    # -- template and parser ------------------------------------------------------------------------------------------------------------

    def template(self, chat: dict[str, Any]) -> str:
        messages = chat["messages"]
        out = []
        if chat.get("tools"):
            out.append("<|im_start|>system\ntools " + json.dumps(chat["tools"]) + "<|im_end|>\n")
        for index, message in enumerate(messages):
            last = index == len(messages) - 1
            text = message.get("content") or ""
            text = text if isinstance(text, str) else "\n".join(part.get("text", "<|image_pad|>" * PADS) for part in text)
            if message["role"] == "assistant":
                reasoning = message.get("reasoning")
                text = (f"<think>{reasoning}</think>" if reasoning else "") + text
                if self.never_show_think or (self.drop_think and not (last and not chat.get("add_generation_prompt", True))):
                    text = _THINK.sub("", text)
                calls = []
                for call in message.get("tool_calls") or ():
                    try:
                        arguments = json.loads(call["function"]["arguments"])
                    except ValueError:
                        arguments = {}
                    shown = json.dumps({"name": call["function"]["name"], "arguments": arguments})
                    calls.append(f"<tool_call>\n{shown}\n</tool_call>")
                text = "\n".join([*([text] if text else []), *calls])
            closing = "" if last and chat.get("continue_final_message") else "<|im_end|>\n"
            out.append(f"<|im_start|>{message['role']}\n{text}{closing}")
        if chat.get("add_generation_prompt", True):
            out.append("<|im_start|>assistant\n")
        return "".join(out)

    def parse(self, text: str, tools: Any) -> dict[str, Any]:
        """vLLM's hermes parser in small: what does not parse stays content; text after a call is dropped."""
        reasoning = None
        if self.reads_thinking and (match := re.match(r"<think>(.*?)</think>", text, re.DOTALL)):
            reasoning, text = match[1], text[match.end() :]
        calls = []
        if tools:
            try:
                for raw in _CALL.findall(text):
                    call = json.loads(raw)
                    calls.append({"name": call["name"], "arguments": json.dumps(call["arguments"])})
            except (ValueError, KeyError, TypeError):
                calls = []
        content = text[: text.index("<tool_call>")] or None if calls else text
        wire = [{"id": f"engine{i}", "type": "function", "function": call} for i, call in enumerate(calls)]
        return {"role": "assistant", "content": content, "tool_calls": wire, "reasoning": reasoning}

    # -- routes -------------------------------------------------------------------------------------------------------------------------

    async def _body(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        self.requests.append((request.path, body))
        return body

    @web.middleware
    async def _compress(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if self.gzip:
            response.enable_compression(web.ContentCoding.gzip)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        adapters = [{"id": name, "parent": self.model, "root": f"/run/adapters/{name}"} for name in sorted(self.adapters)]
        return web.json_response({"object": "list", "data": [{"id": self.model, "max_model_len": self.max_model_len}, *adapters]})

    async def _weight_info(self, request: web.Request) -> web.Response:
        if not self.weight_info:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"weight_version": self.version})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if not self.tokenize_route:
            return _error(404, "Not Found")
        ids = self.tokenizer.encode(self.template(body) if "messages" in body else body["prompt"])
        return web.json_response({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": self.tokenizer.decode((await self._body(request))["tokens"])})

    async def _render(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if not self.token_routes:
            return _error(403, "Scale-out endpoints are disabled.")
        ids = self.tokenizer.encode(self.template(body))
        if len(ids) > self.max_model_len:
            return _error(400, f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt contains more.")
        images = [part["image_url"]["url"] for message in body["messages"] for part in _listed(message) if part["type"] == "image_url"]
        if images and not self.sees_images:
            return _error(400, "At most 0 image(s) may be provided in one prompt.")
        features: dict[str, Any] | None = None
        if images:
            starts = [at for at, i in enumerate(ids) if i == PAD][::PADS]
            places = [{"offset": at, "length": PADS} for at in starts]
            features = {"mm_hashes": {"image": images}, "mm_placeholders": {"image": places}, "kwargs_data": {"image": images}}
        forced = body.get("tool_choice") not in (None, "auto", "none") or (body.get("response_format") or {}).get("type") == "json_object"
        params = {"temperature": 1.0, "structured_outputs": {"json_object": True} if forced else None, "stop_token_ids": []}
        answer = {"token_ids": ids, "sampling_params": params, "reasoning_ended": None, "features": features}
        if self.one_call:
            if body.get("tools"):  # hermes looks for its marks in nothing else
                params |= {"skip_special_tokens": False, "spaces_between_special_tokens": True}
            answer["parse_context"] = {"tools": body.get("tools"), "tool_choice": body.get("tool_choice") or "none"}
        return web.json_response(answer)

    async def _derender(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if not self.token_routes:
            return _error(403, "Scale-out endpoints are disabled.")
        choice = body["generate_response"]["choices"][0]
        if not choice["token_ids"]:
            return _error(400, "choice 0 has empty or null token_ids")
        message = self.parse(self.tokenizer.decode(choice["token_ids"]), body["chat_request"].get("tools"))
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": choice["finish_reason"]}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        if not self.token_routes:
            return _error(403, "Scale-out endpoints are disabled.")
        if (failed := await self._fail(request, body)) is not None:
            return failed
        params = body["sampling_params"]
        if params.get("prompt_logprobs") is not None:
            entries = [None] + [{str(i): {"logprob": logprob_of(i, n)}} for n, i in enumerate(body["token_ids"][1:], 1)]
            return web.json_response({"choices": [{"index": 0, "token_ids": [END]}], "prompt_logprobs": entries})
        read = body.get("output_mode") == "derender"
        if read and (self.refuses_reading or not self.one_call):
            return _error(400, "output_mode='derender' is not to be had.")
        ids, said = await self._sample(body["token_ids"], params)
        named = [{"token": f"token_id:{i}" if self.names_ids else self.tokenizer.pieces[i]} if read else {"token_id": i} for i in ids]
        entries = [{**name, "logprob": logprob_of(i, n), "top_logprobs": []} for n, (i, name) in enumerate(zip(ids, named, strict=True))]
        choice = self._choice(ids, said, entries, "token" if read else "token_id")
        if read:
            self._read(choice, ids, said, body)
        usage = {"prompt_tokens": len(body["token_ids"]), "completion_tokens": len(ids)}
        choices = [choice] * (2 if self.fault == "two_choices" else 1)
        answer = {"model": self.answers_as or body["model"], "choices": choices, "usage": usage}
        return web.Response(text=json.dumps(answer), content_type="application/json")

    def _read(self, choice: dict[str, Any], ids: list[int], said: Said, body: dict[str, Any]) -> None:
        """Adds the message. The id at which the engine stopped is no part of it, whatever it is, nor are control tokens by default."""
        shown = ids[:-1] if said.finish == "stop" and said.end is not None else ids
        if body["sampling_params"].get("skip_special_tokens") is not False:
            shown = [i for i in shown if i not in (START, END, PAD)]
        choice["message"] = self.parse(self.tokenizer.decode(shown), body["parse_context"]["tools"])
        if not shown:
            choice["message"]["content"] = None  # as vLLM's reasoning parsers have it
        if self.misreads:
            choice["message"]["content"] = "misread"
        if said.finish == "stop" and choice["message"]["tool_calls"]:
            choice["finish_reason"] = "tool_calls"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        if (failed := await self._fail(request, body)) is not None:
            return failed
        prompt = self.tokenizer.encode(self.template(body))
        ids, said = await self._sample(prompt, body)
        entries = [{"token": f"token_id:{i}", "logprob": logprob_of(i, n)} for n, i in enumerate(ids)]
        choice = self._choice(ids, said, entries, "token")
        choice.pop("weight_versions", None)
        text = self.tokenizer.decode(ids[:-1] if ids and ids[-1] == END else ids)
        choice["message"] = self.parse(text, body.get("tools"))
        answer: dict[str, Any] = {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}}
        answer["model"] = self.answers_as or body["model"]
        if body.get("return_token_ids") and self.fault != "no_prompt_ids":
            answer["prompt_token_ids"] = prompt
        return web.Response(text=json.dumps(answer), content_type="application/json")

    async def _fail(self, request: web.Request, body: dict[str, Any]) -> web.Response | None:
        if body["model"] not in {self.model, *self.adapters}:
            return _error(404, f"The model `{body['model']}` does not exist. Valid aliases: {self.model}.")
        if not self.statuses:
            return None
        status = self.statuses.popleft()
        if status == -1:
            assert request.transport is not None
            request.transport.abort()
            return web.Response(status=500)
        if status == 302:
            return web.Response(status=302, headers={"Location": self.redirect_to})
        return _error(status, f"told to answer {status}")

    async def _sample(self, prompt: list[int], params: dict[str, Any]) -> tuple[list[int], Said]:
        shown = self.tokenizer.decode(prompt) if self.asides else ""
        aside = next((answer for words, answer in self.asides.items() if words in shown), None)
        if aside is not None:
            said = Said(aside)
        else:
            said = self.script.popleft() if self.script else Said(self.default_text, style=self.default_style)
        self.active += 1
        try:
            await asyncio.sleep(said.delay_s or self.delay_s)
            if self.held_up is not None:
                await self.held_up.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1
        ids = (self.tokenizer.encode_chars if said.style == "chars" else self.tokenizer.encode)(said.text)
        if said.finish == "stop" and not isinstance(said.stop_reason, str) and said.end is not None:
            ids.append(said.end)
        room = min(params.get("max_tokens") or self.max_model_len, self.max_model_len - len(prompt))
        if len(ids) > room:
            ids, said = ids[:room], Said(said.text, "length")
        self.sampled.append((tuple(prompt), tuple(ids)))
        return ids, said

    def _choice(self, ids: list[int], said: Said, entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
        logprobs: Any = entries
        spans = [{"version": self.version, "start": 0, "end": len(ids)}]
        middle = len(ids) // 2
        match self.fault:
            case "no_logprobs":
                logprobs = None
            case "short":
                logprobs = entries[:middle]
            case "doubled":
                logprobs = [entry for entry in entries for _ in range(2)]
            case "shuffled":
                logprobs = [*entries[1:], entries[0]]
            case "swapped":
                # One entry lost, another doubled: the count is right by luck.
                logprobs = [entries[-1], *entries[1:]]
            case "nan" | "null" | "floor" | "positive":
                value = {"nan": float("nan"), "null": None, "floor": -9999.0, "positive": 0.25}[self.fault]
                logprobs = [*entries[:middle], {**entries[middle], "logprob": value}, *entries[middle + 1 :]]
            case "no_versions":
                spans = None  # type: ignore[assignment]
            case "bad_versions":
                spans = [{"version": self.version, "start": 0, "end": max(len(ids) - 1, 0)}]
        shown: Any = ids
        if self.fault == "bool_ids":
            shown = [True, *ids[1:]]
        if self.fault == "no_ids":
            shown = None
        assert all(name in entry for entry in entries)
        content = {"content": logprobs} if logprobs is not None else None
        return {"index": 0, "token_ids": shown, "logprobs": content, "finish_reason": said.finish, "stop_reason": said.stop_reason,
                "weight_versions": spans}  # fmt: skip


def logprob_of(token: int, position: int) -> float:
    """A made-up but reproducible logprob."""
    return -(1 + (token * 7 + position * 13) % 97) / 64


def _listed(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "BadRequestError", "code": status}}, status=status)


async def _serve(port: int) -> None:
    async with FakeEngine() as engine:
        await engine.stop()
        await engine.start(port)
        print(f"fake engine listening on {engine.url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="A toy engine with vLLM's token routes.")
    options.add_argument("--port", type=int, default=8101)
    asyncio.run(_serve(options.parse_args().port))
