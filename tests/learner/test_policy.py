"""Packed forward = row by row; the chunked head = the plain one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_helpers import VOCABULARY, branching_rows, random_rows, row_logprobs, tiny_llama, tiny_policy, tiny_qwen

from harness_rl.learner.attention import Branches, UnsupportedModel, tree_attention
from harness_rl.learner.logprobs import token_logprobs
from harness_rl.learner.metrics import gap_metrics
from harness_rl.learner.packing import pack_rows, term_weights
from harness_rl.learner.policy import Policy
from harness_rl.learner.prefixtree import fold


def pack_of(rows, temperature: float = 1.0):  # type: ignore[no-untyped-def]
    for row in rows:
        row.temperature = temperature
    (pack,) = pack_rows(rows, range(len(rows)), 10_000, term_weights(rows, "token"))
    return pack


@pytest.mark.parametrize("model", [tiny_llama, tiny_qwen, lambda: tiny_llama(tied=False)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("make", [random_rows, branching_rows])
def test_b12_packed_logprobs_are_those_of_each_row_alone(model, temperature: float, make) -> None:  # type: ignore[no-untyped-def]
    rows = make(0)
    pack = pack_of(rows, temperature)
    policy = Policy.wrap(model(), torch.float32, chunk=7)
    logprobs, _ = policy.score(pack)
    at = 0
    for i in pack.rows:
        expected = row_logprobs(policy.model, rows[i].ids.tolist(), temperature)[np.flatnonzero(rows[i].trained) - 1]
        torch.testing.assert_close(logprobs[at : at + len(expected)].detach(), expected, atol=2e-6, rtol=1e-5)
        at += len(expected)


@pytest.mark.parametrize("make", [random_rows, branching_rows])
def test_packed_gradients_are_the_sum_of_each_row_alone(make) -> None:  # type: ignore[no-untyped-def]
    rows = make(1)
    policy = tiny_policy()
    policy.score(pack_of(rows))[0].sum().backward()
    packed = {n: p.grad.clone() for n, p in policy.model.named_parameters()}
    policy.model.zero_grad()
    for row in rows:
        policy.score(pack_of([row]))[0].sum().backward()
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, atol=1e-5, rtol=1e-4)


def test_d03_the_next_row_does_not_reach_this_one() -> None:
    rows = random_rows(2, rollouts=2)
    pack = pack_of(rows)
    policy = tiny_policy()
    first, second = int(pack.term_bounds[1]), pack.tree.paths[1][0]
    before = policy.score(pack)[0].detach()
    pack.tree.ids[second] = (pack.tree.ids[second] + 1) % VOCABULARY
    after = policy.score(pack)[0].detach()
    assert torch.equal(before[:first], after[:first]) and not torch.equal(before[first:], after[first:])


def test_gradient_checkpointing_changes_nothing() -> None:
    pack = pack_of(random_rows(3))
    grads = []
    for flag in (False, True):
        policy = Policy.wrap(tiny_llama(), torch.float32, chunk=5, gradient_checkpointing=flag)
        policy.score(pack)[0].sum().backward()
        grads.append([p.grad for p in policy.model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_score_prompts() -> None:
    policy = tiny_policy()
    prompts = [np.array(p, dtype=np.int32) for p in ([1, 2, 3], [4, 5], [1, 2, 8, 9, 10])]
    for prompt, scored in zip(prompts, policy.score_prompts(prompts), strict=True):
        np.testing.assert_allclose(scored, row_logprobs(policy.model, prompt.tolist()), atol=2e-6)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunked_head_equals_the_plain_one_with_its_gradients(chunk: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 6, dtype=torch.float64).float(), torch.randn(23, 6)
    predicts = torch.tensor([3, 0, 3, 3, 10, 7, 7, 9, 2, 3, 0, 5, 6])  # out of order, some states with several terms, some with none
    targets, temperatures = torch.randint(0, 23, (13,)), (torch.arange(13) % 2) / 2 + 0.7
    targets[2] = targets[0]  # the same term twice: both rows sampled the same token there
    upstream = torch.randn(13)
    results = []
    for plain in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if plain:
            full = torch.log_softmax(h[predicts] @ w.T / temperatures[:, None], -1)
            logprobs, entropy = full.gather(-1, targets[:, None]).squeeze(-1), -(full.exp() * full).sum(-1)
        else:
            logprobs, entropy = token_logprobs(h, w, predicts, targets, temperatures, chunk=chunk)
        (logprobs * upstream).sum().backward()
        results.append((logprobs.detach(), entropy.detach(), h.grad, w.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


def test_chunked_head_gradient_by_finite_differences() -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    targets, temperatures = torch.tensor([0, 6, 2, 2]), torch.tensor([1.0, 0.7, 1.3, 1.0])
    upstream = torch.tensor([1.0, -0.5, 0.25, 2.0])

    def value() -> torch.Tensor:
        return (token_logprobs(hidden, weight, torch.arange(4), targets, temperatures, chunk=2)[0] * upstream).sum()

    value().backward()
    for tensor in (hidden, weight):
        for index in np.ndindex(*tensor.shape):
            with torch.no_grad():
                kept, step = tensor[index].item(), 1e-2
                tensor[index] = kept + step
                up = value().item()
                tensor[index] = kept - step
                down = value().item()
                tensor[index] = kept
            assert tensor.grad[index].item() == pytest.approx((up - down) / (2 * step), abs=2e-3)


def test_the_head_never_holds_all_logits() -> None:
    sizes: list[int] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with Spy():
        token_logprobs(hidden, weight, torch.arange(64), torch.zeros(64, dtype=torch.long), torch.ones(64), chunk=8)[0].sum().backward()
    assert max(sizes) <= 8 * 1000


def test_sliding_window_rows_match_a_banded_mask() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    out, _ = tree_attention(
        torch.nn.Identity(), q, k, v, None, branches=Branches.of(fold([np.arange(1, 7), np.array([9, 9, 9])])), sliding_window=3
    )
    for start, end in ((0, 6), (6, 9)):
        at = torch.arange(end - start)
        band = (at[:, None] >= at) & (at[:, None] - at < 3)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, start:end], *(t[:, :, start:end].repeat_interleave(2, 1) for t in (k, v)), attn_mask=band
        )
        torch.testing.assert_close(out[:, start:end], expected.transpose(1, 2))


@pytest.mark.parametrize("window", [None, 4])
def test_a_branch_sees_its_own_path_alone(window: int | None) -> None:
    """Against one dense mask over the whole tree: attended = on the way from the root, and within the window."""
    torch.manual_seed(0)
    sequences = [np.array(s) for s in ([5, 6, 7, 8, 9], [5, 6, 7, 1], [5, 6, 2, 2, 2, 2], [5, 6, 7, 8], [3, 3])]
    tree = fold(sequences)
    count = len(tree.ids)
    q, k, v = torch.randn(1, 4, count, 8), torch.randn(1, 2, count, 8), torch.randn(1, 2, count, 8)
    dense = torch.zeros(count, count, dtype=torch.bool)
    for path in tree.paths:
        for depth, at in enumerate(path):
            dense[at, path[max(0, depth + 1 - (window or count)) : depth + 1]] = True
    expected = torch.nn.functional.scaled_dot_product_attention(q, *(t.repeat_interleave(2, 1) for t in (k, v)), attn_mask=dense)
    out, _ = tree_attention(torch.nn.Identity(), q, k, v, None, branches=Branches.of(tree), sliding_window=window)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_what_packed_rows_cannot_compute_is_refused_by_name() -> None:
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(UnsupportedModel, match="soft-capping"):
        tree_attention(torch.nn.Identity(), q, q, q, None, branches=Branches.of(fold([np.arange(3)])), softcap=30.0)
    with pytest.raises(ValueError, match="branches"):
        tree_attention(torch.nn.Identity(), q, q, q, None)
    model = tiny_llama()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(UnsupportedModel, match="final_logit_softcapping"):
        Policy.wrap(model, torch.float32)


def test_bfloat16_forward_keeps_float32_parameters_and_is_near() -> None:
    pack = pack_of(random_rows(4))
    exact = tiny_policy().score(pack)[0].detach()
    policy = Policy.wrap(tiny_llama(), torch.bfloat16, chunk=5)
    rounded, _ = policy.score(pack)
    rounded.sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.model.parameters())
    gap = (rounded.detach() - exact).abs()
    assert rounded.dtype == torch.float32 and 0 < gap.mean() < 0.05


def test_d19_in_bfloat16_the_spread_is_reported_where_the_mean_hides_it() -> None:
    """The same weights and tokens, in bfloat16 packs and in float32 row by row: the signed mean is next to nothing, the spread is not."""
    rows = random_rows(5, rollouts=8)
    policy = Policy.wrap(tiny_llama(), torch.bfloat16, chunk=8)
    packed = policy.score(pack_of(rows))[0].detach()
    single = torch.cat(
        [Policy.wrap(tiny_llama(), torch.float32, chunk=1).score(pack_of([rows[i]]))[0].detach() for i in pack_of(rows).rows]
    )
    gap = gap_metrics("gap", packed.numpy(), single.numpy())
    assert abs(float((packed - single).mean())) < 0.3 * gap["gap/mean"]
    assert gap["gap/p99"] > 2 * gap["gap/mean"] > 0 and gap["gap/max"] >= gap["gap/p99"]
