"""Weight sync into a real vLLM server: what arrives, and that the proof fires when something else does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from learner_helpers import trace
from vllm_server import make_tiny_model, vllm

from capture_proxy.trace import hash_ids, hash_sample
from harness_rl.learner.policy import Policy
from harness_rl.learner.rows import build_rows
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Trainer
from harness_rl.sync.base import StopPolicy, WeightSync
from harness_rl.sync.client import EngineClient
from harness_rl.sync.gloo import GlooSender
from harness_rl.sync.verify import LogprobProbe, WeightProofFailed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]
PROMPTS = [np.random.default_rng(i).integers(0, 256, 129).astype(np.int32) for i in range(4)]


@dataclass
class Server:
    url: str
    model: Path

    def rpc(self, method: str, *args: Any) -> None:
        httpx.post(f"{self.url}/collective_rpc", json={"method": method, "args": list(args)}, timeout=60).raise_for_status()

    def generate(self, ids: list[int], max_tokens: int, temperature: float = 1.0) -> Any:
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "logprobs": 0, "ignore_eos": True, "seed": 1}
        body = {"model": "policy", "token_ids": ids, "sampling_params": sampling, "return_token_ids": True}
        response = httpx.post(f"{self.url}/inference/v1/generate", json=body, timeout=120)
        response.raise_for_status()
        return response.json()["choices"][0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vllm")
    model = make_tiny_model(folder / "model")
    with vllm(model, folder / "engine.log") as url:
        yield Server(url, model)


class Rig:
    def __init__(self, server: Server) -> None:
        self.spec = LearnerSpec(model=str(server.model), run_dir="-", lineage="k", learning_rate=1e-3)
        self.policy = Policy.load(self.spec, server.model)
        self.client = EngineClient(server.url, "policy", 60.0)
        self.sync = self.new_sync()

    def new_sync(self, stop: StopPolicy | None = None) -> WeightSync:
        sender = GlooSender(self.policy.model.named_parameters, torch.float32, 60.0)
        probe = LogprobProbe(exact=True, bound=1e-4, first_bound=0.15, tokens=512)
        return WeightSync([self.client], sender, probe, self.policy.score_prompts, stop)

    def perturb(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05 * parameter.abs().mean())


@pytest.fixture
def rig(server: Server) -> Iterator[Rig]:
    """A learner with the model's own weights, in sync with the server."""
    made = Rig(server)
    server.rpc("hrl_repair", True)
    made.sync.sync("k-0", PROMPTS)
    yield made
    made.client.resume()
    made.sync.close()


def test_equal_weights_give_bit_identical_logprobs(rig: Rig) -> None:
    before = rig.client.score(PROMPTS)
    report = rig.sync.sync("k-1", PROMPTS)
    assert report.proof.tokens == 512 and report.proof.max_abs < 1e-5
    for a, b in zip(before, rig.client.score(PROMPTS), strict=True):
        np.testing.assert_array_equal(a, b)


def test_perturbed_weights_match_after_the_sync(rig: Rig) -> None:
    before = np.concatenate(rig.client.score(PROMPTS))
    rig.perturb()
    report = rig.sync.sync("k-1", PROMPTS)
    assert report.proof.mean_abs < 1e-5 and report.proof.max_abs < 1e-4 and rig.client.version() == "k-1"
    assert np.abs(np.concatenate(rig.client.score(PROMPTS)) - before).mean() > 1e-3


def test_fires_on_a_skipped_sync(rig: Rig) -> None:
    rig.perturb()
    with pytest.raises(WeightProofFailed):
        rig.sync.prove("k-1", PROMPTS)


def test_fires_on_weights_perturbed_without_a_sync(rig: Rig, server: Server) -> None:
    server.rpc("hrl_scale_norm", 1.01)
    with pytest.raises(WeightProofFailed):
        rig.sync.prove("k-0", PROMPTS)
    rig.client.resume()
    rig.sync.sync("k-1", PROMPTS)


def test_e07_fires_on_a_stale_lm_head(rig: Rig, server: Server) -> None:
    server.rpc("hrl_repair", False)
    rig.perturb()
    with pytest.raises(WeightProofFailed, match="k-1"):
        rig.sync.sync("k-1", PROMPTS)
    assert httpx.get(f"{server.url}/is_paused", timeout=10).json()["is_paused"] is True
    server.rpc("hrl_repair", True)
    rig.sync.sync("k-2", PROMPTS)


def test_e13_a_call_in_flight_goes_on_with_the_new_weights_and_says_which(rig: Rig, server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.generate, [1, 2, 3], 900)
        while "vllm:num_requests_running{" not in (text := httpx.get(f"{server.url}/metrics", timeout=10).text) or not _running(text):
            assert not answer.done()
        rig.perturb()
        rig.sync.sync("k-1", PROMPTS)
        choice = answer.result()
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 900
    spans = choice["weight_versions"]
    assert [s["version"] for s in spans] == ["k-0", "k-1"] and spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == 900


def _running(metrics: str) -> bool:
    return any(line.startswith("vllm:num_requests_running{") and float(line.rsplit(" ", 1)[1]) > 0 for line in metrics.splitlines())


def test_e11_no_cached_block_survives(rig: Rig, server: Server) -> None:
    prompt = np.random.default_rng(9).integers(0, 256, 300).tolist()
    first = server.generate(prompt, 1)
    rig.perturb()
    rig.sync.sync("k-1", PROMPTS)
    (expected,) = rig.policy.score_prompts([np.array([*prompt, first["token_ids"][0]], dtype=np.int32)])
    again = server.generate(prompt, 1)
    if again["token_ids"] == first["token_ids"]:
        assert again["logprobs"]["content"][0]["logprob"] == pytest.approx(float(expected[-1]), abs=1e-4)


def test_a_restarted_learner_joins_anew(rig: Rig) -> None:
    rig.perturb()
    other = rig.new_sync()
    assert other.sync("n-0", PROMPTS).proof.ok


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_b12_sampled_rows_train_with_a_gap_of_rounding_only(rig: Rig, server: Server, temperature: float) -> None:
    turns = []
    for i in range(4):
        prompt = np.random.default_rng(i).integers(0, 256, 20).tolist()
        choice = server.generate(prompt, 40, temperature)
        ids, logps = choice["token_ids"], [min(0.0, entry["logprob"]) for entry in choice["logprobs"]["content"]]
        turns.append(_turn(f"n{i}", prompt, ids, logps, temperature, choice["weight_versions"]))
    rows = build_rows(trace(*turns), "r", "g")
    for i, row in enumerate(rows):
        row.advantage = 1.0 - i % 2 * 2
    metrics = Trainer(rig.policy, rig.spec).step(rows, "k-0").metrics
    assert metrics["logprob_gap/tokens"] == 160 and metrics["rows/trained"] == 4
    assert metrics["logprob_gap/mean"] < 1e-5 and metrics["logprob_gap/max"] < 1e-3


def _turn(node: str, prompt: list[int], ids: list[int], logps: list[float], temperature: float, versions: list[Any]) -> dict[str, Any]:
    n = len(ids)
    return {
        "node_id": node,
        "prompt_token_ids": prompt,
        "completion_token_ids": ids,
        "per_token_logps": logps,
        "loss_mask": [0] * len(prompt) + [1] * n,
        "request": {},
        "response": {},
        "metadata": {
            "sampling": {"temperature": temperature},
            "weight_versions": [[v["version"], v["start"], v["end"]] for v in versions],
            "prompt_hash": hash_ids(prompt),
            "completion_hash": hash_ids(ids),
            "sample_hash": hash_sample(ids, logps, [1] * n),
        },
    }
