"""Adapters in a real vLLM server: each name computes with the learner's weights of its version, and no other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from vllm_server import make_tiny_model, vllm

from capture_proxy.engine import Engine
from capture_proxy.gate import Gate
from capture_proxy.sample import Sample
from capture_proxy.upstream import EngineUnavailable, Retry
from harness_rl.learner import lora
from harness_rl.learner.policy import Policy
from harness_rl.learner.spec import LearnerSpec
from harness_rl.sync.adapter import AdapterSync
from harness_rl.sync.client import EngineClient, SyncFailed
from harness_rl.sync.verify import LogprobProbe, WeightProofFailed

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]
PROMPTS = [np.random.default_rng(i).integers(0, 256, 129).astype(np.int32) for i in range(4)]
FLAGS = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--enable-prompt-tokens-details"]
LONG = 600
"""Tokens of a call that runs over a sync."""


class Server:
    """One vLLM for the whole module, always at the same address."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, make_tiny_model(folder / "model")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._stack = ExitStack()
        env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        self._stack.enter_context(vllm(self.model, self.folder / "engine.log", self.port, 600.0, FLAGS, **env))

    def stop(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("vllm"))
    made.start()
    yield made
    made.stop()


class Rig:
    def __init__(self, server: Server, root: Path, rank: int = 4) -> None:
        self.spec = LearnerSpec(model=str(server.model), run_dir="-", lineage="k", lora_rank=rank, device="cpu")
        self.policy = Policy.load(self.spec, server.model)
        self.client = EngineClient(server.url, "policy", 60.0)
        probe = LogprobProbe(exact=True, bound=1e-4, first_bound=0.15, tokens=512)
        self.sync = AdapterSync([self.client], root, self.write, probe, self.policy.score_prompts)
        self.gate = Gate()
        self.proxy = Engine(server.url, "policy", Retry(total_s=60.0), 300.0, self.gate)

    def write(self, folder: Path) -> None:
        lora.export(folder, self.policy.adapter(), self.spec)

    def train(self, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in lora.adapter(self.policy.model).values():
                parameter.add_(torch.randn_like(parameter) * 0.05)

    def release(self, version: str) -> list[str]:
        return self.gate.release(version, f"policy@{version}")

    async def sample(self, prompt: list[int], tokens: int) -> Sample:
        params = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True, "seed": 1}
        return await self.proxy.generate(np.array(prompt, np.int32), params, {})

    def gap(self, prompt: list[int], sample: Sample) -> float:
        """Largest difference between what the engine says it sampled with and the learner's present weights."""
        (scores,) = self.policy.score_prompts([np.concatenate([np.array(prompt, np.int32), sample.ids])])
        return float(np.abs(scores[len(prompt) - 1 :] - sample.logps).max())


