"""Packing changes nothing: tree rows, plain packs and one row at a time are the same loss, gradient and training.

The reference is each row alone, with full logits and plain autograd: in float32 by transformers' own eager attention; in float64, where
that one still takes its softmax in float32, by an attention written out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import VOCABULARY, branching_rows, random_rows
from tiny_models import SINKS, STATES, WINDOWS, in_float64, made
from transformers import AttentionInterface

from harness_rl.bench.learner_ways import Sizes, rollouts
from harness_rl.learner import attention
from harness_rl.learner import step as step_module
from harness_rl.learner.attention import UnsupportedModel
from harness_rl.learner.packing import Pack, pack_rows, term_weights
from harness_rl.learner.policy import Policy
from harness_rl.learner.recurrent import prove_isolation
from harness_rl.learner.rows import Row
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
ATTENTION = ("llama", "llama_untied", "qwen3", *WINDOWS, *SINKS)


def mixed_rows(seed: int) -> list[Row]:
    """Rows that share prefixes of many depths, and rows that share nothing, at two temperatures."""
    rows = [*branching_rows(seed, rollouts=7), *random_rows(seed + 1, rollouts=2)]
    for i, row in enumerate(rows):
        row.row_id, row.rollout_id = f"{row.row_id}-{i}", f"r{i}"
        row.temperature = 1.0 if i % 2 else 0.75  # exact in any dtype
    return rows


def dense_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, sliding_window: int | None = None, s_aux: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention of one row, written out: [1, H, T, D] -> [1, T, H, D]."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    at = torch.arange(length)
    distance = at[:, None] - at[None, :]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    scores = scores.masked_fill((distance < 0) | (distance >= (sliding_window or length)), -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[None, :, None, None].expand(1, -1, length, 1)], -1)
    weights = torch.softmax(scores, -1)[..., :length]
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None


def reference(model: Any, rows: Sequence[Row]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(loss, gradients) of -sum of A log pi over the trained tokens, row by row, without anything of ours."""
    dtype = next(model.parameters()).dtype
    AttentionInterface.register("tests_dense", dense_attention)
    model.set_attn_implementation("tests_dense" if dtype == torch.float64 else "eager")
    model.eval()
    loss = torch.zeros((), dtype=dtype)
    for row in rows:
        logits = model(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None], use_cache=False).logits[0] / row.temperature
        at = np.flatnonzero(row.trained)
        logprobs = torch.log_softmax(logits[at - 1], -1).gather(-1, torch.from_numpy(row.ids[at].astype(np.int64))[:, None])
        loss = loss - (logprobs.squeeze(-1) * torch.from_numpy(row.credit[at])).sum()
    loss.backward()
    found = loss.detach(), [_grad(p) for p in model.parameters()]
    model.zero_grad()
    return found


