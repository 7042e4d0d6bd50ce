"""An engine for benches: the routes that a capturing proxy asks, from answers that are computed once, so that it costs next to nothing.

`python -m harness_rl.bench.capture.engine [--one-call]` prints its address. Correctness is the business of the engine in tests/proxy;
this one only has to be cheap and to answer with as many ids, logprobs and bytes as a real one would.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from functools import lru_cache
from typing import Any

from aiohttp import web

from harness_rl.bench.capture.conversation import LONGEST, TOOLS, Plan, answer_ids, answer_message, logprob, plan_of, turn_of

PARSE_CONTEXT = b',"parse_context":' + json.dumps({"tools": TOOLS, "tool_choice": "auto", "chat_template_kwargs": {}}).encode()
_LISTED = re.compile(rb'"token_ids":\s*\[')


@lru_cache(maxsize=4096)
def prompt_json(plan: Plan, turn: int) -> bytes:
    return json.dumps(plan.prompt(turn).tolist(), separators=(",", ":")).encode()


@lru_cache(maxsize=4096)
def choice_json(prompt_len: int, sampled: int, named: bool) -> bytes:
    """The choice's ids and logprobs; `named`: as a route gives them that also reads the answer, by token names and with the message."""
    ids = answer_ids(prompt_len, sampled).tolist()
    entries: list[dict[str, Any]] = []
    for token in ids:
        entry = {"token": f"token_id:{token}", "bytes": None} if named else {"token_id": token, "rank": 1}
        entries.append({**entry, "logprob": logprob(token), "top_logprobs": []})
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": ids, "logprobs": {"content": entries}}
    choice["weight_versions"] = [{"version": "v1", "start": 0, "end": sampled}]
    if named:
        choice["message"] = answer_message(sampled)
        choice["finish_reason"] = "tool_calls"
    return json.dumps(choice).encode()


@lru_cache(maxsize=64)
def derendered(sampled: int) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": answer_message(sampled), "finish_reason": "stop"}]}).encode()


class BenchEngine:
    """The routes. `holding` counts the generations that wait, `most` how many waited at once. `one_call`: it offers vLLM 0.33's form, in
    which a generation is answered as its parsers read it."""

    def __init__(self, one_call: bool = False) -> None:
        self.one_call = one_call
        self.derendered = 0
        self.holding = 0
        self.most = 0
        self.plans: dict[bytes, Plan] = {}
        """Plan by the first ids of its prompts: a generate request carries no text."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/most", self._most)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/chat/completions/render", self._render)
        app.router.add_post("/v1/chat/completions/derender", self._derender)
        app.router.add_post("/inference/v1/generate", self._generate)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _most(self, request: web.Request) -> web.Response:
        """How many generations waited at once since the last question."""
        most, self.most = self.most, self.holding
        return web.json_response({"most": most})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "max_model_len": LONGEST}]})

    async def _render(self, request: web.Request) -> web.Response:
        body = await request.read()
        plan = plan_of(body)
        ids = b"[1,2,3]" if plan is None else prompt_json(plan, turn_of(body))
        if plan is not None:
            self.plans[ids[1 : ids.index(b",")]] = plan
        params = b'"sampling_params":{"temperature":1.0,"structured_outputs":null,"stop_token_ids":[],"skip_special_tokens":false}'
        context = PARSE_CONTEXT if self.one_call else b""
        return _json(b'{"request_id":"render","token_ids":' + ids + b"," + params + context + b',"reasoning_ended":null}')

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.read()
        listed = _LISTED.search(body)
        assert listed is not None
        start, end = listed.end(), body.index(b"]", listed.end())
        prompt_len = body.count(b",", start, end) + 1
        plan = self.plans[body[start : body.index(b",", start)]]
        await self._hold(plan.hold_s)
        usage = b'"usage":{"prompt_tokens":%d,"completion_tokens":%d}' % (prompt_len, plan.sampled)
        choice = choice_json(prompt_len, plan.sampled, b'"output_mode"' in body)
        return _json(b'{"request_id":"g","choices":[' + choice + b"]," + usage + b"}")

    async def _derender(self, request: web.Request) -> web.Response:
        self.derendered += 1
        body = await request.read()
        listed = _LISTED.search(body)
        assert listed is not None
        return _json(derendered(body.count(b",", listed.end(), body.index(b"]", listed.end())) + 2))

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.read()
        plan = plan_of(body)
        assert plan is not None
        turn = turn_of(body)
        await self._hold(plan.hold_s)
        choice = choice_json(plan.prompt_len(turn), plan.sampled, True)
        usage = b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
            plan.prompt_len(turn), plan.sampled, plan.prompt_len(turn) + plan.sampled,
        )  # fmt: skip
        head = b'{"id":"chat","object":"chat.completion","created":1,"model":"policy","choices":['
        ids = prompt_json(plan, turn) if b'"return_token_ids"' in body else b"null"
        return _json(head + choice + b"]," + usage + b',"prompt_token_ids":' + ids + b"}")

    async def _hold(self, seconds: float) -> None:
        self.holding += 1
        self.most = max(self.most, self.holding)
        try:
            if seconds:
                await asyncio.sleep(seconds)
        finally:
            self.holding -= 1


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


async def main(one_call: bool) -> None:
    runner = web.AppRunner(BenchEngine(one_call).app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    print(f"listening on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main("--one-call" in sys.argv[1:]))
