"""What becomes of a real vLLM's running calls in each mode, by the learner's own logprobs of what they sampled; and faults inside it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import numpy as np
import pytest
from test_sync_vllm import PROMPTS, Rig, Server, rig, server  # noqa: F401 - fixtures

from capture_proxy.engine import Engine
from capture_proxy.gate import Gate
from capture_proxy.sample import Sample
from capture_proxy.upstream import Retry
from harness_rl.sync.base import StopPolicy, SyncReport
from harness_rl.sync.client import EngineClient, SyncFailed

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]
PROMPT = np.random.default_rng(5).integers(0, 256, 200).astype(np.int32)
TOKENS = 700


def running(url: str) -> bool:
    text = httpx.get(f"{url}/metrics", timeout=10).text
    return any(line.startswith("vllm:num_requests_running{") and float(line.rsplit(" ", 1)[1]) > 0 for line in text.splitlines())


async def over_an_update(rig: Rig, stop: StopPolicy) -> tuple[Sample, SyncReport, list[np.ndarray]]:  # noqa: F811
    """(a call that an update meets, the update, the learner's logprobs of the whole call under the old and the new weights)."""
    gate = Gate()
    engine = Engine(rig.client.url, "policy", Retry(), 300.0, gate)
    sync = rig.new_sync(stop)
    await asyncio.to_thread(sync.sync, "k-0", PROMPTS)
    params: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True, "seed": 1}
    call = asyncio.create_task(engine.generate(PROMPT, params, {}))
    while not await asyncio.to_thread(running, rig.client.url):
        assert not call.done()
    gate.hold("weights k-1", 300.0)
    old = {name: parameter.detach().clone() for name, parameter in rig.policy.model.named_parameters()}
    rig.perturb()
    report = await asyncio.to_thread(sync.sync, "k-1", PROMPTS)
    gate.release("k-1")
    sample = await call
    engine.close()
    whole = [np.concatenate([PROMPT, sample.ids])]
    new = rig.policy.score_prompts(whole)[0][len(PROMPT) - 1 :]
    for name, parameter in rig.policy.model.named_parameters():
        parameter.data.copy_(old[name])
    before = rig.policy.score_prompts(whole)[0][len(PROMPT) - 1 :]
    sync._sender.close()
    return sample, report, [before, new]


def gaps(sample: Sample, scores: list[np.ndarray]) -> dict[str, float]:
    """Largest |engine - learner| of each span, by the policy that it names."""
    of = {"k-0": scores[0], "k-1": scores[1]}
    assert sample.versions is not None and sample.versions[-1][2] == TOKENS == len(sample.ids)
    return {version: float(np.abs(sample.logps[a:b] - of[version][a:b]).max()) for version, a, b in sample.versions}


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_e13_each_token_is_of_the_policy_that_its_span_names(rig: Rig, mode: Any) -> None:  # noqa: F811
    sample, report, scores = await over_an_update(rig, StopPolicy(mode))
    found = gaps(sample, scores)
    assert list(found) == ["k-0", "k-1"] and max(found.values()) < 1e-3
    assert len(sample.parts) == (mode == "abort") and report.counts["cut"] == (mode == "abort")
    assert report.counts["running"] == 1 and report.counts["recomputed_tokens"] >= len(PROMPT)


async def test_kept_keys_and_values_are_of_the_old_policy(rig: Rig) -> None:  # noqa: F811
    sample, report, scores = await over_an_update(rig, StopPolicy("keep", "keep"))
    found = gaps(sample, scores)
    assert found["k-0"] < 1e-3 < found["k-1"] and report.counts["recomputed_tokens"] == 0


async def test_calls_that_are_waited_for_have_one_policy(rig: Rig) -> None:  # noqa: F811
    sample, report, scores = await over_an_update(rig, StopPolicy("wait", wait_s=300.0))
    assert list(gaps(sample, scores)) == ["k-0"] and max(gaps(sample, scores).values()) < 1e-3
    assert report.counts == {"running": 0, "cut": 0, "recomputed_tokens": 0} and not sample.parts


async def test_calls_that_are_not_waited_for_any_longer_go_on_after_it(rig: Rig) -> None:  # noqa: F811
    sample, report, scores = await over_an_update(rig, StopPolicy("wait", wait_s=0.2))
    assert list(gaps(sample, scores)) == ["k-0", "k-1"] and max(gaps(sample, scores).values()) < 1e-3
    assert report.counts["cut"] == 1 and len(sample.parts) == 1


def test_a_learner_that_died_between_start_and_update_is_followed_by_one_that_begins_it_again(rig: Rig) -> None:  # noqa: F811
    rig.client.pause("keep", True)
    rig.client.start_update()
    assert rig.new_sync().sync("n-0", PROMPTS).proof.ok


def test_a_worker_that_stalls_in_an_update_is_named_and_synced_afterwards(rig: Rig, server: Server) -> None:  # noqa: F811
    server.rpc("hrl_in_update", "stall")
    hasty = Rig(server)
    hasty.client = EngineClient(server.url, "policy", 4.0)
    began = time.monotonic()
    with pytest.raises(SyncFailed, match="sync step 'update'"):
        hasty.new_sync().sync("k-1", PROMPTS)
    assert time.monotonic() - began < 15.0
    time.sleep(10.0)
    assert rig.new_sync().sync("k-2", PROMPTS).proof.ok


def test_a_worker_that_dies_in_an_update_is_named(server: Server) -> None:  # noqa: F811
    """The last test here: the server is gone after it."""
    server.rpc("hrl_in_update", "die")
    began = time.monotonic()
    with pytest.raises(SyncFailed, match="sync step 'update'"):
        Rig(server).sync.sync("k-1", PROMPTS)
    assert time.monotonic() - began < 70.0
