"""Small honest inputs for the learner's tests: traces with real hashes, rows from them, a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from capture_proxy.trace import TrainingTrace, hash_ids, hash_sample
from harness_rl.learner.attention import Branches
from harness_rl.learner.policy import Policy
from harness_rl.learner.prefixtree import fold
from harness_rl.learner.rows import Row, build_rows

VOCABULARY = 97


def turn(
    node_id: str,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    parent: str | None = None,
    logps: Sequence[float] | None = None,
    mask: Sequence[int] | None = None,
    version: str = "k-0",
    versions: Sequence[tuple[str, int, int]] | None = None,
    temperature: float | None = 1.0,
    origin: str = "sampled",
) -> dict[str, Any]:
    """One turn as the proxy writes it; logps default to -1, -1.01, ... so that a shift shows."""
    n = len(completion)
    logps = [-1.0 - 0.01 * i for i in range(n)] if logps is None else list(logps)
    mask = [1] * n if mask is None else list(mask)
    return {
        "node_id": node_id,
        "prompt_token_ids": list(prompt),
        "completion_token_ids": list(completion),
        "per_token_logps": logps,
        "loss_mask": [0] * len(prompt) + mask,
        "request": {},
        "response": {},
        "metadata": {
            "parent": parent,
            "origin": origin,
            "sampling": {} if temperature is None else {"temperature": temperature},
            "weight_versions": [list(v) for v in versions] if versions is not None else [[version, 0, n]],
            "prompt_hash": hash_ids(prompt),
            "completion_hash": hash_ids(completion),
            "sample_hash": hash_sample(completion, logps, mask),
        },
    }


def trace(*turns: dict[str, Any]) -> TrainingTrace:
    return TrainingTrace.model_validate({"schema_version": 1, "turns": list(turns)})


def conversation(
    rng: np.random.Generator, turns: int, prefix: str = "n", version: str = "k-0", start: Sequence[int] | None = None
) -> TrainingTrace:
    """`turns` turns, each prompt = everything before + a short tool result."""
    ids = list(start) if start is not None else rng.integers(0, VOCABULARY, 6).tolist()
    made, parent = [], None
    for t in range(turns):
        completion = rng.integers(0, VOCABULARY, int(rng.integers(2, 7))).tolist()
        logps = (-rng.uniform(0.1, 3.0, len(completion))).astype(np.float32).tolist()
        made.append(turn(f"{prefix}{t}", ids, completion, parent=parent, logps=logps, version=version))
        parent = f"{prefix}{t}"
        ids = ids + completion + rng.integers(0, VOCABULARY, 3).tolist()
    return trace(*made)


def random_rows(seed: int, rollouts: int = 6, turns: int = 3, group_size: int = 3, version: str = "k-0") -> list[Row]:
    """One row a rollout, advantages alternating in sign and size."""
    rng = np.random.default_rng(seed)
    rows = []
    for r in range(rollouts):
        (row,) = build_rows(conversation(rng, turns, version=version), f"r{r}", f"g{r // group_size}")
        row.advantage = float((-1) ** r * (1 + 0.25 * r))
        rows.append(row)
    return rows


def branching_rows(seed: int, rollouts: int = 6, group_size: int = 3) -> list[Row]:
    """As random_rows, but all begin alike, those of a group longer, and tokens are few, so that samples coincide and part anywhere."""
    rng = np.random.default_rng(seed)
    system = rng.integers(1, VOCABULARY, 5).tolist()
    rows = []
    for r in range(rollouts):
        first = [*system, r // group_size, 2]
        said = rng.integers(1, 3, int(rng.integers(1, 6))).tolist()
        second = [*first, *said, 3, 4]
        turns = [turn("n0", first, said), turn("n1", second, rng.integers(1, 3, int(rng.integers(1, 6))).tolist(), parent="n0")]
        (row,) = build_rows(trace(*turns), f"r{r}", f"g{r // group_size}")
        row.advantage = float((-1) ** r * (1 + 0.25 * r))
        rows.append(row)
    return rows


def tiny_llama(seed: int = 0, tied: bool = True, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).float()


def tiny_qwen(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).float()


def tiny_policy(seed: int = 0, **kwargs: Any) -> Policy:
    return Policy.wrap(tiny_llama(seed, **kwargs), torch.float32, chunk=5)


def alone(ids: Sequence[int]) -> Branches:
    """For the model's call with one row: plain causal attention."""
    return Branches.of(fold([np.array(ids)]))


def row_logprobs(model: Any, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Reference [L - 1]: one plain forward of one row, full logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False, branches=alone(ids)).logits[0].float() / temperature
    return torch.log_softmax(logits, -1)[:-1].gather(-1, torch.tensor(list(ids)[1:])[:, None]).squeeze(-1)


def sampled_by(policy: Policy, rows: Sequence[Row]) -> list[Row]:
    """The rows with the logprobs that `policy` itself gives their tokens, hashes taken anew: as an engine with its weights samples."""
    made = []
    for row in rows:
        logprobs = np.array([0.0, *row_logprobs(policy.model, row.ids.tolist(), row.temperature).tolist()], dtype=np.float32)
        spans = []
        for span in row.spans:
            part = slice(span.start, span.end)
            sample = hash_sample(row.ids[part], logprobs[part], row.mask[part])
            spans.append(type(span)(span.node_id, span.start, span.end, span.prompt_hash, span.completion_hash, sample, span.versions))
        logprobs[np.isnan(row.logprobs)] = np.nan
        made.append(
            Row(row.row_id, row.rollout_id, row.group_id, row.ids, logprobs, row.mask, row.stale, row.advantage, row.temperature, spans)
        )
    return made
