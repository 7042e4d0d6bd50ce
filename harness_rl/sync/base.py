"""Weight sync: one protocol for every transport, each step with a deadline, and never a resume on weights that are not whole.

    pause(keep) -> start -> update || broadcast -> finish(version) -> read the version back -> reset_prefix_cache -> resume -> probe

The prefix cache is reset only after `finish`, because blocks filled before it would belong to no policy. A failure before `resume` leaves
the engines paused; a failed probe pauses them again. What is sampled between resume and a passed probe is `unproven` (the proxy's part).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray

from harness_rl.errors import EngineError, InvariantError
from harness_rl.sync.verify import LogprobProbe, Proof

T = TypeVar("T")
Score = Callable[[list[NDArray[np.int32]]], list[NDArray[np.float32]]]
"""Prompts -> logprob of tokens 1 .. L - 1 of each at temperature 1, by the learner."""


class SyncFailed(EngineError):
    """A step of a sync failed or missed its deadline; the message names the step, the engine and the cause. The engines stay paused."""


class WeightProofFailed(InvariantError):
    """The engine does not hold the weights it was sent; sampling stays stopped."""


class EngineClient:
    """The weight and scoring routes of one vLLM server."""

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        self.url, self.model = url.rstrip("/"), model
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)

    def wait_healthy(self) -> None:
        """Wait, at most one call's deadline, for a server that is being started again."""
        deadline = time.monotonic() + float(self._http.timeout.read or 0)
        while True:
            try:
                self._call("GET", "/health")
                return
            except SyncFailed:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)

    def world_size(self) -> int:
        return int(self._json("GET", "/get_world_size", params={"include_dp": "true"})["world_size"])

    def max_model_len(self) -> int:
        """Longest prompt plus one sampled token."""
        models = self._json("GET", "/v1/models")["data"]
        return int(next(m for m in models if m["id"] == self.model)["max_model_len"])

    def init_transfer(self, info: dict[str, Any]) -> None:
        self._call("POST", "/init_weight_transfer_engine", json={"init_info": info})

    def pause(self) -> None:
        """Freeze running calls where they are (they go on after resume) and drop every cached block."""
        self._call("POST", "/pause", params={"mode": "keep", "clear_cache": "true"})

    def start_update(self) -> None:
        self._call("POST", "/start_weight_update")

    def update(self, info: dict[str, Any]) -> None:
        self._call("POST", "/update_weights", json={"update_info": info})

    def finish_update(self, version: str) -> None:
        self._call("POST", "/finish_weight_update", json={"weight_version": version})

    def version(self) -> str:
        return str(self._json("GET", "/weight_info")["weight_version"])

    def reset_prefix_cache(self) -> None:
        if self._json("POST", "/reset_prefix_cache").get("success") is not True:
            raise SyncFailed(f"engine {self.url}: the prefix cache was not reset; blocks of old weights would be reused")

    def resume(self) -> None:
        self._call("POST", "/resume")

    def score(self, prompts: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """The engine's own logprob of tokens 1 .. L - 1 of each prompt, at temperature 1."""
        body = {"model": self.model, "prompt": [p.tolist() for p in prompts], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        choices = sorted(self._json("POST", "/v1/completions", json=body)["choices"], key=lambda choice: choice["index"])
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

    def _call(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **kwargs)
        except httpx.TimeoutException as error:
            raise SyncFailed(f"engine {self.url}{path}: no answer in {self._http.timeout.read:.0f} s") from error
        except httpx.HTTPError as error:
            raise SyncFailed(f"engine {self.url}{path}: {error!r}") from error
        if response.status_code != 200:
            hint = "; start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config" if response.status_code == 404 else ""
            raise SyncFailed(f"engine {self.url}{path}: HTTP {response.status_code}: {response.text[:300]!r}{hint}")
        return response


class WeightSender(Protocol):
    """One transport. `push` runs between `start` and `finish`: it moves every tensor into every engine."""

    def connect(self, engines: Sequence[EngineClient]) -> None: ...

    def push(self, engines: Sequence[EngineClient]) -> None: ...

    def close(self) -> None: ...


@dataclass
class SyncReport:
    version: str
    proof: Proof
    seconds: dict[str, float] = field(default_factory=dict)
    """pause, transfer, finish, probe; `stopped` is the time from the first pause to the last resume."""


class WeightSync:
    """Brings every engine to the learner's weights and proves it. Connects on first use, and again after an engine was restarted."""

    def __init__(self, engines: Sequence[EngineClient], sender: WeightSender, probe: LogprobProbe, score: Score) -> None:
        self._engines, self._sender, self._probe, self._score = engines, sender, probe, score
        self._version: str | None = None
        """What the engines were last brought to; None before the first sync."""

    def sync(self, version: str, prompts: list[NDArray[np.int32]]) -> SyncReport:
        """Raises SyncFailed or WeightProofFailed; then no engine samples on, and the next sync connects anew."""
        connected, self._version = self._version, None
        clock: dict[str, float] = {}
        self._everywhere("health", lambda engine: engine.wait_healthy())
        if connected is None or set(self._everywhere("version", lambda engine: engine.version())) != {connected}:
            # First use, or an engine was started anew: what it was connected with died with it.
            self._sender.close()
            self._sender.connect(self._engines)
        stop_began = time.perf_counter()
        with _timed(clock, "pause"):
            self._everywhere("pause", lambda engine: engine.pause())
        with _timed(clock, "transfer"):
            self._everywhere("start", lambda engine: engine.start_update())
            self._sender.push(self._engines)
        with _timed(clock, "finish"):
            self._everywhere("finish", lambda engine: engine.finish_update(version))
            self._everywhere("version", lambda engine: _check_version(engine, version))
            self._everywhere("reset_prefix_cache", lambda engine: engine.reset_prefix_cache())
            self._everywhere("resume", lambda engine: engine.resume())
        clock["stopped"] = time.perf_counter() - stop_began
        with _timed(clock, "probe"):
            proof = self.prove(version, prompts)
        self._version = version
        return SyncReport(version, proof, clock)

    def prove(self, version: str, prompts: list[NDArray[np.int32]]) -> Proof:
        """The worst engine's proof; the first engine that fails stops all of them. Raises WeightProofFailed."""
        limit = min(self._everywhere("models", lambda engine: engine.max_model_len())) - 1
        prompts = [prompt[:limit] for prompt in prompts]
        with ThreadPoolExecutor(1) as pool:
            learner = pool.submit(self._score, prompts)  # while the engines score
            scores = self._everywhere("probe", lambda engine: engine.score(prompts))
            expected = learner.result()
        proofs = [self._probe.judge(score, expected) for score in scores]
        for engine, proof in zip(self._engines, proofs, strict=True):
            if not proof.ok:
                self._everywhere("pause", lambda engine: engine.pause())
                raise WeightProofFailed(
                    f"engine {engine.url} does not compute with the weights of {version}: over {proof.tokens} tokens its logprobs differ "
                    f"from the learner's by {proof.mean_abs:.3g} in the mean (bound {proof.bound:.3g}), by {proof.max_abs:.3g} at most; "
                    "sampling is stopped"
                )
        return max(proofs, key=lambda proof: proof.mean_abs)

    def _everywhere(self, step: str, call: Callable[[EngineClient], T]) -> list[T]:
        """Run `call` for all engines at once; the first failure names the step."""
        with ThreadPoolExecutor(len(self._engines)) as pool:
            futures = [pool.submit(call, engine) for engine in self._engines]
        try:
            return [future.result() for future in futures]
        except SyncFailed as error:
            raise SyncFailed(f"sync step {step!r}: {error}") from error

    def close(self) -> None:
        self._sender.close()
        for engine in self._engines:
            engine.close()


def _check_version(engine: EngineClient, version: str) -> None:
    found = engine.version()
    if found != version:
        raise SyncFailed(f"engine {engine.url} says it has weights {found!r} after {version!r} was finished")


@contextmanager
def _timed(clock: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    clock[name] = time.perf_counter() - began


def rank_offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """(first rank of each engine's workers, size of the whole group); the learner is rank 0."""
    offsets, at = [], 1
    for size in sizes:
        offsets.append(at)
        at += size
    return offsets, at
