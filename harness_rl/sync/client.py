"""The weight, cache, adapter and scoring routes of one vLLM server.

Every call has one deadline as a whole, and one error that names server, route and cause.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
from numpy.typing import NDArray

from harness_rl.errors import EngineError
from harness_rl.sync.load import Load, read_load

PauseMode = Literal["keep", "wait", "abort"]


class SyncFailed(EngineError):
    """A step of a sync failed or missed its deadline; the message names the step, the engine and the cause. The engines stay paused."""


class StepLate(SyncFailed):
    """It missed its deadline."""


class EngineClient:
    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        self.url, self.model, self.timeout_s = url.rstrip("/"), model, timeout_s
        # A connection for each request: a server closes one after an answer of 500, which a reused one may find out too late.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False, limits=limits)

    def wait_healthy(self) -> None:
        """Wait, at most one call's deadline, for a server that is being started again."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                self._call("GET", "/health", min(5.0, self.timeout_s))
                return
            except SyncFailed:
                if time.monotonic() > deadline:
                    raise
                time.sleep(min(1.0, self.timeout_s / 4))

    def world_size(self) -> int:
        return int(self._json("GET", "/get_world_size", params={"include_dp": "true"})["world_size"])

    def max_model_len(self) -> int:
        """Longest prompt plus one sampled token."""
        models = self._json("GET", "/v1/models")["data"]
        return int(next(m for m in models if m["id"] == self.model)["max_model_len"])

    def load(self) -> Load:
        """What runs there now."""
        return read_load(self._call("GET", "/metrics").text)

    def init_transfer(self, info: dict[str, Any]) -> None:
        self._call("POST", "/init_weight_transfer_engine", json={"init_info": info})

    def pause(self, mode: PauseMode, clear_cache: bool, timeout_s: float | None = None) -> None:
        """Nothing is sampled from here on. Running calls are frozen (`keep`), end first (`wait`), or end at once with what they have.

        `clear_cache` drops every cached block; frozen calls then read their whole history again.
        """
        self._call("POST", "/pause", timeout_s, params={"mode": mode, "clear_cache": str(clear_cache).lower()})

    def sleep(self, mode: PauseMode) -> None:
        """Pause, give back the memory of cached blocks, and move the weights to the host."""
        self._call("POST", "/sleep", params={"level": 1, "mode": mode})

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take the memory again. With the last part the server samples on."""
        self._call("POST", "/wake_up", params={"tags": part})

    def start_update(self) -> None:
        """One that an earlier sender left open is closed first: it is all sent again."""
        try:
            self._call("POST", "/start_weight_update")
        except SyncFailed as error:
            if "already active" not in str(error).replace("\\n", " "):
                raise
            self._call("POST", "/finish_weight_update", json={})
            self._call("POST", "/start_weight_update")

    def update(self, info: dict[str, Any]) -> None:
        self._call("POST", "/update_weights", json={"update_info": info})

    def finish_update(self, version: str) -> None:
        self._call("POST", "/finish_weight_update", json={"weight_version": version})

    def version(self) -> str:
        return str(self._json("GET", "/weight_info")["weight_version"])

    def reset_prefix_cache(self) -> None:
        """Of every call, running ones too: those read their history again."""
        if self._json("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"}).get("success") is not True:
            raise SyncFailed(f"engine {self.url}: the prefix cache was not reset; blocks of old weights would be reused")

    def resume(self) -> None:
        self._call("POST", "/resume")

    def adapters(self) -> dict[str, Path]:
        """The folder of each adapter that it has, by name."""
        models = self._json("GET", "/v1/models")["data"]
        return {str(model["id"]): Path(model["root"]) for model in models if model.get("parent") is not None}

    def load_adapter(self, name: str, folder: Path) -> None:
        """The server reads the folder itself, so it must lie there under the same path."""
        self._call("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        """Nobody can ask for it any more; calls that run under it end under it."""
        self._call("POST", "/v1/unload_lora_adapter", json={"lora_name": name})

    def score(self, prompts: Sequence[NDArray[np.int32]], adapter: str | None = None) -> list[NDArray[np.float32]]:
        """The engine's own logprob of tokens 1 .. L - 1 of each prompt, at temperature 1."""
        model = adapter or self.model
        body = {"model": model, "prompt": [p.tolist() for p in prompts], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = self._json("POST", "/v1/completions", json=body)
        if adapter is not None and answer.get("model", adapter) != adapter:
            raise SyncFailed(f"engine {self.url} was asked for adapter {adapter} and answered as {answer['model']!r}")
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != len(prompts):
            raise SyncFailed(f"engine {self.url}: scored {len(choices)} of {len(prompts)} probe prompts")
        try:
            return [
                np.array(
                    [entry[str(token)]["logprob"] for token, entry in zip(p[1:], c["prompt_logprobs"][1:], strict=True)], dtype=np.float32
                )
                for p, c in zip(prompts, choices, strict=True)
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise SyncFailed(f"engine {self.url}: probe answer has no prompt logprob for each token ({error!r})") from error

    def close(self) -> None:
        self._http.close()

    def _json(self, method: str, path: str, **kwargs: Any) -> Any:
        response = self._call(method, path, **kwargs)
        try:
            return response.json()
        except ValueError as error:
            raise SyncFailed(f"engine {self.url}{path}: the answer is not JSON: {response.text[:200]!r}") from error

    def _call(self, method: str, path: str, timeout_s: float | None = None, **kwargs: Any) -> httpx.Response:
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            response = self._http.request(method, path, timeout=limit, **kwargs)
        except httpx.TimeoutException as error:
            raise StepLate(f"engine {self.url}{path}: no answer in {limit:g} s") from error
        except httpx.HTTPError as error:
            raise SyncFailed(f"engine {self.url}{path}: {error!r}") from error
        if response.status_code != 200:
            raise SyncFailed(f"engine {self.url}{path}: HTTP {response.status_code}: {response.text[:300]!r}{_hint(path, response)}")
        return response


def _hint(path: str, response: httpx.Response) -> str:
    """What to do about a 404: of a route that is not there, or of a folder."""
    if response.status_code != 404:
        return ""
    if "Not Found" not in response.text:
        return "; it must see that folder under the same path" if path.endswith("/load_lora_adapter") else ""
    if "lora_adapter" in path:
        return "; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
    return "; start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"