def ours(policy: Policy, packs: Sequence[Pack]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    policy.model.zero_grad()
    loss = sum(-(policy.score(pack)[0] * torch.from_numpy(pack.advantages)).sum() for pack in packs)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return loss.detach(), [_grad(p) for p in policy.model.parameters()]


def _grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def packed(policy: Policy, rows: Sequence[Row], budget: int = 10_000) -> list[Pack]:
    return pack_rows(rows, range(len(rows)), budget, term_weights(rows, "token"), policy.shares_prefixes)


def assert_equal(
    found: tuple[torch.Tensor, list[torch.Tensor]], expected: tuple[torch.Tensor, list[torch.Tensor]], relative: float
) -> None:
    """Each tensor to `relative` of the largest entry of all: a gradient's small entries are sums of its large ones."""
    assert abs(found[0] - expected[0]) <= relative * abs(expected[0])
    largest = max(float(g.abs().max()) for g in expected[1])
    for a, b in zip(found[1], expected[1], strict=True):
        assert float((a - b).abs().max()) <= relative * largest


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ATTENTION)
def test_tree_rows_in_float64_to_1e_9(kind: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels of a CPU, and as where backward computes each segment's attention again."""
    if not fused:
        monkeypatch.setattr(attention, "_fused", lambda *_: False)
    rows = mixed_rows(0)
    model = in_float64(made(kind))
    expected = reference(model, rows)
    policy = Policy.wrap(model, torch.float64, chunk=7)
    packs = packed(policy, rows)
    assert policy.shares_prefixes and sum(pack.tokens for pack in packs) < sum(map(len, rows))  # something is shared
    assert_equal(ours(policy, packs), expected, 1e-9)


@pytest.mark.parametrize("kind", ATTENTION)
def test_tree_rows_in_float32_to_1e_5(kind: str) -> None:
    rows, model = mixed_rows(2), made(kind)
    expected = reference(model, rows)
    policy = Policy.wrap(model, torch.float32, chunk=7)
    assert_equal(ours(policy, packed(policy, rows, 60)), expected, 1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_kept_for_backward_grows_with_the_tree_and_not_with_its_paths(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """10, 20 and 40 turns, each of which drops the thinking of the one before: tokens double, their repetitions grow fourfold."""
    if not fused:
        monkeypatch.setattr(attention, "_fused", lambda *_: False)
    policy = Policy.wrap(made("llama"), torch.float32)
    kept, tokens, repeated = [], [], []
    for turns in (10, 20, 40):
        rows = rollouts("forked", Sizes(prompt=0, own=0, turns=turns, thought=3, said=2, output=2), VOCABULARY)
        (pack,) = pack_rows(rows, range(turns), 10_000, [1.0] * turns)
        storages: dict[int, int] = {}

        def see(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
            held = policy.score(pack)[0]
        kept.append(sum(size for at, size in storages.items() if at not in weights))
        tokens.append(pack.tokens)
        repeated.append(sum(map(len, rows)))
        del held
    assert repeated[2] > 3.5 * repeated[1] and tokens[2] < 2.1 * tokens[1]
    assert kept[2] - kept[1] < 1.05 * (kept[1] - kept[0]) * (tokens[2] - tokens[1]) / (tokens[1] - tokens[0])


@pytest.mark.parametrize("kind", STATES)
def test_layers_with_a_state_are_packed_side_by_side_and_begin_anew_at_each_row(kind: str) -> None:
    """Their float32 parts (norms, decays) stay float32 in a float64 model, so float32 is the bar."""
    rows = mixed_rows(4)
    model = made(kind)
    expected = reference(model, rows)
    policy = Policy.wrap(model, torch.float32, chunk=7)
    packs = packed(policy, rows)
    assert not policy.shares_prefixes and len(packs) == 1 and packs[0].tokens == sum(map(len, rows))
    assert_equal(ours(policy, packs), expected, 1e-5)


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "lfm2"])
def test_gradient_checkpointing_runs_such_layers_on_the_same_rows_again(kind: str) -> None:
    rows = mixed_rows(5)
    model = made(kind)
    expected = reference(model, rows)
    policy = Policy.wrap(model, torch.float32, chunk=7, gradient_checkpointing=True)
    assert_equal(ours(policy, packed(policy, rows)), expected, 1e-5)


def test_a_model_whose_state_is_not_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.wrap(made("mamba2"), torch.float32)
    prove_isolation(policy)
    assert policy._borders is not None
    monkeypatch.setattr(type(policy._borders), "_split", lambda self, forward: forward)  # the layers see the whole pack
    with pytest.raises(UnsupportedModel, match="a row changes the logprobs of another"):
        Policy.wrap(made("mamba2"), torch.float32)


def test_unknown_kinds_of_attention_are_refused_by_name() -> None:
    model = made("llama")
    model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        Policy.wrap(model, torch.float32)


def one_at_a_time(rows: Any, chosen: Any, budget: int, weights: Any, share: bool, _: int) -> list[Pack]:
    return [pack_rows(rows, [i], budget, [w], share)[0] for i, w in zip(chosen, weights, strict=True)]


def trained(model: Any, dtype: torch.dtype, steps: int = 5, **spec: Any) -> list[torch.Tensor]:
    t = Trainer(
        Policy.wrap(model, dtype, chunk=7),
        LearnerSpec(model="-", run_dir="-", lineage="k", learning_rate=1e-3, micro_batch_tokens=80, **spec),
    )
    for step in range(steps):
        assert t.step(mixed_rows(10 + step), f"k-{step}").updated
    return [p.detach().clone() for p in t.updater.parameters]


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "qwen3_next"])
def test_five_steps_give_the_same_parameters(kind: str, dtype: torch.dtype, bar: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tree, as plain packs, and one row at a time. In float32, an epsilon above rounding keeps Adam from dividing noise by noise."""
    if kind == "qwen3_next" and dtype == torch.float64:
        pytest.skip("its decays are float32 in any model")
    more = {"adam_epsilon": 1e-3} if dtype == torch.float32 else {}

    def run(**spec: Any) -> list[torch.Tensor]:
        return trained(in_float64(made(kind)) if dtype == torch.float64 else made(kind), dtype, **(more | spec))

    tree, plain = run(), run(packing="plain")
    monkeypatch.setattr(step_module, "pack_rows", one_at_a_time)
    single = run(packing="plain")
    start = [p.detach() for p in made(kind).to(dtype).parameters()]
    moved = max(float((a - b).abs().max()) for a, b in zip(single, start, strict=True))
    largest = max(float(a.abs().max()) for a in single)
    assert moved > (1e-3 if dtype == torch.float64 else 1e-4)
    for other in (tree, plain):
        worst = max(float((a - b).abs().max()) for a, b in zip(other, single, strict=True))
        assert worst <= bar * largest and worst <= 1e-2 * moved