@pytest_asyncio.fixture
async def rig(server: Server, tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(server, tmp_path / "adapters")
    yield made
    for name in made.client.adapters():
        made.client.unload_adapter(name)
    made.sync.close()
    made.proxy.close()


def flat(scores: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate(scores)


def test_each_name_computes_with_its_versions_weights_and_the_model_stays(rig: Rig) -> None:
    own = flat(rig.client.score(PROMPTS))
    assert rig.sync.sync("k-0", PROMPTS).proof.max_abs < 1e-4  # its difference is still nothing
    for step in (1, 2):
        rig.train(step)
        proof = rig.sync.sync(f"k-{step}", PROMPTS).proof
        assert proof.tokens == 512 and proof.mean_abs < 1e-5 and proof.max_abs < 1e-3
    scores = [flat(rig.client.score(PROMPTS, f"policy@k-{step}")) for step in range(3)]
    assert np.abs(scores[2] - scores[1]).mean() > 1e-3 < np.abs(scores[1] - scores[0]).mean()
    np.testing.assert_array_equal(flat(rig.client.score(PROMPTS)), own)
    rig.train(3)
    with pytest.raises(WeightProofFailed, match="under policy@k-2"):  # as when another adapter lies under the name
        rig.sync.sync("k-2", PROMPTS)


async def test_a_call_over_a_sync_ends_under_its_own_adapter_even_when_that_is_unloaded(rig: Rig, server: Server) -> None:
    rig.train(1)
    await asyncio.to_thread(rig.sync.sync, "k-1", PROMPTS)
    rig.release("k-1")
    call = asyncio.create_task(rig.sample([1, 2, 3], LONG))
    while not _running((await asyncio.to_thread(httpx.get, f"{server.url}/metrics", timeout=10)).text):
        assert not call.done()
    before = {name: value.clone() for name, value in rig.policy.adapter().items()}
    rig.train(2)
    await asyncio.to_thread(rig.sync.sync, "k-2", PROMPTS)
    assert rig.release("k-2") == ["policy@k-1", "policy@k-2"] and not call.done()
    await asyncio.to_thread(rig.sync.retire, ["policy@k-2"])  # more than control would let it
    assert set(rig.client.adapters()) == {"policy@k-2"}
    short = await rig.sample([1, 2, 3], 20)
    assert not call.done()
    long = await call
    assert (short.versions, short.adapters) == ((("k-2", 0, 20),), ("policy@k-2",))
    assert (long.versions, long.adapters) == ((("k-1", 0, LONG),), ("policy@k-1",))
    assert rig.gap([1, 2, 3], short) < 1e-3 < rig.gap([1, 2, 3], long)
    for name, parameter in lora.adapter(rig.policy.model).items():
        parameter.data.copy_(before[name])
    assert rig.gap([1, 2, 3], long) < 1e-3
    assert rig.release("k-3") == ["policy@k-3"]


async def test_blocks_that_one_adapter_cached_are_not_anothers(rig: Rig) -> None:
    prompt = np.random.default_rng(9).integers(0, 256, 400).tolist()
    for step in (1, 2):
        rig.train(step)
        await asyncio.to_thread(rig.sync.sync, f"k-{step}", PROMPTS)
        rig.release(f"k-{step}")
        first, again = await rig.sample(prompt, 2), await rig.sample(prompt, 2)
        assert (first.cached_tokens, again.cached_tokens) == (0, 384)  # blocks of 128
        assert rig.gap(prompt, first) < 1e-3 and rig.gap(prompt, again) < 1e-3


async def test_a_name_that_the_server_does_not_know_is_refused_by_every_route_that_samples(rig: Rig) -> None:
    rig.release("k-9")
    with pytest.raises(EngineUnavailable, match="does not have adapter policy@k-9"):
        await rig.sample([1, 2, 3], 2)
    with pytest.raises(SyncFailed, match=r"/v1/completions: HTTP 404"):
        await asyncio.to_thread(rig.client.score, PROMPTS, "policy@k-9")
    with pytest.raises(EngineUnavailable, match="does not have adapter policy@k-9"):
        await rig.proxy.chat({"messages": [{"role": "user", "content": "."}]}, {})


def test_an_adapter_that_the_server_cannot_take_is_named_and_it_lives(server: Server, tmp_path: Path, rig: Rig) -> None:
    large = Rig(server, tmp_path / "large", rank=16)
    with pytest.raises(SyncFailed, match=r"sync step 'load': .*/v1/load_lora_adapter: HTTP 500.*rank"):
        large.sync.sync("k-0", PROMPTS)
    with pytest.raises(SyncFailed, match=r"/v1/load_lora_adapter: HTTP 404.*; it must see that folder under the same path"):
        rig.client.load_adapter("policy@k-1", tmp_path / "nowhere")
    assert rig.sync.sync("k-0", PROMPTS).proof.ok


async def test_a_server_that_is_started_again_samples_for_nobody_until_it_has_the_adapter(rig: Rig, server: Server) -> None:
    rig.train(1)
    await asyncio.to_thread(rig.sync.sync, "k-1", PROMPTS)
    rig.release("k-1")
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)
    with pytest.raises(EngineUnavailable, match="does not have adapter policy@k-1"):
        await rig.sample([1, 2, 3], 2)
    await asyncio.to_thread(rig.sync.sync, "k-1", PROMPTS)
    assert rig.gap([1, 2, 3], await rig.sample([1, 2, 3], 20)) < 1e-3


def _running(metrics: str) -> bool:
    return any(line.startswith("vllm:num_requests_running{") and float(line.rsplit(" ", 1)[1]) > 0 for line in metrics.splitlines())
