"""The learner's loop against control's end of the link and a fake engine; in a thread, and once as the real process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from fake_engine import FakeEngine, serve
from learner_helpers import random_rows, tiny_llama, trace, turn

from harness_rl.learner import checkpoint
from harness_rl.learner import main as main_module
from harness_rl.learner.link import TOKEN_ENV, LearnerLink, Message
from harness_rl.learner.policy import Policy
from harness_rl.learner.rows import Row, build_rows, mark_stale
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Trainer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def engine() -> Iterator[tuple[FakeEngine, str]]:
    made = FakeEngine(Policy.wrap(tiny_llama(seed=5), torch.float32).model)
    with serve(made) as url:
        yield made, url


@pytest_asyncio.fixture
async def link(tmp_path: Path) -> AsyncIterator[LearnerLink]:
    made = LearnerLink(tmp_path / "l.sock", "secret")
    await made.start()
    yield made
    await made.close()


def spec_of(model: Path, run_dir: Path, url: str | None, **more: Any) -> LearnerSpec:
    values: dict[str, Any] = {"lineage": "k", "learning_rate": 1e-2, "micro_batch_tokens": 256, "probe_tokens": 100, "link_timeout_s": 10.0}
    return LearnerSpec(model=str(model), run_dir=str(run_dir), engines=[url] if url else [], **(values | more))


class Process:
    """`main` in a thread of its own, with its exit code."""

    def __init__(self, spec: LearnerSpec, link: LearnerLink, monkeypatch: pytest.MonkeyPatch, token: str = "secret") -> None:
        path = Path(spec.run_dir) / "learner.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(spec.to_json())
        monkeypatch.setenv(TOKEN_ENV, token)
        self.code: int | None = None

        def work() -> None:
            self.code = main_module.main(path, link.path)

        self.thread = threading.Thread(target=work)
        self.thread.start()

    async def exit_code(self) -> int | None:
        await asyncio.to_thread(self.thread.join, 20)
        assert not self.thread.is_alive()
        return self.code


async def expect(link: LearnerLink, kind: str) -> Message:
    message = await link.receive(20)
    assert message.type == kind, message
    return message


async def allow_sync(link: LearnerLink, version: str) -> Message:
    assert (await expect(link, "sync_begin"))["version"] == version
    await link.send("sync_go")
    done = await expect(link, "sync_done")
    await link.send("sync_ack")
    return done


def rows_at(step: int, lineage: str = "k", seed: int = 0) -> list[Row]:
    rows = random_rows(seed, version=f"{lineage}-{step}")
    for row in rows:
        mark_stale(row, step, 1, {lineage: step})
    return rows


async def test_run_save_and_resume(
    model_folder: Path, tmp_path: Path, link: LearnerLink, engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = engine
    process = Process(spec_of(model_folder, tmp_path / "run", url, checkpoint_every=2), link, monkeypatch)
    assert (await expect(link, "hello")).fields.items() >= {"lineage": "k", "step": 0}.items()
    done = await allow_sync(link, "k-0")
    assert done["proof"]["ok"] and done["proof"]["tokens"] >= 100 and done["seconds"]["stopped"] > 0
    for step in (1, 2):
        await link.send_batch(step, rows_at(step - 1, seed=step), 10)
        await allow_sync(link, f"k-{step}")
        result = await expect(link, "result")
        assert (result["step"], result["version"]) == (step, f"k-{step}") == (step, fake.weight_version)
        assert set(result["rows"].values()) == {"trained"} and len(result["rows"]) == 6
        assert result["metrics"]["seconds/sync"] > 0 and result["metrics"]["probe/mean"] < 1e-4
    assert (await expect(link, "checkpoint"))["version"] == "k-2"  # after the result: control has written down what it covers
    await link.send("stop", save=True)
    await expect(link, "bye")
    assert await process.exit_code() == 0
    await expect(link, "closed")
    found = checkpoint.find(tmp_path / "run" / "checkpoints").newest
    assert found is not None and found.step == 2

    process = Process(spec_of(model_folder, tmp_path / "run", url, resume=True, lineage="n"), link, monkeypatch)
    assert (await expect(link, "hello")).fields.items() >= {"lineage": "n", "step": 2}.items()
    await allow_sync(link, "n-2")  # g06: restored weights are pushed before anything is waited for
    await link.send("stop", save=False)
    await expect(link, "bye")
    assert await process.exit_code() == 0


async def test_the_reference_is_where_the_run_began_also_after_a_resume_and_the_worst_rows_are_written(
    model_folder: Path, tmp_path: Path, link: LearnerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(first: int, last: int, **more: Any) -> list[float]:
        process = Process(spec_of(model_folder, tmp_path / "run", None, kl_beta=0.1, **more), link, monkeypatch)
        await expect(link, "hello")
        distances = []
        for step in range(first, last + 1):
            await link.send_batch(step, rows_at(0, lineage=more.get("lineage", "k"), seed=1), 10)
            distances.append((await expect(link, "result"))["metrics"]["kl_reference"])
        await link.send("stop", save=True)
        await expect(link, "checkpoint")
        await expect(link, "bye")
        assert await process.exit_code() == 0
        await expect(link, "closed")
        return distances

    before = await steps(1, 3)
    assert before[0] == pytest.approx(0, abs=1e-6) and before[2] > 1e-4
    (after,) = await steps(4, 4, resume=True, lineage="n")
    assert after > 1e-4  # a reference that had moved to the checkpoint would be at distance 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "worst_rows.jsonl").read_text().splitlines()]
    assert [(line["step"], line["version"]) for line in lines] == [(1, "k-0"), (2, "k-1"), (3, "k-2"), (4, "n-3")]
    assert all(len(line["rows"]) == 6 for line in lines) and lines[3]["rows"][0]["worst"]["cause"] == "stale"


async def test_resumed_equals_uninterrupted_bit_by_bit(
    model_folder: Path, tmp_path: Path, link: LearnerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stream of batches, through one process and through three: the same losses, norms, rates and weights."""
    more: dict[str, Any] = {"warmup_steps": 4, "scale_by_signal": True, "minibatches": 2, "kl_beta": 0.05, "checkpoint_every": 1}
    watched = ("loss", "grad_norm", "learning_rate", "grad_signal_share", "kl_reference", "entropy")

    async def through(folder: Path, ends: list[int]) -> tuple[list[list[float]], bytes]:
        seen = []
        first = 1
        for n, last in enumerate(ends):
            process = Process(spec_of(model_folder, folder, None, resume=n > 0, lineage=f"n{n}", **more), link, monkeypatch)
            assert (await expect(link, "hello"))["step"] == first - 1
            for step in range(first, last + 1):
                await link.send_batch(step, rows_at(0, lineage="data", seed=step), 10)
                result = await expect(link, "result")
                await expect(link, "checkpoint")
                seen.append([result["metrics"][name] for name in watched])
            first = last + 1
            await link.send("stop", save=False)
            await expect(link, "bye")
            assert await process.exit_code() == 0
            await expect(link, "closed")
        return seen, (folder / "checkpoints" / f"step-{ends[-1]}" / "model.safetensors").read_bytes()

    whole, pieces = await through(tmp_path / "whole", [6]), await through(tmp_path / "pieces", [2, 3, 6])
    assert whole[0] == pieces[0] and len(whole[0]) == 6
    assert whole[1] == pieces[1]


