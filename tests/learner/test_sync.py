"""The sync protocol and its proof against a server that can lie."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine, serve
from learner_helpers import VOCABULARY, tiny_llama, tiny_policy

from harness_rl.engines.vllm_plugin import check_plan
from harness_rl.learner.policy import Policy
from harness_rl.sync.base import StopPolicy, WeightSync
from harness_rl.sync.client import EngineClient, SyncFailed
from harness_rl.sync.gloo import GlooSender, rank_offsets
from harness_rl.sync.load import Load, read_load
from harness_rl.sync.verify import LogprobProbe, WeightProofFailed

RESET = "reset_prefix_cache?reset_running_requests=true"
PROMPTS = [np.random.default_rng(i).integers(0, VOCABULARY, 60).astype(np.int32) for i in range(4)]


def probe(exact: bool = True, tokens: int = 200) -> LogprobProbe:
    return LogprobProbe(exact=exact, bound=1e-4, first_bound=0.15, tokens=tokens)


class Rig:
    """A policy in training and servers that start with other weights."""

    def __init__(
        self,
        policy: Policy,
        engines: list[FakeEngine],
        urls: list[str],
        timeout_s: float = 20.0,
        dtype: torch.dtype = torch.float32,
        stop: StopPolicy | None = None,
    ) -> None:
        self.policy, self.engines = policy, engines
        clients = [EngineClient(url, "policy", timeout_s) for url in urls]
        sender = GlooSender(policy.model.named_parameters, dtype, timeout_s)
        self.sync = WeightSync(clients, sender, probe(exact=dtype == torch.float32), policy.score_prompts, stop)

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    def perturb(self) -> None:
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)


def new_engine(seed: int = 7, tied: bool = True) -> FakeEngine:
    return FakeEngine(Policy.wrap(tiny_llama(seed, tied=tied), torch.float32).model)


@pytest.fixture
def rig() -> Iterator[Rig]:
    engine = new_engine()
    with serve(engine) as url:
        made = Rig(tiny_policy(), [engine], [url])
        yield made
        made.sync.close()


def test_every_sync_proves_the_weights_it_sent(rig: Rig) -> None:
    for step in range(3):
        report = rig.sync.sync(f"k-{step}", PROMPTS)
        assert report.proof.ok and report.proof.tokens == 4 * 59 and report.proof.max_abs < 1e-4 and not report.proof.alarm
        assert rig.engine.weight_version == f"k-{step}" and not rig.engine.paused
        rig.perturb()
    assert set(report.seconds) == {"pause", "transfer", "finish", "stopped", "probe"}


def test_an_engine_that_was_started_again_is_joined_anew_and_gets_the_present_weights(rig: Rig) -> None:
    rig.sync.sync("k-0", PROMPTS)
    rig.perturb()
    rig.sync.sync("k-1", PROMPTS)
    fresh = new_engine()
    rig.engine.model, rig.engine.head, rig.engine.weight_version = fresh.model, fresh.head, "default"
    rig.engine.group = rig.engine.store = None
    report = rig.sync.sync("k-1", PROMPTS)
    assert report.proof.ok and rig.engine.weight_version == "k-1"
    assert [call.split("?")[0] for call in rig.engine.calls].count("init_weight_transfer_engine") == 2


def test_g06_a_server_that_a_dead_learner_left_paused_gets_the_weights_and_goes_on(rig: Rig) -> None:
    """Nothing is sampled before the restored weights are there, and nothing waits for a step to bring them."""
    rig.engine.paused = True
    report = rig.sync.sync("resumed-7", PROMPTS)
    assert report.proof.ok and rig.engine.weight_version == "resumed-7" and not rig.engine.paused


def test_engines_that_slept_stood_since_they_were_put_to_sleep(rig: Rig) -> None:
    rig.sync.sync("k-0", PROMPTS)
    rig.sync.rest()
    time.sleep(1.5)  # the learner trains
    asleep = rig.sync.sync("k-1", PROMPTS).seconds
    again = rig.sync.sync("k-2", PROMPTS).seconds
    assert asleep["stopped"] > 1.5 + asleep["transfer"] and again["stopped"] < asleep["stopped"]
    assert again["stopped"] == pytest.approx(again["pause"] + again["transfer"] + again["finish"], abs=0.5)


def test_e12_order_of_the_control_calls(rig: Rig) -> None:
    rig.sync.sync("k-0", PROMPTS)
    assert rig.engine.calls == [
        "health",
        "get_world_size?include_dp=true",
        "init_weight_transfer_engine",
        "metrics",
        "pause?mode=keep&clear_cache=true",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "weight_info",
        "reset_prefix_cache?reset_running_requests=true",
        "resume",
        "v1/models",
        "v1/completions",
    ]


def cache_calls(engine: FakeEngine) -> list[str]:
    return [call for call in engine.calls if call.startswith(("pause", "reset", "sleep", "wake"))]


@pytest.mark.parametrize(
    ("stop", "running", "calls", "counts"),
    [
        (StopPolicy("keep"), 3, ["pause?mode=keep&clear_cache=true", RESET], {"running": 3, "cut": 0, "recomputed_tokens": 128}),
        (StopPolicy("keep", "keep"), 3, ["pause?mode=keep&clear_cache=false"], {"running": 3, "cut": 0, "recomputed_tokens": 0}),
        (StopPolicy("abort"), 3, ["pause?mode=abort&clear_cache=true", RESET], {"running": 3, "cut": 3, "recomputed_tokens": 128}),
        (StopPolicy("abort", "keep"), 3, ["pause?mode=abort&clear_cache=false"], {"running": 3, "cut": 3, "recomputed_tokens": 0}),
        (StopPolicy("wait"), 0, ["pause?mode=wait&clear_cache=true", RESET], {"running": 0, "cut": 0, "recomputed_tokens": 0}),
    ],
)
def test_what_becomes_of_running_calls_and_of_what_is_cached_for_them(
    stop: StopPolicy, running: int, calls: list[str], counts: dict[str, float]
) -> None:
    engine = new_engine()
    engine.load = (running, 0.25)  # of 32 blocks of 16 tokens
    with serve(engine) as url:
        rig = Rig(tiny_policy(), [engine], [url], stop=stop)
        report = rig.sync.sync("k-0", PROMPTS)
        assert cache_calls(engine) == calls and report.counts == counts and report.proof.ok
        rig.sync.close()


def test_calls_that_do_not_end_in_time_are_ended() -> None:
    engine = new_engine()
    engine.load, engine.faults = (2, 0.5), {"no_drain"}
    with serve(engine) as url:
        rig = Rig(tiny_policy(), [engine], [url], stop=StopPolicy("wait", wait_s=0.3))
        report = rig.sync.sync("k-0", PROMPTS)
        assert cache_calls(engine) == ["pause?mode=wait&clear_cache=true", "pause?mode=abort&clear_cache=true", RESET]
        assert report.counts == {"running": 2, "cut": 2, "recomputed_tokens": 256} and report.seconds["pause"] >= 0.3
        engine.healed.set()
        rig.sync.close()


def test_an_engine_that_gave_its_memory_away_takes_it_again_part_by_part(rig: Rig) -> None:
    rig.sync.sync("k-0", PROMPTS)
    engine = rig.engine
    engine.calls.clear()
    rig.sync.rest()
    assert engine.calls == ["sleep?level=1&mode=keep"] and engine.paused
    rig.perturb()
    assert rig.sync.sync("k-1", PROMPTS).proof.ok
    order = [call for call in engine.calls if call.startswith(("sleep", "wake", "start", "finish", "reset", "resume", "pause"))]
    assert order == [
        "sleep?level=1&mode=keep",
        "wake_up?tags=weights",
        "start_weight_update",
        "finish_weight_update",
        RESET,
        "wake_up?tags=kv_cache",
        "resume",
    ]
    engine.calls.clear()
    rig.sync.sync("k-2", PROMPTS)
    assert not [call for call in engine.calls if call.startswith("wake")]


def test_a_server_that_tells_less_is_counted_as_less() -> None:
    told = (
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="32"} 1.0\n'
        'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="8"} 1.0\n'
        'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.25\n'
    )
    assert read_load(told) == Load(3, 16 * 16 + 2 * 16)
    assert read_load(told.replace('num_gpu_blocks="8"', 'num_gpu_blocks="None"')) == Load(3, None)
    assert read_load("# nothing of this\n") == Load(None, None)


@pytest.mark.parametrize("tied", [True, False])
def test_e07_tied_and_untied_heads(tied: bool) -> None:
    engine = new_engine(tied=tied)
    with serve(engine) as url:
        rig = Rig(tiny_policy(tied=tied), [engine], [url])
        rig.sync.sync("k-0", PROMPTS)
        with torch.no_grad():
            rig.policy.model.get_input_embeddings().weight.add_(1.0)
        rig.sync.sync("k-1", PROMPTS)
        names = [name for name, _ in rig.policy.model.named_parameters()]
        assert ("lm_head.weight" in names) is not tied and len(names) == len(set(names))
        rig.sync.close()


@pytest.mark.parametrize("fault", ["ignore_update", "stale_head", "shift_logprobs"])
def test_e05_weights_that_did_not_arrive_are_noticed_and_sampling_stops(rig: Rig, fault: str) -> None:
    rig.sync.sync("k-0", PROMPTS)
    rig.perturb()
    rig.engine.faults = {fault}
    with pytest.raises(WeightProofFailed, match="does not compute with the weights of k-1"):
        rig.sync.sync("k-1", PROMPTS)
    assert rig.engine.paused


def test_a_skipped_sync_is_noticed(rig: Rig) -> None:
    rig.sync.sync("k-0", PROMPTS)
    rig.perturb()
    with pytest.raises(WeightProofFailed):
        rig.sync.prove("k-1", PROMPTS)


def test_weights_that_change_in_the_engine_are_noticed(rig: Rig) -> None:
    rig.sync.sync("k-0", PROMPTS)
    with torch.no_grad():
        rig.engine.model.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(1.01)
    with pytest.raises(WeightProofFailed):
        rig.sync.prove("k-0", PROMPTS)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wrong_version", "sync step 'version': .* says it has weights 'default' after 'k-0' was finished"),
        ("no_reset", "sync step 'reset_prefix_cache': .* prefix cache was not reset"),
        ("refuse_update", "sync step 'update': .* HTTP 500.*out of memory"),
    ],
)
def test_a_failed_step_names_itself_and_leaves_the_engine_paused(rig: Rig, fault: str, message: str) -> None:
    rig.engine.faults = {fault}
    with pytest.raises(SyncFailed, match=message):
        rig.sync.sync("k-0", PROMPTS)
    assert rig.engine.paused and "resume" not in rig.engine.calls


def test_a_probe_without_an_answer_is_a_failure(rig: Rig) -> None:
    rig.engine.faults = {"no_probe"}
    with pytest.raises(SyncFailed, match="scored 0 of 4"):
        rig.sync.sync("k-0", PROMPTS)


def test_a_receiver_that_hangs_hits_the_deadline() -> None:
    engine = new_engine()
    with serve(engine) as url:
        rig = Rig(tiny_policy(), [engine], [url], timeout_s=2.0)
        engine.faults = {"hang_update"}
        began = time.monotonic()
        with pytest.raises(SyncFailed, match="sync step 'update'"):
            rig.sync.sync("k-0", PROMPTS)
        assert time.monotonic() - began < 10 and engine.paused


def test_an_engine_that_is_gone_is_named() -> None:
    sync = Rig(tiny_policy(), [], ["http://127.0.0.1:9"], timeout_s=2.0).sync
    with pytest.raises(SyncFailed, match=r"127\.0\.0\.1:9/health"):
        sync.sync("k-0", PROMPTS)


def test_two_engines_get_the_same_weights() -> None:
    engines = [new_engine(7), new_engine(8)]
    with serve(engines[0]) as a, serve(engines[1]) as b:
        rig = Rig(tiny_policy(), engines, [a, b])
        rig.sync.sync("k-0", PROMPTS)
        engines[1].faults = {"ignore_update"}
        rig.perturb()
        with pytest.raises(WeightProofFailed, match=b):
            rig.sync.sync("k-1", PROMPTS)
        assert all(engine.paused for engine in engines)
        rig.sync.close()


def test_e17_sent_in_the_engines_dtype() -> None:
    engine = new_engine()
    with serve(engine) as url:
        rig = Rig(tiny_policy(), [engine], [url], dtype=torch.bfloat16)
        report = rig.sync.sync("k-0", PROMPTS)
        assert 1e-5 < report.proof.mean_abs < report.proof.bound == 0.15
        sent = dict(rig.policy.model.named_parameters())["model.norm.weight"].to(torch.bfloat16).float()
        assert torch.equal(engine.model.get_parameter("model.norm.weight"), sent)
        rig.sync.close()


@pytest.mark.parametrize(
    "plan",
    [
        {"names": [], "dtype_names": [], "shapes": [], "buckets": []},
        {"names": ["a"], "dtype_names": ["float64"], "shapes": [[1]], "buckets": [1]},
        {"names": ["a", "a"], "dtype_names": ["float32"] * 2, "shapes": [[1], [1]], "buckets": [2]},
        {"names": ["a"], "dtype_names": ["float32"], "shapes": [[-1]], "buckets": [1]},
        {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[1], [1]], "buckets": [2]},
        {"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[1], [1]], "buckets": [1]},
    ],
)
def test_e17_a_plan_that_disagrees_is_refused_before_the_first_byte(plan: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="weight plan"):
        check_plan(**plan)


def test_rank_offsets() -> None:
    assert rank_offsets([1, 4, 2]) == ([1, 2, 6], 8)


def test_probe_bounds_in_other_dtypes_follow_the_first_gap() -> None:
    p = probe(exact=False, tokens=4)
    at = np.zeros(4, dtype=np.float32)
    first = p.judge([at + 0.02], [at])
    assert first.ok and first.bound == 0.15
    assert p.judge([at + 0.03], [at]).alarm is False
    warned = p.judge([at + 0.05], [at])
    assert warned.ok and warned.alarm
    assert not p.judge([at + 0.07], [at]).ok
    assert not probe(exact=False, tokens=4).judge([at + 0.2], [at]).ok


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_probe_never_passes_what_is_not_finite_or_too_short(value: float) -> None:
    good = np.zeros(300, dtype=np.float32)
    bad = good.copy()
    bad[5] = value
    assert not probe().judge([bad], [good]).ok
    assert not probe().judge([good[:10]], [good[:10]]).ok


def test_probe_prompts_come_from_real_rows() -> None:
    p = LogprobProbe(exact=True, bound=1, first_bound=1, tokens=100)
    rows = [np.arange(n, dtype=np.int32) for n in (40, 1, 80, 30)]
    prompts = p.choose(rows, seed=0)
    assert sum(len(prompt) - 1 for prompt in prompts) >= 100
    assert all(any(np.array_equal(prompt, row[: len(prompt)]) for row in rows) for prompt in prompts)
    assert p.choose(rows, 0)[0].tolist() == prompts[0].tolist()
    short = p.choose(rows[:1], 0)
    filled = p.filler(short, VOCABULARY, np.arange(20, dtype=np.int32), seed=1)
    assert sum(len(prompt) - 1 for prompt in filled) >= 100 and filled[0].tolist() == rows[0].tolist()
    assert filled[1].tolist() == list(range(20))
