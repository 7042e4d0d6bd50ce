"""What a server can do, found out by asking it: nothing is assumed from a version number, and what is missing is named with its flag."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import httpx

from harness_rl.errors import EngineError

TOKEN_ROUTES = ("/v1/chat/completions/render", "/inference/v1/generate", "/v1/chat/completions/derender")


@dataclass(frozen=True)
class Missing:
    what: str
    remedy: str
    training_only: bool = True
    """False: an evaluation cannot do without it either."""


@dataclass(frozen=True)
class EngineInfo:
    version: str
    """vLLM's; `unknown` for a server that does not tell."""
    model: str
    """Name under which the model is served (the first, if there are several)."""
    max_model_len: int
    has_tokens_api: bool
    """Ids in, ids out: render, generate, derender. Without it only chat capture works."""
    has_weight_api: bool
    """Weights can be pushed into the running server."""
    weight_version: str | None
    has_weight_backend: bool | None
    """Whether a weight-transfer backend is configured behind the weight routes; None: not asked, or not told."""
    processed_logprobs: bool | None
    """Whether logprobs are of the distribution really sampled from; None: could not be told."""
    has_adapter_api: bool = False
    """LoRA adapters can be loaded into the running server."""

    def missing(self, adapters: bool = False) -> list[Missing]:
        """What a run cannot do, or do in full. `adapters`: it loads policies as adapters, and needs no weight routes."""
        found = []
        if not self.has_tokens_api:
            found.append(Missing("token routes (only the lesser chat capture works)", "start vLLM >= 0.32 with --enable-scale-out", False))
        if adapters:
            if not self.has_adapter_api:
                how = "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-lora-rank and --max-loras"
                found.append(Missing("adapter routes (sync.lora = adapter)", how))
        elif not self.has_weight_api:
            found.append(Missing("weight routes (training cannot update this server)", "start vLLM with VLLM_SERVER_DEV_MODE=1"))
        elif self.has_weight_backend is False:
            found.append(
                Missing("a weight-transfer backend", """start vLLM with --weight-transfer-config '{"backend": "nccl"}' ("gloo" on CPU)""")
            )
        if self.processed_logprobs is False:
            found.append(Missing("logprobs of the sampled distribution", "start vLLM with --logprobs-mode processed_logprobs"))
        return found


async def probe(url: str, *, ask_backend: bool = True, timeout_s: float = 60.0) -> EngineInfo:
    """Ask the server at `url`. It must be ready; one token is sampled twice. `ask_backend = False` spares its log an error.

    Raises EngineError when nothing answers or the server is no vLLM.
    """
    # A connection for each request: the server closes one after an answer of 500, which a reused one would find out too late.
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        try:
            models = await _json(client, "/v1/models")
            if not models or not models.get("data"):
                raise EngineError(f"engine: {url} does not answer as an OpenAI-style server (no /v1/models); check engine.url")
            entry = models["data"][0]
            model, length = str(entry["id"]), entry.get("max_model_len")
            if not isinstance(length, int):
                raise EngineError(f"engine: {url} does not say its max_model_len; vLLM is needed, this is something else")
            weights = await _json(client, "/weight_info")
            has_weight_api = weights is not None and await _json(client, "/get_world_size") is not None
            return EngineInfo(
                version=str((await _json(client, "/version") or {}).get("version", "unknown")),
                model=model,
                max_model_len=length,
                has_tokens_api=all([await _has_route(client, route) for route in TOKEN_ROUTES]),
                has_weight_api=has_weight_api,
                weight_version=None if weights is None else weights.get("weight_version"),
                has_weight_backend=await _has_weight_backend(client) if has_weight_api and ask_backend else None,
                processed_logprobs=await _processed_logprobs(client, model),
                has_adapter_api=await _has_route(client, "/v1/load_lora_adapter"),
            )
        except httpx.HTTPError as error:
            raise EngineError(f"engine: {url} does not answer ({type(error).__name__}); start it, or check engine.url") from None


async def _json(client: httpx.AsyncClient, route: str) -> Any:
    """The answer's JSON, or None where the server has no such route."""
    answer = await client.get(route)
    if answer.status_code != 200:
        return None
    try:
        return answer.json()
    except ValueError:
        return None


async def _has_route(client: httpx.AsyncClient, route: str) -> bool:
    """An empty request is a bad one where the route is on, forbidden or unknown where it is off."""
    return (await client.post(route, json={})).status_code in (400, 422)


async def _has_weight_backend(client: httpx.AsyncClient) -> bool | None:
    """An init that no backend can accept: the refusal says whether there is a backend at all. It leaves an error in the server's log."""
    answer = await client.post("/init_weight_transfer_engine", json={"init_info": {"harness_rl_probe": True}})
    return "not configured" not in answer.text if answer.status_code in (400, 422, 500) else None


async def _processed_logprobs(client: httpx.AsyncClient, model: str) -> bool | None:
    """Compare one token's logprob at two temperatures: raw logprobs do not know the temperature."""

    async def top(temperature: float) -> dict[str, float]:
        body = {
            "model": model,
            "prompt": "The",
            "max_tokens": 1,
            "temperature": temperature,
            "seed": 0,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
        }
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return {}
        found = (answer.json()["choices"][0].get("logprobs") or {}).get("top_logprobs") or [{}]
        return {str(token): float(value) for token, value in found[0].items()}

    cool, warm = await top(0.5), await top(2.0)
    shared = [token for token in cool if token in warm]
    if not shared:
        return None
    return any(not math.isclose(cool[token], warm[token], abs_tol=1e-3) for token in shared)
