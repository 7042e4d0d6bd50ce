"""A learner of several processes as control starts it: real processes, a fake engine, kills, and resumes on another number of ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, serve
from learner_helpers import random_rows, tiny_llama
from safetensors.torch import load_file
from tiny_models import made

from harness_rl.errors import LearnerError, LearnerGone
from harness_rl.learner.link import TOKEN_ENV, LearnerLink, Message
from harness_rl.learner.policy import Policy
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Trainer
from harness_rl.orchestrator.learner_process import LearnerProcess, SyncHooks, SyncReport, start_learner

ROOT = Path(__file__).resolve().parents[2]
STARTS_S = 200.0
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "micro_batch_tokens": 64, "probe_tokens": 100, "adam_epsilon": 1e-4, "device": "cpu"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def engine() -> Iterator[tuple[FakeEngine, str]]:
    made = FakeEngine(Policy.wrap(tiny_llama(seed=5), torch.float32).model)
    with serve(made) as url:
        yield made, url


async def start(model: Path, run: Path, processes: int, **more: Any) -> LearnerProcess:
    async def hold(_: str) -> None: ...

    async def release(_: SyncReport) -> None: ...

    async def failed(reason: str) -> None:
        raise LearnerError(reason)

    spec = LearnerSpec(model=str(model), run_dir=str(run), processes=processes, **({"lineage": "k"} | SETTINGS | more))
    hooks = SyncHooks(hold, release, failed)
    return await start_learner(spec, python=Path(sys.executable), env={"OMP_NUM_THREADS": "1"}, hooks=hooks, run_dir=run, timeout=STARTS_S)


async def expect(learner: LearnerProcess, kind: str) -> Message:
    message = await learner.next(60)
    assert message.type == kind, message
    return message


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def after_two_steps() -> dict[str, torch.Tensor]:
    """The same two batches, in one process that nothing interrupts."""
    trainer = Trainer(Policy.wrap(tiny_llama(), torch.float32), LearnerSpec(model="-", run_dir="-", lineage="k", **SETTINGS))
    for step in (1, 2):
        assert trainer.step(random_rows(step), "k-0").updated
    return trainer.policy.weights(torch.float32)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        (2, 1, {}),
        pytest.param(1, 2, {}, marks=pytest.mark.full),
        pytest.param(2, 3, {}, marks=pytest.mark.full),
        pytest.param(2, 1, {"context_parallel": 2, "micro_batch_tokens": 24}, marks=pytest.mark.full),
    ],
)
async def test_a_killed_rank_ends_the_learner_and_another_number_of_ranks_goes_on(
    model_folder: Path, run: Path, engine: tuple[FakeEngine, str], before: int, after: int, more: dict[str, Any]
) -> None:
    fake, url = engine
    learner = await start(model_folder, run, before, engines=[url], checkpoint_every=1, **more)
    pids = [child.process.pid for child in (learner.child, *learner.others)]
    assert len(pids) == before
    try:
        assert (await expect(learner, "sync_done"))["proof"]["ok"]
        await learner.send_batch(1, random_rows(1), 10)
        assert (await expect(learner, "sync_done"))["proof"]["ok"]
        result = await expect(learner, "result")
        assert set(result["rows"].values()) == {"trained"} and fake.weight_version == "k-1"
        assert (await expect(learner, "checkpoint"))["step"] == 1
        os.kill(pids[-1], signal.SIGKILL)
        with pytest.raises(LearnerGone, match="killed by SIGKILL" if before > 1 else "closed the connection"):
            await learner.next(60)
    finally:
        await learner.close()
    assert not any(alive(pid) for pid in pids)

    learner = await start(model_folder, run, after, engines=[url], resume=True, lineage="n")
    try:
        assert learner.step == 1
        assert (await expect(learner, "sync_done"))["version"] == "n-1"
        await learner.send_batch(2, random_rows(2), 10)
        assert (await expect(learner, "sync_done"))["proof"]["ok"]
        await expect(learner, "result")
        saved = await learner.stop(timeout=60)
    finally:
        await learner.close()
    assert saved["step"] == 2
    weights = load_file(Path(saved["path"]) / "model.safetensors")
    expected = after_two_steps()
    assert all(float((weights[name] - value).abs().max()) < 1e-5 for name, value in expected.items())


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", [False, True])
async def test_torchrun_starts_it_too_and_leaves_nothing_when_it_is_killed(
    model_folder: Path, run: Path, tmp_path: Path, killed: bool
) -> None:
    link = LearnerLink(tmp_path / "l.sock", "secret")
    await link.start()
    config = tmp_path / "learner.json"
    config.write_text(LearnerSpec(model=str(model_folder), run_dir=str(run), lineage="k", processes=2, **SETTINGS).to_json())
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "harness_rl.learner"]
    command += ["--config", str(config), "--link", str(link.path)]
    env = {**os.environ, TOKEN_ENV: "secret", "PYTHONPATH": f"{ROOT}:{ROOT / 'proxy'}", "OMP_NUM_THREADS": "1"}
    launcher = await asyncio.create_subprocess_exec(sys.executable, *command, env=env, start_new_session=True)
    try:
        worker = (await link.receive(STARTS_S))["pid"]
        await link.send_batch(1, random_rows(1), 10)
        assert set((await link.receive(60))["rows"].values()) == {"trained"}
        if killed:
            launcher.kill()
            assert (await link.receive(60)).type == "closed"
        else:
            await link.send("stop", save=False)
            assert (await link.receive(60)).type == "bye"
        assert await asyncio.wait_for(launcher.wait(), 60) == (-signal.SIGKILL if killed else 0)
        deadline = time.monotonic() + 20
        while alive(worker) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert not alive(worker)
    finally:
        if launcher.returncode is None:
            launcher.kill()
        await link.close()


@pytest.mark.timeout(300)
async def test_a_mistake_is_told_once_by_its_own_words(run: Path) -> None:
    with pytest.raises(LearnerError, match=r"did not start: the learner.* ended: .*no-model cannot be used"):
        await start(run / "no-model", run, 2)


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_a_model_that_cannot_be_split_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    made("mistral_window").save_pretrained(tmp_path / "windows")
    with pytest.raises(LearnerError, match="windows cannot be used: context_parallel = 2: sliding windows are not supported"):
        await start(tmp_path / "windows", run, 2, context_parallel=2)
