"""The learner on a GPU, sized to ten minutes on one H200: `.venv-torch/bin/pytest tests/gpu`. Random weights; nothing is fetched.

What the CPU tests prove in float64 is compared here in the kernels and dtypes of a GPU; what only a GPU has (offloading, NCCL) is run.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="runs in the torch environment: .venv-torch/bin/pytest tests/gpu")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.skipif(GPUS < 1, reason="needs a CUDA GPU; none is here"), pytest.mark.timeout(600)]
two_gpus = pytest.mark.skipif(
    GPUS < 2, reason=f"needs two GPUs, for NCCL between ranks and for a row that is split over them; here are {GPUS}"
)

VOCABULARY = 32_000


def model(layers: int = 8, hidden: int = 1024) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).float()


def rows(load: str, **sizes: int) -> list[Any]:
    from harness_rl.bench.learner_ways import Sizes, rollouts

    found = rollouts(load, Sizes(**({"prompt": 2048, "own": 256, "turns": 12} | sizes)), VOCABULARY)
    for n, row in enumerate(found):
        row.advantage = float((-1) ** n * (1 + 0.1 * n))
    return found


def policy(dtype: str, **more: Any) -> Any:
    from harness_rl.learner.policy import DTYPES, Policy
    from harness_rl.learner.ranks import Ranks
    from harness_rl.learner.spec import LearnerSpec

    spec = LearnerSpec(model="-", run_dir="-", lineage="k", device="cuda", dtype=dtype, **more)
    ranks = Ranks.join(spec, {})
    made = model()
    made = made if spec.offload_optimizer else made.to(ranks.device)
    found = Policy.wrap(made, DTYPES[dtype], spec.logprob_chunk, spec.gradient_checkpointing, spec.offload_activations)
    return found.over(ranks, spec.offload_optimizer), spec, ranks


def gradients(dtype: str, load: list[Any], share: bool, budget: int) -> tuple[Any, list[Any]]:
    """(logprobs row by row, gradients) of the sum of the rows' logprobs, weighed."""
    from harness_rl.learner.packing import pack_rows

    found, _, _ = policy(dtype)
    total = sum(int(row.mask.sum()) for row in load)
    by_row: list[Any] = [None] * len(load)
    for pack in pack_rows(load, range(len(load)), budget, [1 / total] * len(load), share):
        logprobs = found.score(pack)[0]
        (logprobs * torch.from_numpy(pack.weights * pack.advantages).cuda()).sum().backward()
        for r, i in enumerate(pack.rows):
            by_row[i] = logprobs.detach()[int(pack.term_bounds[r]) : int(pack.term_bounds[r + 1])]
    return torch.cat(by_row), [p.grad for p in found.model.parameters()]