async def test_the_next_batch_is_packed_off_the_training_thread_while_this_one_trains(
    model_folder: Path, tmp_path: Path, link: LearnerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches at once: the second is packed by another thread, and training gives what it gives when each comes alone."""
    packed = threading.Semaphore(0)
    threads: list[str] = []
    prepare, step = Trainer.prepare, Trainer.step

    def watched(self: Trainer, rows: Any, rollouts: int | None) -> Any:
        found = prepare(self, rows, rollouts)
        threads.append(threading.current_thread().name)
        packed.release()
        return found

    def slow(self: Trainer, batch: Any, current: str) -> Any:
        if together and current == "k-0":
            packed.acquire()
            assert packed.acquire(timeout=20), "the second batch was not packed while the first one trained"
        return step(self, batch, current)

    monkeypatch.setattr(Trainer, "prepare", watched)
    monkeypatch.setattr(Trainer, "step", slow)
    losses = []
    for together in (True, False):
        folder = tmp_path / str(together)
        process = Process(spec_of(model_folder, folder, None), link, monkeypatch)
        await expect(link, "hello")
        results = []
        await link.send_batch(1, rows_at(0, seed=1), 10)
        if together:
            await link.send_batch(2, rows_at(1, seed=2), 10)
        results.append(await expect(link, "result"))
        if not together:
            await link.send_batch(2, rows_at(1, seed=2), 10)
        results.append(await expect(link, "result"))
        await link.send("stop")
        await expect(link, "bye")
        assert await process.exit_code() == 0
        await expect(link, "closed")
        losses.append([result["metrics"]["loss"] for result in results])
        assert ("seconds/pack_ahead" in results[1]["metrics"]) == together
    assert threads[1] == "packing" and "packing" not in (threads[0], threads[2])
    assert losses[0] == losses[1]


async def test_a_batch_that_cannot_be_packed_ahead_is_an_error_of_its_own_step(
    model_folder: Path, tmp_path: Path, link: LearnerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(spec_of(model_folder, tmp_path / "run", None), link, monkeypatch)
    await expect(link, "hello")
    twice = rows_at(1, seed=2)
    await link.send_batch(1, rows_at(0, seed=1), 10)
    await link.send_batch(2, [*twice, twice[0]], 10)
    assert (await expect(link, "result"))["step"] == 1
    failed = await expect(link, "failed")
    assert failed["error"] == "InvariantError" and "twice in a batch" in failed["message"]
    assert await process.exit_code() == 1


async def test_e05_a_failed_proof_stops_the_run_with_the_cause(
    model_folder: Path, tmp_path: Path, link: LearnerLink, engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = engine
    fake.faults = {"ignore_update"}
    process = Process(spec_of(model_folder, tmp_path / "run", url), link, monkeypatch)
    await expect(link, "hello")
    await expect(link, "sync_begin")
    await link.send("sync_go")
    failed = await expect(link, "failed")
    assert failed["error"] == "WeightProofFailed" and "k-0" in failed["message"]
    assert await process.exit_code() == 1 and fake.paused


async def test_e08_an_engine_that_keeps_the_first_adapter_is_noticed_before_it_samples(
    model_folder: Path, tmp_path: Path, link: LearnerLink, engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = engine
    process = Process(spec_of(model_folder, tmp_path / "run", url, lora_rank=4, learning_rate=3e-2), link, monkeypatch)
    await expect(link, "hello")
    await allow_sync(link, "k-0")
    fake.faults = {"ignore_update"}  # it answers that it holds k-1
    await link.send_batch(1, rows_at(0), 10)
    await expect(link, "sync_begin")
    await link.send("sync_go")
    failed = await expect(link, "failed")
    assert failed["error"] == "WeightProofFailed" and "k-1" in failed["message"]
    assert await process.exit_code() == 1 and fake.paused


async def test_an_update_that_failed_is_made_when_control_asks_again(
    model_folder: Path, tmp_path: Path, link: LearnerLink, engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = engine
    process = Process(spec_of(model_folder, tmp_path / "run", url), link, monkeypatch)
    await expect(link, "hello")
    await allow_sync(link, "k-0")
    await link.send_batch(1, rows_at(0), 10)
    await expect(link, "sync_begin")
    fake.faults = {"refuse_update"}
    await link.send("sync_go")
    failed = await expect(link, "sync_failed")
    assert failed["version"] == "k-1" and "HTTP 500" in failed["message"] and fake.paused
    await link.send_batch(2, rows_at(0, seed=1), 10)  # a batch that comes meanwhile waits
    fake.faults, fake.weight_version = set(), "default"  # as an engine that was started again
    await link.send("resync")
    assert (await expect(link, "sync_done"))["version"] == "k-1"
    await link.send("sync_ack")
    assert (await expect(link, "result"))["step"] == 1
    await allow_sync(link, "k-2")
    assert (await expect(link, "result"))["step"] == 2
    await link.send("stop")
    await expect(link, "bye")
    assert await process.exit_code() == 0


async def test_weights_are_pushed_every_so_many_steps_and_when_control_asks(
    model_folder: Path, tmp_path: Path, link: LearnerLink, engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = engine
    process = Process(spec_of(model_folder, tmp_path / "run", url, sync_every=2), link, monkeypatch)
    await expect(link, "hello")
    await allow_sync(link, "k-0")
    served = []
    for step in (1, 2, 3):
        await link.send_batch(step, rows_at(step - 1, seed=step), 10)
        if step == 2:
            await allow_sync(link, "k-2")
        result = await expect(link, "result")
        assert result["version"] == f"k-{step}"
        served.append((result["served"], fake.weight_version, "seconds/sync" in result["metrics"]))
    assert served == [(0, "k-0", False), (2, "k-2", True), (2, "k-2", False)]
    await link.send("resync")
    await allow_sync(link, "k-3")
    assert fake.weight_version == "k-3"
    await link.send_batch(4, rows_at(3), 10)
    assert (await expect(link, "result"))["served"] == 3
    await link.send("stop")
    await expect(link, "bye")
    assert await process.exit_code() == 0


async def test_the_engine_sleeps_while_the_learner_trains(
    model_folder: Path, tmp_path: Path, link: LearnerLink, engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = engine
    process = Process(spec_of(model_folder, tmp_path / "run", url, sync_sleep=True, sync_mode="abort"), link, monkeypatch)
    await expect(link, "hello")
    await allow_sync(link, "k-0")
    fake.calls.clear()
    await link.send_batch(1, rows_at(0), 10)
    assert (await expect(link, "sync_begin"))["version"] == "k-1" and not fake.calls  # nothing sleeps before calls are held
    await link.send("sync_go")
    await allow_sync(link, "k-1")
    assert (await expect(link, "result"))["served"] == 1
    shown = [call for call in fake.calls if call.startswith(("sleep", "pause", "wake", "update_weights", "resume"))]
    assert shown == ["sleep?level=1&mode=abort", "wake_up?tags=weights", "update_weights", "wake_up?tags=kv_cache", "resume"]
    await link.send("stop")
    await expect(link, "bye")
    assert await process.exit_code() == 0


async def test_g13_a_diverged_step_is_neither_saved_nor_synced(
    model_folder: Path, tmp_path: Path, link: LearnerLink, engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = engine
    process = Process(spec_of(model_folder, tmp_path / "run", url, checkpoint_every=1, max_skipped_steps=1), link, monkeypatch)
    await expect(link, "hello")
    await allow_sync(link, "k-0")
    rows = rows_at(0)
    rows[0].advantage, rows[1].advantage = 1e38, -1e38
    await link.send_batch(1, rows, 10)
    result = await expect(link, "result")
    assert (result["step"], result["version"], result["served"]) == (1, "k-0", 1) and set(result["rows"].values()) == {"rejected"}
    assert fake.weight_version == "k-0" and checkpoint.find(tmp_path / "run" / "checkpoints").newest is None
    await link.send_batch(2, rows_at(0), 10)  # and it goes on
    await allow_sync(link, "k-2")
    assert (await expect(link, "result"))["version"] == "k-2"
    assert (await expect(link, "checkpoint"))["step"] == 2
    await link.send("stop")
    await expect(link, "bye")
    assert await process.exit_code() == 0


def test_a_step_that_had_nothing_to_save_leaves_its_checkpoint_to_the_next() -> None:
    learner: Any = object.__new__(main_module.Learner)
    learner.spec, learner.saved_step, saved = SimpleNamespace(checkpoint_every=3), -1, []
    for step, updated in enumerate([True, True, False, True, True, True, True], 1):
        learner.step = step
        if updated and learner._save_due():
            learner.saved_step = step
            saved.append(step)
    assert saved == [4, 6]
    learner.spec.checkpoint_every = 0
    assert not learner._save_due()


async def test_e09_an_adapter_is_pushed_merged_under_the_one_name_that_agents_use(
    model_folder: Path, tmp_path: Path, link: LearnerLink, engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is loaded by name unless the run says so; each push is proven by its logprobs, also after a resume."""
    fake, url = engine
    for resume, step, version in ((False, 1, "k-1"), (True, 2, "n-2")):
        lineage = version[0]
        spec = spec_of(model_folder, tmp_path / "run", url, lora_rank=4, lineage=lineage, resume=resume, learning_rate=3e-2)
        process = Process(spec, link, monkeypatch)
        await expect(link, "hello")
        first = await allow_sync(link, f"{lineage}-{step - 1}")
        before = fake.model.model.layers[0].mlp.up_proj.weight.detach().clone()
        await link.send_batch(step, rows_at(step - 1, lineage, seed=step), 10)
        assert first["proof"]["ok"] and (await allow_sync(link, version))["proof"]["ok"]
        assert (await expect(link, "result"))["version"] == version == fake.weight_version
        assert float((fake.model.model.layers[0].mlp.up_proj.weight.detach() - before).abs().max()) > 1e-4
        await link.send("stop", save=True)
        assert (await expect(link, "checkpoint"))["step"] == step
        await expect(link, "bye")
        assert await process.exit_code() == 0
        await expect(link, "closed")
    assert not any("lora" in call or "adapter" in call for call in fake.calls)
    names = {path.name for path in (tmp_path / "run" / "checkpoints" / "step-2" / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
def base_engine() -> Iterator[tuple[FakeEngine, str]]:
    """With the run's own base model, as one that adapters are loaded into must."""
    made = FakeEngine(Policy.wrap(tiny_llama(), torch.float32).model)
    with serve(made) as url:
        yield made, url


async def allow_adapter(link: LearnerLink, version: str, *also_asked: str) -> Message:
    assert (await expect(link, "sync_begin"))["version"] == version
    await link.send("sync_go")
    done = await expect(link, "sync_done")
    assert done["adapter"] == f"policy@{version}" and done["proof"]["ok"]
    await link.send("sync_ack", adapters_asked=[done["adapter"], *also_asked])
    return done


async def test_each_policy_is_loaded_by_name_also_after_a_resume_and_what_nobody_asks_for_goes(
    model_folder: Path, tmp_path: Path, link: LearnerLink, base_engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = base_engine
    more: dict[str, Any] = {"lora_rank": 4, "learning_rate": 3e-2, "sync_lora": "adapter"}
    process = Process(spec_of(model_folder, tmp_path / "run", url, **more), link, monkeypatch)
    await expect(link, "hello")
    await allow_adapter(link, "k-0")
    await link.send_batch(1, rows_at(0, seed=1), 10)
    await allow_adapter(link, "k-1", "policy@k-0")  # a call is still under the first
    assert (await expect(link, "result"))["version"] == "k-1"
    assert set(fake.adapters) == {"policy@k-0", "policy@k-1"}
    fake.adapters.clear()  # the engine is started again
    await link.send("resync")
    await allow_adapter(link, "k-1")
    await link.send("stop", save=True)
    assert (await expect(link, "checkpoint"))["step"] == 1
    await expect(link, "bye")
    assert await process.exit_code() == 0
    await expect(link, "closed")
    trained = fake.adapters["policy@k-1"][1].state_dict()

    process = Process(spec_of(model_folder, tmp_path / "run", url, resume=True, lineage="n", **more), link, monkeypatch)
    assert (await expect(link, "hello"))["step"] == 1
    await allow_adapter(link, "n-1")
    await link.send("stop", save=False)
    await expect(link, "bye")
    assert await process.exit_code() == 0
    assert set(fake.adapters) == {"policy@n-1"}
    resumed, start = fake.adapters["policy@n-1"][1].state_dict(), fake.model.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(value, resumed[key]) for key, value in trained.items())
    assert not torch.equal(trained[name], start[name])
    assert not any(call.startswith(("pause", "start", "update", "reset")) for call in fake.calls)


async def test_an_adapter_that_an_engine_refuses_is_named_and_one_that_is_another_ends_the_run(
    model_folder: Path, tmp_path: Path, link: LearnerLink, base_engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = base_engine
    spec = spec_of(model_folder, tmp_path / "run", url, lora_rank=4, learning_rate=3e-2, sync_lora="adapter")
    process = Process(spec, link, monkeypatch)
    await expect(link, "hello")
    await allow_adapter(link, "k-0")
    fake.faults = {"refuse_adapter"}
    await link.send_batch(1, rows_at(0), 10)
    await expect(link, "sync_begin")
    await link.send("sync_go")
    failed = await expect(link, "sync_failed")
    assert failed["version"] == "k-1" and "greater than max_lora_rank" in failed["message"]
    fake.faults = {"wrong_adapter"}
    await link.send("resync")
    failed = await expect(link, "failed")
    assert failed["error"] == "WeightProofFailed" and "under policy@k-1" in failed["message"]
    assert await process.exit_code() == 1 and "policy@k-0" in fake.adapters


@pytest.mark.parametrize(("max_rejected", "ends"), [(0, True), (1, False)])
async def test_a_row_that_breaks_invariant_1(
    model_folder: Path, tmp_path: Path, link: LearnerLink, monkeypatch: pytest.MonkeyPatch, max_rejected: int, ends: bool
) -> None:
    process = Process(spec_of(model_folder, tmp_path / "run", None, max_rejected_rows=max_rejected), link, monkeypatch)
    await expect(link, "hello")
    rows = rows_at(0)
    rows[2].ids[0] += 1
    await link.send_batch(1, rows, 10)
    if ends:
        failed = await expect(link, "failed")
        assert failed["error"] == "InvariantError" and rows[2].row_id in failed["message"]
        assert await process.exit_code() == 1
        return
    result = await expect(link, "result")
    assert [state for state in result["rows"].values()].count("trained") == 5 and result["rows"][rows[2].row_id] == "rejected"
    assert "not the prompt the engine was given" in result["reasons"][rows[2].row_id]
    await link.send("stop")
    await expect(link, "bye")
    assert await process.exit_code() == 0


async def test_a_batch_of_another_step_is_refused(
    model_folder: Path, tmp_path: Path, link: LearnerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(spec_of(model_folder, tmp_path / "run", None), link, monkeypatch)
    await expect(link, "hello")
    await link.send_batch(7, rows_at(0), 10)
    assert "step 7; this learner is at step 0" in (await expect(link, "failed"))["message"]
    assert await process.exit_code() == 1


async def test_stop_instead_of_a_sync(
    model_folder: Path, tmp_path: Path, link: LearnerLink, engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = engine
    process = Process(spec_of(model_folder, tmp_path / "run", url), link, monkeypatch)
    await expect(link, "hello")
    await expect(link, "sync_begin")
    await link.send("stop")
    await expect(link, "bye")
    assert await process.exit_code() == 0 and "pause" not in "".join(fake.calls)


async def test_control_that_never_answers_a_sync_is_a_named_error(
    model_folder: Path, tmp_path: Path, link: LearnerLink, engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(spec_of(model_folder, tmp_path / "run", engine[1], link_timeout_s=2.0), link, monkeypatch)
    await expect(link, "hello")
    await expect(link, "sync_begin")
    assert "stop or sync_go did not come" in (await expect(link, "failed"))["message"]
    assert await process.exit_code() == 1


def test_the_other_ranks_wait_as_long_as_the_first() -> None:
    """Each sign of control's life is an order to wait on, so that no deadline of theirs ends a run whose batch takes long."""
    orders = iter([("wait", ()), ("wait", ()), ("stop", ())])
    learner: Any = object.__new__(main_module.Learner)
    learner.ranks = SimpleNamespace(next_order=lambda: next(orders))
    learner.trainer, learner.saver = SimpleNamespace(updater=None), SimpleNamespace(wait=lambda: None)
    learner.follow()
    assert next(orders, None) is None


async def test_mistakes_end_with_code_2(
    tmp_path: Path, link: LearnerLink, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = Process(spec_of(tmp_path / "no-model", tmp_path / "run", None), link, monkeypatch)
    assert await process.exit_code() == 2
    assert "no-model cannot be used" in capsys.readouterr().err
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    assert main_module.main(tmp_path / "absent.json", link.path) == 2


async def test_warm_start_is_the_same_loop(model_folder: Path, tmp_path: Path, link: LearnerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    demonstrations = [
        row
        for i in range(3)
        for row in build_rows(
            trace(turn("a", rng.integers(0, 97, 5).tolist(), [3, 1, 4, 1, 5], origin="demonstration")),
            f"d{i}",
            "t",
            origins=frozenset({"demonstration"}),
        )
    ]
    process = Process(spec_of(model_folder, tmp_path / "run", None, objective="sft", learning_rate=3e-3), link, monkeypatch)
    await expect(link, "hello")
    losses = []
    for step in range(1, 7):
        await link.send_batch(step, demonstrations, 10)
        result = await expect(link, "result")
        assert set(result["rows"].values()) == {"trained"}
        losses.append(result["metrics"]["loss"])
    assert losses[-1] < losses[0]
    await link.send("stop", save=True)
    assert (await expect(link, "checkpoint"))["step"] == 6
    await expect(link, "bye")
    assert await process.exit_code() == 0


async def test_the_real_process(model_folder: Path, tmp_path: Path, link: LearnerLink) -> None:
    spec = spec_of(model_folder, tmp_path / "run", None)
    config = tmp_path / "learner.json"
    config.write_text(spec.to_json())
    env = {**os.environ, TOKEN_ENV: "secret", "PYTHONPATH": f"{ROOT}:{ROOT / 'proxy'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "harness_rl.learner", "--config", str(config), "--link", str(link.path)]
    process = await asyncio.to_thread(lambda: subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        hello = await link.receive(90)
        assert hello.type == "hello" and hello["pid"] == process.pid
        assert "secret" not in " ".join(command)
        await link.close()  # control dies
        code = await asyncio.to_thread(process.wait, 20)
        assert code == 1
        assert process.stderr is not None
        error = process.stderr.read()
        assert "learner: control" in error and "Traceback" not in error
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
