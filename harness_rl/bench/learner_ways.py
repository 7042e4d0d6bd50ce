"""One measurement of `bench.learner`, in a process of its own so that its peak memory is its own: one load, one way to forward it.

`python -m harness_rl.bench.learner_ways MODEL LOAD WAY SIZES` prints one JSON line. The ways take the same rows, score the same sampled
tokens and back-propagate the same sum; they differ in what they forward:

- padded: a rectangle of rows, the shorter ones filled up, with transformers' own attention;
- plain: rows side by side, nothing filled, nothing shared;
- tree: rows folded into a prefix tree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from harness_rl.learner.logprobs import token_logprobs
from harness_rl.learner.packing import Pack, pack_rows
from harness_rl.learner.policy import Policy
from harness_rl.learner.prefixtree import PrefixTree, shared_prefix
from harness_rl.learner.ranks import Ranks
from harness_rl.learner.rows import Row
from harness_rl.learner.spec import LearnerSpec

Ids = NDArray[np.int32]
Way = Literal["padded", "plain", "tree"]


@dataclass(frozen=True)
class Sizes:
    """In tokens."""

    prompt: int
    own: int
    """Of each of 8 rollouts of (a); (c) has rows of `prompt + own` that share nothing."""
    turns: int
    """Of (b): at each the agent has dropped what the model thought at the one before."""
    thought: int = 24
    said: int = 16
    output: int = 20
    groups: int = 6
    """Of (d): a step of the quickstart's."""
    members: int = 10
    budget: int = 0
    """Of one forward; 0 = the longest row, and what a prefix tree of all rows needs."""


@dataclass
class Measured:
    load: str
    way: str
    seconds: float
    """Of forward and backward over all rows, the median of the rounds."""
    packing: float
    forwarded: int
    """Tokens, filling included."""
    trained: int
    peak_bytes: int
    """Above what was held before the first forward."""
    flops: float
    total: float
    """Sum of the logprobs: the same for every way."""


def rollouts(load: str, sizes: Sizes, vocabulary: int) -> list[Row]:
    """The rows of a load, each with the mask of its sampled tokens."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> Ids:
        return rng.integers(10, vocabulary, count).astype(np.int32)

    if load == "shared":
        prompt = ids(sizes.prompt)
        return [_row(n, np.concatenate([prompt, ids(sizes.own)]), sizes.prompt) for n in range(8)]
    if load == "apart":
        return [_row(n, ids(sizes.prompt + sizes.own), sizes.prompt) for n in range(8)]
    if load == "quickstart":
        return _quickstart(sizes, ids)
    history, rows = ids(sizes.output), []
    for n in range(sizes.turns):
        answer = ids(sizes.said)
        rows.append(_row(n, np.concatenate([history, ids(sizes.thought), answer]), len(history)))
        history = np.concatenate([history, answer, ids(sizes.output)])
    return rows


QUICKSTART_SYSTEM, QUICKSTART_TASK, QUICKSTART_TURNS, QUICKSTART_OUTPUT = 120, 27, (36, 46), 40
"""Tokens of the quickstart's rollouts: what begins all prompts, what is a task's own, what is sampled in two turns and what a tool says
between them."""


def _quickstart(sizes: Sizes, ids: Callable[[int], Ids]) -> list[Row]:
    """Groups of rollouts with one prompt each; half of a group say the same."""
    first, second = QUICKSTART_TURNS
    rows: list[Row] = []
    system = ids(QUICKSTART_SYSTEM)
    for _ in range(sizes.groups):
        prompt = np.concatenate([system, ids(QUICKSTART_TASK)])
        usual = ids(first + QUICKSTART_OUTPUT + second)
        for member in range(sizes.members):
            said = usual if member % 2 == 0 else ids(len(usual))
            row = _row(len(rows), np.concatenate([prompt, said]), len(prompt))
            row.mask[len(prompt) + first : len(prompt) + first + QUICKSTART_OUTPUT] = 0
            rows.append(row)
    return rows


def _row(n: int, ids: Ids, start: int) -> Row:
    mask, none = np.zeros(len(ids), dtype=np.uint8), np.zeros(len(ids), dtype=np.uint8)
    mask[start:] = 1
    return Row(f"r{n}", f"r{n}", "g", ids, np.full(len(ids), -1.0, dtype=np.float32), mask, none, 1.0, 1.0)


def flops(model: Any, pairs: float, tokens: float, terms: float) -> float:
    """Of forward and backward: 6 a weight and token, 12 a query-key pair and unit of width, 8 a head weight and term (whose logits are
    computed twice)."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight.numel()
    embedding = model.get_input_embeddings().weight
    outer = {id(p): p.numel() for p in (embedding, model.get_output_embeddings().weight)}
    layers = sum(p.numel() for p in model.parameters()) - sum(outer.values())
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return 6.0 * layers * tokens + 12.0 * width * config.num_hidden_layers * pairs + 8.0 * head * terms