@pytest.mark.parametrize(("dtype", "bar"), [("float32", 2e-4), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("load", ["shared", "forked"])
def test_tree_and_plain_packing_give_the_same(load: str, dtype: str, bar: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    batch = rows(load)
    longest = max(len(row) for row in batch)
    tree, plain = gradients(dtype, batch, True, 8 * longest), gradients(dtype, batch, False, longest)
    gap = (tree[0] - plain[0]).abs()
    assert float(gap.mean()) < bar / 10 and float(gap.max()) < 10 * bar
    for a, b in zip(tree[1], plain[1], strict=True):
        assert float((a - b).norm()) <= bar * float(b.norm()) + 1e-12


def peak(run: Any) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


def test_memory_grows_with_the_tokens_and_not_with_how_often_they_are_repeated() -> None:
    """Twice the turns of a conversation that drops its thinking: twice the tokens of the tree, four times the tokens of its rows."""
    from harness_rl.learner.packing import pack_rows

    found, _, _ = policy("bfloat16")
    peaks, tokens = [], []
    for turns in (30, 60):
        batch = rows("forked", turns=turns, thought=128, said=64, output=64)
        (pack,) = pack_rows(batch, range(turns), 1_000_000, [1.0] * turns)
        peaks.append(peak(lambda pack=pack: found.score(pack)[0].sum().backward()))
        tokens.append(pack.tokens)
        found.model.zero_grad(set_to_none=False)
    assert peaks[1] / peaks[0] <= 1.3 * tokens[1] / tokens[0], (peaks, tokens)


def test_offloaded_activations_leave_the_gpu_and_change_nothing() -> None:
    from harness_rl.learner.packing import pack_rows

    batch = rows("shared", prompt=8192)
    (pack,) = pack_rows(batch, range(len(batch)), 1_000_000, [1e-3] * len(batch))
    peaks, grads = [], []
    for offload in (False, True):
        found, _, _ = policy("bfloat16", gradient_checkpointing=True, offload_activations=offload)
        found.score(pack)[0].sum().backward()
        found.model.zero_grad(set_to_none=False)
        peaks.append(peak(lambda found=found: found.score(pack)[0].sum().backward()))
        grads.append([p.grad.clone() for p in found.model.parameters()])
    kept = 8 * pack.tokens * 1024 * 4  # float32 input of each layer
    assert peaks[0] - peaks[1] > kept / 2, (peaks, kept)
    assert all(float((a - b).norm()) <= 1e-3 * float(b.norm()) + 1e-12 for a, b in zip(*grads, strict=True))


def trained(steps: int = 3, **more: Any) -> dict[str, Any]:
    from harness_rl.learner.packing import pack_rows
    from harness_rl.learner.update import Clock, Updater

    found, spec, ranks = policy("float32", learning_rate=1e-3, adam_epsilon=1e-4, **more)
    updater = Updater(found, spec, ranks=ranks)
    for step in range(steps):
        batch = rows("shared", prompt=256 + step)
        updater.train([pack_rows(batch, range(len(batch)), 1024, [1e-3] * len(batch))], Clock(found.device))
    weights = {name: value.cpu() for name, value in found.weights(torch.float32).items()}
    ranks.leave()
    return weights


def test_an_optimizer_in_host_memory_gives_the_same_weights() -> None:
    there, here = trained(), trained(offload_optimizer=True)
    assert all(float((here[name] - value).abs().max()) < 1e-5 for name, value in there.items())


def test_adam_in_8_bits_trains() -> None:
    pytest.importorskip("torchao", reason="learner.optimizer = adamw_8bit needs torchao, which is not installed")
    there, here = trained(), trained(optimizer="adamw_8bit")
    moved = model().state_dict()
    for name, value in there.items():
        if value.numel() >= 4096:  # smaller ones keep a state of 32 bits
            step = float((value - moved[name]).norm())
            assert float((here[name] - value).norm()) < 0.5 * step


def run_two(script: Path, *arguments: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANKS_DEVICE": "cuda"}
    command = [sys.executable, str(script), *arguments]
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    assert [process.wait(timeout=300) for process in ranks] == [0, 0]


@two_gpus
def test_two_ranks_over_nccl_give_what_one_gives(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "learner" / "ranks_script.py"
    sys.path.insert(0, str(script.parent))
    from ranks_script import outcome

    run_two(script, str(tmp_path), "tree", "clipped", "d15_long_and_short")
    for name in ("tree", "clipped", "d15_long_and_short"):
        expected, found = outcome(name), torch.load(tmp_path / f"{name}.pt")
        for key, weight in expected["weights"].items():
            assert float((found["weights"][key] - weight).abs().max()) <= 1e-9, (name, key)


@two_gpus
def test_a_row_over_two_gpus_gives_what_one_gives(tmp_path: Path) -> None:
    """In bfloat16, which the flash attention of a GPU takes alone; one rank's numbers are a CPU's."""
    script = Path(__file__).parents[1] / "learner" / "context_script.py"
    sys.path.insert(0, str(script.parent))
    from context_script import outcome

    run_two(script, str(tmp_path), "2", "bfloat16")
    expected, found = outcome("bfloat16"), torch.load(tmp_path / "bfloat16.pt")
    largest = max(float(weight.abs().max()) for weight in expected["weights"].values())
    for key, weight in expected["weights"].items():
        assert float((found["weights"][key] - weight).abs().max()) <= 3e-2 * largest, key
    for one, other in zip(found["scores"], expected["scores"], strict=True):
        assert float((one - other).abs().mean()) <= 3e-2
    assert all(0.5 * expected["kept"][0] < 2 * kept < 1.1 * expected["kept"][0] for kept in found["kept"])


def test_the_bench_meets_its_bars(tmp_path: Path) -> None:
    folder, report = tmp_path / "model", Path(os.environ.get("OUT", str(tmp_path))) / "bench_learner.md"
    model(layers=24).save_pretrained(folder)
    command = [sys.executable, "-m", "harness_rl.bench.learner", str(folder), str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
