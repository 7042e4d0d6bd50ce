"""A server with vLLM's weight, adapter and scoring routes over a tiny transformers model, and switches for faults a real one can have.

Adapters are read by peft, from their folders. The gloo transfer is real: it joins the sender's group as a worker would. Like vLLM on CPU it
computes with a private copy of the tied head, which a reload must pack again.
"""

from __future__ import annotations

import copy
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from learner_helpers import alone
from peft import PeftModel

from harness_rl.engines.vllm_plugin import check_plan, open_group


class FakeEngine:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.head = model.get_output_embeddings().weight.detach().clone()
        self.calls: list[str] = []
        self.faults: set[str] = set()
        """ignore_update, stale_head, wrong_version, shift_logprobs, refuse_update, hang_update, no_reset, no_probe, no_drain; of adapters
        refuse_adapter, wrong_adapter, forget_adapter, base_for_all, old_bytes"""
        self.first_read = ""
        """The folder whose content is served for every other, under `old_bytes`."""
        self.adapters: dict[str, tuple[str, Any]] = {}
        """Folder and merged model of each."""
        self.stalled: set[str] = set()
        """Routes (as in `calls`, without the query) that do not answer until `healed` is set."""
        self.killed_at: str | None = None
        """The route whose call ends the server as a kill would."""
        self.kill: Callable[[], None] = lambda: None
        self.healed = threading.Event()
        self.load: tuple[int, float] = (0, 0.0)
        """Running calls, and the share of the 512 tokens of cached blocks that they hold."""
        self.updating = False
        self.weight_version = "default"
        self.paused = False
        self.group: Any = None
        self.store: Any = None

    def handle(self, method: str, path: str, query: str, body: dict[str, Any]) -> tuple[int, Any]:
        name = path.strip("/")
        self.calls.append(name + (f"?{query}" if query else ""))
        if name == self.killed_at:
            self.kill()
            raise ConnectionAbortedError
        if name in self.stalled:
            self.healed.wait(30)
        if query.startswith("mode=wait") and "no_drain" in self.faults:
            self.healed.wait(30)
        route = getattr(self, "on_" + path.strip("/").replace("/", "_").replace("v1_", ""), None)
        return (404, {"detail": "Not Found"}) if route is None else route(body)

    def on_health(self, _: Any) -> tuple[int, Any]:
        return 200, {}

    def on_get_world_size(self, _: Any) -> tuple[int, Any]:
        return 200, {"world_size": 1}

    def on_models(self, _: Any) -> tuple[int, Any]:
        adapters = [{"id": name, "root": folder, "parent": "policy"} for name, (folder, _) in self.adapters.items()]
        return 200, {"data": [{"id": "policy", "root": "/model", "parent": None, "max_model_len": 256}, *adapters]}

    def on_load_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        name, folder = body["lora_name"], body["lora_path"]
        if "refuse_adapter" in self.faults:
            return 500, {"error": {"message": "LoRA rank 64 is greater than max_lora_rank 16"}}
        if name in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        if "forget_adapter" not in self.faults:
            merged = PeftModel.from_pretrained(
                copy.deepcopy(self.model), self.first_read if "old_bytes" in self.faults else folder
            ).merge_and_unload()
            if "wrong_adapter" in self.faults:
                merged.get_parameter("model.layers.1.mlp.down_proj.weight").data.mul_(1.05)
            self.adapters[name] = folder, merged
        return 200, "Success"

    def on_unload_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.adapters.pop(body["lora_name"], None) is None:
            return 404, {"error": {"message": f"The lora adapter '{body['lora_name']}' cannot be found."}}
        return 200, "Success"

    def on_init_weight_transfer_engine(self, body: dict[str, Any]) -> tuple[int, Any]:
        info = body["init_info"]
        self.group, self.store = open_group(
            info["master_address"], info["master_port"], info["rank_offset"], info["world_size"], info["timeout_s"]
        )
        return 200, {}

    def on_metrics(self, _: Any) -> tuple[int, Any]:
        running, share = self.load
        return 200, (
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="32"} 1.0\n'
            f'vllm:num_requests_running{{engine="0",model_name="policy"}} {float(running)}\n'
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="policy"}} {share}\n'
        )

    def on_pause(self, _: Any) -> tuple[int, Any]:
        self.paused = True
        return 200, {}

    def on_sleep(self, _: Any) -> tuple[int, Any]:
        self.paused = True
        return 200, {}

    def on_wake_up(self, _: Any) -> tuple[int, Any]:
        return 200, {}

    def on_start_weight_update(self, _: Any) -> tuple[int, Any]:
        if self.updating:
            return 500, {"detail": "start_weight_update called while a weight update is already active. Call finish_weight_update first."}
        self.updating = True
        return 200, {}

    def on_update_weights(self, body: dict[str, Any]) -> tuple[int, Any]:
        try:
            return self._update(body)
        except RuntimeError as error:
            self.updating = False  # as in vLLM's worker
            return 500, {"detail": str(error)}

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if "refuse_update" in self.faults:
            raise RuntimeError("out of memory")
        if "hang_update" in self.faults:
            time.sleep(30)
        info = body["update_info"]
        check_plan(**info)
        at = 0
        parameters = dict(self.model.named_parameters())
        for count in info["buckets"]:
            bucket = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))[at : at + count]
            at += count
            flat = torch.empty(sum(math.prod(s) for _, _, s in bucket), dtype=getattr(torch, bucket[0][1]))
            self.group.broadcast([flat], dist.BroadcastOptions()).wait()
            if "ignore_update" not in self.faults:
                for (name, _, shape), part in zip(bucket, flat.split([math.prod(s) for _, _, s in bucket]), strict=True):
                    parameters[name].data.copy_(part.view(shape))
        return 200, {}

    def on_finish_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.updating = False
        if "weight_version" not in body:
            return 200, {}
        if "stale_head" not in self.faults:
            self.head = self.model.get_output_embeddings().weight.detach().clone()
        self.weight_version = "default" if "wrong_version" in self.faults else body["weight_version"]
        return 200, {}

    def on_weight_info(self, _: Any) -> tuple[int, Any]:
        return 200, {"weight_version": self.weight_version}

    def on_reset_prefix_cache(self, _: Any) -> tuple[int, Any]:
        return 200, {"success": "no_reset" not in self.faults}

    def on_resume(self, _: Any) -> tuple[int, Any]:
        self.paused = False
        return 200, {}

    def on_completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        if "no_probe" in self.faults:
            return 200, {"choices": []}
        name = body["model"]
        if name != "policy" and name not in self.adapters:
            if "base_for_all" not in self.faults:
                return 404, {"error": {"message": f"The model `{name}` does not exist."}}
            name = "policy"
        model = self.adapters[name][1] if name in self.adapters else self.model
        return 200, {
            "model": name,
            "choices": [{"index": i, "prompt_logprobs": self._score(model, ids)} for i, ids in enumerate(body["prompt"])],
        }

    @torch.no_grad()
    def _score(self, model: Any, ids: list[int]) -> list[Any]:
        hidden = model.base_model(input_ids=torch.tensor([ids]), use_cache=False, branches=alone(ids)).last_hidden_state[0]
        logprobs = torch.log_softmax(hidden @ self.head.T, -1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1).tolist()
        if "shift_logprobs" in self.faults:
            logprobs = [*logprobs[1:], logprobs[0]]
        return [None, *({str(token): {"logprob": value, "rank": 1}} for token, value in zip(ids[1:], logprobs, strict=True))]


def kill(server: ThreadingHTTPServer, connections: list[socket.socket]) -> None:
    """Every connection breaks, and nothing listens any more."""
    server.shutdown()
    server.server_close()
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serve(engine: FakeEngine, port: int = 0) -> Iterator[str]:
    connections: list[socket.socket] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            connections.append(self.request)
            super().setup()

        def answer(self) -> None:
            url = urlparse(self.path)
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
            try:
                status, value = engine.handle(self.command, url.path, url.query, body)
            except ConnectionAbortedError:
                self.close_connection = True
                return
            data = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    engine.kill = lambda: kill(server, connections)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
