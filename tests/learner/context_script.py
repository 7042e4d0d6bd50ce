"""One rank of a run whose long rows are split: `context_script.py OUT CONTEXT CASE ...`, by torchrun's variables.

As ranks_script.py, whose rows are such as one rank can hold: rank 0 writes OUT/CASE.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_helpers import branching_rows, trace, turn
from ranks_script import WATCHED
from tiny_models import in_float64, made

from harness_rl.learner.objectives.base import Terms, TokenLoss
from harness_rl.learner.packing import pack_rows, term_weights
from harness_rl.learner.policy import Policy
from harness_rl.learner.ranks import ALONE, Ranks
from harness_rl.learner.rows import Row, build_rows
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Trainer
from harness_rl.learner.update import Clock


def drawn(terms: Terms) -> TokenLoss:
    """An objective that gives every rank another loss."""
    return TokenLoss(-terms.logprobs * terms.advantages * torch.rand(len(terms.logprobs)))


BUDGET = 24
"""Tokens that a rank may hold: with two of them a row has up to 48."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # name: model, settings
    "tied": ("llama", {"max_grad_norm": 0.01, "scale_by_signal": True}),
    "recomputed": ("llama_untied", {"gradient_checkpointing": True, "minibatches": 2, "kl_beta": 0.1}),
    "by_row": ("qwen3", {"objective": "gspo", "loss_normalisation": "rollout"}),
    "drawn": ("llama", {"objective": f"{__file__}:drawn"}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
}
STEPS = 3


def long_row(rng: np.random.Generator, name: str, prompt: int, sampled: int, group: int) -> Row:
    ids = rng.integers(1, 97, prompt + sampled).tolist()
    (row,) = build_rows(trace(turn("n", ids[:prompt], ids[prompt:])), name, f"g{group}")
    return row


def rows_of(step: int) -> list[Row]:
    """Long ones, of lengths that the ranks do not divide, two sampled at their ends alone, where one rank has no term; short ones."""
    rng = np.random.default_rng(step)
    made = [long_row(rng, f"l{n}", *sizes, group=n % 2) for n, sizes in enumerate([(4, 43), (26, 4), (39, 2), (5, 28), (3, 38)])]
    short = branching_rows(step, rollouts=5)
    for n, row in enumerate([*made, *short]):
        row.row_id, row.advantage, row.temperature = f"row{n}", float((-1) ** n * (1 + 0.1 * n)), 1.0 if n % 2 else 0.75
    return [*short[:2], *made, *short[2:]]


def policy_of(name: str, ranks: Ranks) -> Policy:
    kind, settings = CASES[name]
    dtype = torch.bfloat16 if "dtype" in settings else torch.float64
    model = made(kind) if dtype == torch.bfloat16 else in_float64(made(kind))
    return Policy.wrap(model, dtype, 7, settings.get("gradient_checkpointing", False)).over(ranks)


def outcome(name: str, ranks: Ranks = ALONE) -> dict[str, Any]:
    """{weights, metrics of each step, logprobs and entropies of the long rows before}; nothing on other ranks than 0."""
    _, settings = CASES[name]
    budget = BUDGET if ranks.context_size > 1 else 1000
    spec = LearnerSpec(
        model="-",
        run_dir="-",
        lineage="k",
        learning_rate=1e-3,
        adam_epsilon=1e-4,
        micro_batch_tokens=budget,
        processes=ranks.size,
        context_parallel=ranks.context_size,
        **settings,
    )
    policy, reference = policy_of(name, ranks), policy_of(name, ranks) if spec.kl_beta else None
    if reference:
        reference.model.requires_grad_(False)
    trainer = Trainer(policy, spec, reference, ranks)
    scores, kept = scored(policy, spec), [kept_for_backward(policy, spec, tokens) for tokens in (96, 192)]
    found = {"scores": scores, "kept": ranks.gather(kept[1] - kept[0])}
    torch.manual_seed(ranks.rank)
    stored = torch.float32 if policy.dtype == torch.bfloat16 else torch.float64
    if ranks.rank:
        while (order := ranks.next_order())[0] != "stop":
            trainer.updater.train(order[1][0], Clock(ranks.device))
        return policy.weights(stored)
    chosen = slice(2, 3) if name == "drawn" else slice(None)  # one rank draws for a row after the other
    reports = [trainer.step(rows_of(step)[chosen], f"k-{step}") for step in range(STEPS)]
    assert all(set(report.states.values()) == {"trained"} for report in reports)
    ranks.order("stop")
    weights = {key: value.clone() for key, value in policy.weights(stored).items()}
    watched = [key for key in WATCHED if key != "tokens/forwarded"]
    metrics = [{key: report.metrics[key] for key in watched if key in report.metrics} for report in reports]
    return found | {"weights": weights, "metrics": metrics}


@torch.no_grad()
def scored(policy: Policy, spec: LearnerSpec) -> list[torch.Tensor]:
    """[2, n] logprobs and entropies of each row of step 0, by a pack of its own."""
    rows = rows_of(0)
    found = []
    for i, row in enumerate(rows):
        if len(row) > BUDGET:
            (pack,) = pack_rows(rows, [i], spec.micro_batch_tokens, [1.0], longest=spec.longest_row)
            assert pack.split == (spec.context_parallel > 1)
            found.append(torch.stack(policy.score(pack)).double().cpu())
    return found


def kept_for_backward(policy: Policy, spec: LearnerSpec, tokens: int) -> int:
    """Bytes that a row's forward keeps on this rank, its weights besides."""
    row = long_row(np.random.default_rng(0), "m", tokens // 2, tokens // 2, 0)
    (pack,) = pack_rows([row], [0], 64 if spec.context_parallel > 1 else 1000, term_weights([row], "token"), longest=1000)
    storages: dict[int, int] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()  # FSDP frees the data of weights, not the storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        loss = policy.score(pack)[0].sum()
    size = sum(storages.values())
    (loss * 0.0).backward()
    policy.model.zero_grad()
    return size


def main(out: Path, context: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    device: Any = os.environ.get("RANKS_DEVICE", "cpu")
    processes = int(os.environ["WORLD_SIZE"])
    ranks = Ranks.join(LearnerSpec(model="-", run_dir="-", lineage="k", device=device, processes=processes, context_parallel=context))
    for name in names:
        found = outcome(name, ranks)
        if ranks.rank == 0:
            torch.save(found, out / f"{name}.pt")
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
