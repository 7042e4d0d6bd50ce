"""One rank of a small distributed run: `ranks_script.py OUT CASE ...`, by torchrun's variables. Rank 0 writes OUT/CASE.pt.

`outcome` is what it computes; called without ranks it is the same run in one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_helpers import branching_rows, random_rows, trace, turn
from tiny_models import made

from harness_rl.learner import lora
from harness_rl.learner.policy import Policy
from harness_rl.learner.ranks import ALONE, Ranks
from harness_rl.learner.rows import Row, build_rows
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Trainer
from harness_rl.learner.update import Clock


def long_and_short(step: int) -> list[Row]:
    """Five long rows and five short ones, as they would come to two ranks."""
    rng = np.random.default_rng(step)
    rows = []
    for n, length in enumerate([30] * 5 + [3] * 5):
        prompt, said = rng.integers(1, 97, 4).tolist(), rng.integers(1, 97, length).tolist()
        (row,) = build_rows(trace(turn("n", prompt, said)), f"r{n}", f"g{n // 5}")
        row.advantage = float((-1) ** n * (1 + 0.1 * n))
        rows.append(row)
    return rows


CASES: dict[str, tuple[str, Callable[[int], list[Row]], dict[str, Any]]] = {
    # name: model, rows of a step, settings
    "tree": ("llama", branching_rows, {"micro_batch_tokens": 64}),
    "plain": ("llama_untied", random_rows, {"micro_batch_tokens": 80, "packing": "plain"}),
    "accumulation": ("qwen3", lambda step: random_rows(step, rollouts=9), {"micro_batch_tokens": 64, "loss_normalisation": "rollout"}),
    "clipped": ("llama", branching_rows, {"micro_batch_tokens": 64, "max_grad_norm": 0.01, "scale_by_signal": True}),
    "d15_long_and_short": ("llama", long_and_short, {"micro_batch_tokens": 64}),
    "d15_fewer_rows_than_ranks": ("llama", lambda step: long_and_short(step)[:1], {"micro_batch_tokens": 64}),
    "minibatches": ("llama", lambda step: random_rows(step, rollouts=9), {"micro_batch_tokens": 64, "minibatches": 2, "kl_beta": 0.1}),
    "states": ("qwen3_next", random_rows, {"micro_batch_tokens": 80}),
    "sinks": ("gpt_oss", branching_rows, {"micro_batch_tokens": 64, "objective": "gspo"}),
    "recomputed": ("llama", branching_rows, {"micro_batch_tokens": 64, "gradient_checkpointing": True, "offload_activations": True}),
    "lora": ("llama", branching_rows, {"micro_batch_tokens": 64, "lora_rank": 4, "kl_beta": 0.1}),
    "bfloat16": ("llama", branching_rows, {"micro_batch_tokens": 64, "dtype": "bfloat16"}),
}
DTYPES = {"states": torch.float32, "sinks": torch.float32, "bfloat16": torch.bfloat16}
"""Of the forward pass; float64 where a case is not here, so that a sum in another order is no excuse."""
WATCHED = ("loss", "grad_norm", "grad_signal_share", "learning_rate", "entropy", "ratio", "kl_reference", "tokens/forwarded", "updates")
STEPS = 4


def outcome(name: str, ranks: Ranks = ALONE) -> dict[str, Any]:
    """{weights, metrics of each step}; nothing on other ranks than 0. A run that another rank has part in."""
    kind, rows, settings = CASES[name]
    dtype = DTYPES.get(name, torch.float64)
    spec = LearnerSpec(model="-", run_dir="-", lineage="k", learning_rate=1e-3, adam_epsilon=1e-4, processes=ranks.size, **settings)
    policies = []
    for _ in range(2 if spec.kl_beta and not spec.lora_rank else 1):
        model = made(kind).to(torch.float64 if dtype == torch.float64 else torch.float32)
        if spec.lora_rank:
            lora.add(model, spec)
            model.to(torch.float64)
        policies.append(Policy.wrap(model, dtype, 7, spec.gradient_checkpointing, spec.offload_activations).over(ranks))
    for reference in policies[1:]:
        reference.model.requires_grad_(False)
    trainer = Trainer(policies[0], spec, *policies[1:], ranks=ranks)
    stored = torch.float64 if dtype == torch.float64 else torch.float32
    if ranks.rank:
        while (order := ranks.next_order())[0] != "stop":
            trainer.updater.train(order[1][0], Clock(ranks.device))
        return trainer.policy.weights(stored)
    metrics = [trainer.step(rows(step), f"k-{step}").metrics for step in range(STEPS)]
    ranks.order("stop")
    weights = {key: value.clone() for key, value in trainer.policy.weights(stored).items()}
    return {"weights": weights, "metrics": [{key: found[key] for key in WATCHED if key in found} for found in metrics]}


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    device: Any = os.environ.get("RANKS_DEVICE", "cpu")
    ranks = Ranks.join(LearnerSpec(model="-", run_dir="-", lineage="k", device=device, processes=int(os.environ["WORLD_SIZE"])))
    for name in names:
        found = outcome(name, ranks)
        if ranks.rank == 0:
            torch.save(found, out / f"{name}.pt")
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