def tree_pairs(tree: PrefixTree) -> float:
    """Query-key pairs of causal attention along its branches."""
    lengths = ((s.end - s.start, len(tree.context(n))) for n, s in enumerate(tree.segments))
    return float(sum(length * before + length * (length + 1) / 2 for length, before in lengths))


def tree_ways(policy: Policy, rows: list[Row], budget: int, share: bool) -> tuple[Callable[[], float], float, int, float]:
    """(one round, seconds of packing, tokens, FLOPs)."""
    began = time.perf_counter()
    packs = pack_rows(rows, range(len(rows)), budget, [1.0] * len(rows), share)
    packing = time.perf_counter() - began

    def once() -> float:
        return sum(_backward(policy.score(pack)[0]) for pack in packs)

    def states(pack: Pack) -> int:
        return len(np.unique(pack.predicts))

    cost = sum(flops(policy.model, tree_pairs(pack.tree), pack.tokens, states(pack)) for pack in packs)
    return once, packing, sum(pack.tokens for pack in packs), cost


def padded_way(policy: Policy, rows: list[Row], budget: int) -> tuple[Callable[[], float], float, int, float]:
    began = time.perf_counter()
    longest = max(len(row) for row in rows)
    size = max(1, budget // longest)
    chunks = [rows[at : at + size] for at in range(0, len(rows), size)]
    batches = []
    for chunk in chunks:
        ids, seen = np.zeros((len(chunk), longest), dtype=np.int64), np.zeros((len(chunk), longest), dtype=np.int64)
        for n, row in enumerate(chunk):
            ids[n, : len(row)], seen[n, : len(row)] = row.ids, 1
        predicts = np.concatenate([n * longest + np.flatnonzero(row.mask) - 1 for n, row in enumerate(chunk)])
        targets = np.concatenate([row.ids[row.mask == 1] for row in chunk]).astype(np.int64)
        batches.append([torch.from_numpy(array).to(policy.device) for array in (ids, seen, predicts, targets)])
    packing = time.perf_counter() - began
    policy.model.set_attn_implementation("sdpa")

    def once() -> float:
        total = 0.0
        for ids, seen, predicts, targets in batches:
            lower = policy.dtype == torch.bfloat16
            with torch.autocast(policy.device.type, dtype=policy.dtype, enabled=lower):
                hidden = policy.model.base_model(input_ids=ids, attention_mask=seen, use_cache=False).last_hidden_state
            weight, ones = policy.model.get_output_embeddings().weight, torch.ones(len(targets), device=policy.device)
            total += _backward(token_logprobs(hidden.flatten(0, 1), weight, predicts, targets, ones, dtype=policy.dtype)[0])
        return total

    tokens, terms = longest * len(rows), sum(int(row.mask.sum()) for row in rows)
    return once, packing, tokens, flops(policy.model, len(rows) * longest * (longest + 1) / 2, tokens, terms)


def _backward(logprobs: torch.Tensor) -> float:
    logprobs.sum().backward()
    return float(logprobs.detach().sum(dtype=torch.float64))


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(model: Path, load: str, way: Way, sizes: Sizes, rounds: int) -> Measured:
    spec = LearnerSpec(model=str(model), run_dir="-", lineage="bench")
    policy = Policy.load(spec, model, Ranks.join(spec, {}))
    rows = rollouts(load, sizes, int(policy.model.config.get_text_config().vocab_size))
    longest = max(len(row) for row in rows)
    unique = longest + sum(len(row) - shared_prefix(before.ids, row.ids) for before, row in pairwise(rows))
    budget = sizes.budget or max(longest, unique)
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # held by every way alike
    before = peak_bytes(policy.device)
    once, packing, tokens, cost = padded_way(policy, rows, budget) if way == "padded" else tree_ways(policy, rows, budget, way == "tree")
    total = once()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        once()
        if policy.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    trained = sum(int(row.mask.sum()) for row in rows)
    peak = peak_bytes(policy.device) - before
    return Measured(load, way, statistics.median(seconds), packing, tokens, trained, peak, cost, total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("load", choices=("shared", "forked", "apart", "quickstart"))
    parser.add_argument("way", choices=get_args(Way))
    parser.add_argument("sizes", type=json.loads, help="fields of Sizes, as JSON")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(asdict(measure(args.model, args.load, args.way, Sizes(**args.sizes), args.rounds))))


if __name__ == "__main__":
    main()
