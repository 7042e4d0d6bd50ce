"""What it brings to forward shared prefixes once: one learner step on rollouts that begin alike, against the same rows each by itself.

`python -m harness_rl.bench.prefix_tree MODEL_FOLDER REPORT.md`, in the torch environment. The rows have the shape of the quickstart's: six
tasks, ten rollouts each, a prompt of 147 tokens of which 120 are the same for all, two turns of 36 and 46 sampled tokens with 40 tokens of
tool output between them; half of the rollouts of a group say the same.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from harness_rl.learner.policy import Policy
from harness_rl.learner.prefixtree import PrefixTree, Segment, fold
from harness_rl.learner.spec import LearnerSpec

Ids = NDArray[np.int64]
SYSTEM, PROMPT, FIRST, OUTPUT, SECOND = 120, 147, 36, 40, 46


def rollouts(groups: int = 6, members: int = 10, vocabulary: int = 40_000, seed: int = 0) -> list[Ids]:
    rng = np.random.default_rng(seed)

    def ids(count: int) -> Ids:
        return rng.integers(100, vocabulary, count)

    system, rows = ids(SYSTEM), []
    for _ in range(groups):
        prompt = np.concatenate([system, ids(PROMPT - SYSTEM)])
        usual = np.concatenate([prompt, ids(FIRST + OUTPUT + SECOND)])
        rows += [usual if member % 2 == 0 else np.concatenate([prompt, ids(FIRST + OUTPUT + SECOND)]) for member in range(members)]
    return rows


def side_by_side(rows: list[Ids]) -> PrefixTree:
    """The same rows with nothing shared: one segment each."""
    bounds = np.cumsum([0, *map(len, rows)])
    spans = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    return PrefixTree(
        ids=np.concatenate(rows),
        positions=np.concatenate([np.arange(len(row)) for row in rows]),
        segments=[Segment(start, end, None) for start, end in spans],
        paths=[np.arange(start, end) for start, end in spans],
    )


def seconds(policy: Policy, rows: list[Ids], *, shared: bool) -> tuple[float, int]:
    """(seconds of forward and backward over all rows, tokens forwarded); packs of a few rows each, so that memory stays bounded."""
    sampled = np.r_[PROMPT : PROMPT + FIRST, PROMPT + FIRST + OUTPUT : PROMPT + FIRST + OUTPUT + SECOND]
    packs = [rows] if shared else [rows[i : i + 8] for i in range(0, len(rows), 8)]
    tokens, began = 0, time.perf_counter()
    for pack in packs:
        tree = fold(pack) if shared else side_by_side(pack)
        predicts = np.concatenate([path[sampled - 1] for path in tree.paths])
        targets = np.concatenate([row[sampled] for row in pack])
        logprobs, _ = policy.score_tree(tree, predicts, targets, np.ones(len(targets), dtype=np.float32))
        logprobs.sum().backward()
        tokens += len(tree.ids)
    spent = time.perf_counter() - began
    policy.model.zero_grad(set_to_none=True)
    return spent, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    policy = Policy.load(LearnerSpec(model=str(args.model), run_dir=".", lineage="bench"), args.model)
    rows = rollouts()
    seconds(policy, rows[:4], shared=True)  # warm
    measured = [(seconds(policy, rows, shared=False), seconds(policy, rows, shared=True)) for _ in range(args.rounds)]
    ratios = sorted(plain / tree for (plain, _), (tree, _) in measured)
    plain_tokens, tree_tokens = measured[0][0][1], measured[0][1][1]
    text = (
        "# One learner step with and without prefix sharing\n\n"
        f"{len(rows)} rows, {torch.get_num_threads()} threads, float32, the two in turn, {args.rounds} rounds.\n\n"
        "| | tokens forwarded | seconds (median) |\n| --- | --- | --- |\n"
        f"| each row by itself | {plain_tokens} | {np.median([plain for (plain, _), _ in measured]):.1f} |\n"
        f"| one prefix tree | {tree_tokens} | {np.median([tree for _, (tree, _) in measured]):.1f} |\n\n"
        f"Times faster: {ratios[len(ratios) // 2]:.2f} (of {ratios[0]:.2f} to {ratios[-1]:.2f}).\n"
    )
    args.report.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
