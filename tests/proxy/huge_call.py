"""A session with huge bodies, as a process of its own: its engine, which reads and does not look, and its client.

`python tests/proxy/huge_call.py` prints the engine's URL. For each line `URL KEY MESSAGES` on its standard input it makes one call with so
big a body (in messages of 1.1 MB) and prints the body's size, then the status of its answer.
"""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp
from aiohttp import web

LINE = 'def f(x):\n\treturn "a b" + x  # c\u00f6mment\n'
IDS = list(range(1, 200))


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "policy", "max_model_len": 1 << 20}]})


async def _drain(request: web.Request) -> int:
    size = 0
    async for chunk in request.content.iter_any():
        size += len(chunk)
    return size


async def _render(request: web.Request) -> web.Response:
    await _drain(request)
    return web.json_response({"token_ids": IDS, "sampling_params": {}})


async def _generate(request: web.Request) -> web.Response:
    await _drain(request)
    entries = [{"token_id": 7, "logprob": -0.5, "top_logprobs": []}]
    spans = [{"version": "default", "start": 0, "end": 1}]
    choice = {"index": 0, "token_ids": [7], "logprobs": {"content": entries}, "finish_reason": "stop", "weight_versions": spans}
    return web.json_response({"choices": [choice]})


async def _derender(request: web.Request) -> web.Response:
    await _drain(request)
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": "ok"}}]})


async def main() -> None:
    app = web.Application()
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/v1/chat/completions/render", _render)
    app.router.add_post("/inference/v1/generate", _generate)
    app.router.add_post("/v1/chat/completions/derender", _derender)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        while line := await asyncio.to_thread(sys.stdin.readline):
            url, key, count = line.split()
            # As an agent that has read many files: a long history, of which no message is huge.
            text = LINE * (1000 * 1024 // len(LINE.encode()))
            messages = [{"role": "user", "content": f"{number}\n{text}"} for number in range(int(count))]
            raw = json.dumps({"model": "m", "messages": messages}, ensure_ascii=False).encode()
            print(len(raw), flush=True)
            async with http.post(url, data=raw, headers={"Authorization": f"Bearer {key}"}) as response:
                await response.read()
                print(response.status, flush=True)


asyncio.run(main())
