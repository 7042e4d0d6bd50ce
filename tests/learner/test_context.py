"""A row over several ranks gives what it gives on one: weights, metrics and every token's logprob, with a share of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from context_script import CASES, STEPS, long_row, outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_helpers import branching_rows
from test_ranks import run_ranks
from tiny_models import SINKS, STATES, WINDOWS, made
from torch.distributed.tensor.experimental._context_parallel import _attention, _load_balancer

from harness_rl.errors import UserError
from harness_rl.learner import context
from harness_rl.learner.attention import UnsupportedModel
from harness_rl.learner.packing import Pack, pack_rows, term_weights
from harness_rl.learner.ranks import Ranks
from harness_rl.learner.update import empty_packs, in_order, share

SCRIPT = Path(__file__).parent / "context_script.py"
CPU = torch.device("cpu")
SHORT = ("tied", "recomputed", "drawn")
TOLERANCE = {"bfloat16": 3e-2}


@pytest.fixture(scope="module", params=[(2, 2), *(pytest.param(sizes, marks=pytest.mark.full) for sizes in ((4, 2), (4, 4)))], ids=str)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case, by so many ranks in groups of so many."""
    ranks, size = request.param
    out = tmp_path_factory.mktemp("context")
    names = [name for name in CASES if name in SHORT or ranks > 2]
    run_ranks(ranks, out, [str(size), *names], SCRIPT)
    return {"size": size, **{name: torch.load(out / f"{name}.pt") for name in names}}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_as_one_rank(found: dict[str, Any], name: str) -> None:
    if name not in found:
        pytest.skip(f"{name} runs with four ranks, in the full tier")
    ours, theirs, tolerance = found[name], outcome(name), TOLERANCE.get(name, 1e-9)
    largest = max(float(weight.abs().max()) for weight in theirs["weights"].values())
    assert ours["weights"].keys() == theirs["weights"].keys()
    for key, weight in theirs["weights"].items():
        assert float((ours["weights"][key] - weight).abs().max()) <= tolerance * largest, key
    assert len(ours["metrics"]) == STEPS
    for one, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert one == pytest.approx(other, rel=max(tolerance, 1e-5), abs=max(tolerance, 1e-7))
    for one, other in zip(ours["scores"], theirs["scores"], strict=True):
        assert one.shape == other.shape and float((one - other).abs().max()) <= 20 * tolerance
    # What 96 tokens more make each rank keep for backward, against what they make one keep.
    assert all(0.5 * theirs["kept"][0] < kept * found["size"] < 1.1 * theirs["kept"][0] for kept in ours["kept"])


def one_pack(tokens: int, seed: int = 0) -> Pack:
    row = long_row(np.random.default_rng(seed), "r", max(1, tokens // 3), tokens - max(1, tokens // 3), 0)
    (pack,) = pack_rows([row], [0], 1, term_weights([row], "token"), longest=tokens)
    assert pack.split
    return pack


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(2, 70), size=st.integers(1, 5))
def test_the_pieces_are_the_row_and_its_terms_once_each(tokens: int, size: int) -> None:
    pack = one_pack(tokens)
    pieces = [context.Piece.of(pack, rank, size) for rank in range(size)]
    assert len({len(piece.ids) for piece in pieces}) == 1 and len(pieces[0].ids) * size < tokens + 2 * size
    seen = {}
    for rank, piece in enumerate(pieces):
        for place, position, token in zip(context.head_and_tail(tokens, rank, size), piece.positions, piece.ids, strict=True):
            assert place not in seen
            seen[int(place)] = (int(position), int(token))
    assert sorted(seen) == list(range(len(pieces[0].ids) * size))
    assert [seen[place] for place in range(tokens)] == list(enumerate(pack.tree.ids.tolist()))
    assert sorted(np.concatenate([piece.terms for piece in pieces])) == list(range(pack.terms))
    for piece in pieces:
        assert np.array_equal(piece.positions[piece.predicts], pack.sampled[piece.terms] - 1)


def test_a_pack_of_several_rows_has_no_pieces() -> None:
    rows = branching_rows(0, rollouts=2)
    (pack,) = pack_rows(rows, [0, 1], 100, [0.5, 0.5])
    with pytest.raises(ValueError, match="a pack of 2 rows is not split"):
        context.Piece.of(pack, 0, 2)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_pieces_lie_as_torchs_ring_takes_them(size: int) -> None:
    places = _load_balancer._HeadTailLoadBalancer(4 * size, size, "cpu")._generate_indices().flatten()
    assert [context.head_and_tail(4 * size, rank, size).tolist() for rank in range(size)] == [p.tolist() for p in places.chunk(size)]


@settings(max_examples=40, deadline=None)
@given(long=st.integers(0, 5), short=st.integers(0, 9), groups=st.integers(1, 3), size=st.integers(1, 4))
def test_packs_are_dealt_once_and_a_split_one_to_its_whole_group_at_one_time(long: int, short: int, groups: int, size: int) -> None:
    packs = [one_pack(9, seed) for seed in range(long)]
    others = branching_rows(0, rollouts=max(short, 1))
    packs += [pack_rows(others, [i], 100, [1.0])[0] for i in range(short)]
    ranks = [Ranks(rank, groups * size, context_size=size) for rank in range(groups * size)]
    shares = [share(packs, rank) for rank in ranks]
    assert len({len(of_rank) for of_rank in shares}) == 1

    def tells(rank: Ranks, pack: Pack) -> bool:
        return bool(pack.rows) and not (pack.split and rank.context_rank)

    told = [[pack if tells(rank, pack) else None for pack in of_rank] for rank, of_rank in zip(ranks, shares, strict=True)]
    assert in_order(told) == packs  # type: ignore[arg-type, comparison-overlap]
    for of_round in zip(*shares, strict=True):
        for g in range(groups):
            together = of_round[g * size : (g + 1) * size]
            assert len({id(pack) for pack in together}) == 1 or not any(pack.split for pack in together)
    assert sum(not pack.rows for of_rank in shares for pack in of_rank) == empty_packs(packs, ranks[0])


@pytest.mark.parametrize(
    ("kinds", "named"),
    [(WINDOWS, "sliding windows"), (SINKS, "sliding windows|attention sinks"), (STATES, "layers that carry a state")],
)
def test_what_the_ring_would_compute_wrongly_is_refused_by_name(kinds: tuple[str, ...], named: str) -> None:
    for kind in kinds:
        with pytest.raises(UnsupportedModel, match=f"context_parallel = 2: ({named})"):
            context.check(made(kind), torch.float32, CPU, 2)
    for kind in ("llama", "llama_untied", "qwen3"):
        context.check(made(kind), torch.float32, CPU, 2)


def test_sinks_positions_by_length_and_float32_on_a_gpu_are_refused_by_name() -> None:
    model = made("gpt_oss", layer_types=["full_attention", "full_attention"], sliding_window=None)
    with pytest.raises(UnsupportedModel, match="attention sinks"):
        context.check(model, torch.float32, CPU, 2)
    model = made("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0})
    with pytest.raises(UnsupportedModel, match="dynamic positions"):
        context.check(model, torch.float32, CPU, 2)
    with pytest.raises(UnsupportedModel, match=r"no torch.float32; set learner.dtype = bfloat16"):
        context.check(made("llama"), torch.float32, torch.device("cuda"), 2)
    context.check(made("llama"), torch.bfloat16, torch.device("cuda"), 2)


def test_another_torch_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    context.ring_of_torch()
    with monkeypatch.context() as patch:
        patch.delattr(_attention, "_templated_ring_attention_backward")
        with pytest.raises(UserError, match=r"_templated_ring_attention_backward.*or set learner.context_parallel = 1$") as caught:
            context.ring_of_torch()
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(_attention, "_templated_ring_attention", lambda group, query, key, value: None)
    with pytest.raises(UserError, match=r"is now \('group', 'query', 'key', 'value'\)"):
        context.ring_of_torch()


def test_the_kernels_of_a_gpu_take_what_they_are_given() -> None:
    """Shapes only, by torch's own descriptions of its operators: half of the queries, all keys, two heads to each head of keys."""
    query = torch.empty(1, 4, 8, 16, device="meta", dtype=torch.bfloat16)
    key, value = (torch.empty(1, 2, 16, 16, device="meta", dtype=torch.bfloat16) for _ in range(2))
    out, log_sums, *rest = context._forward(query, key, value, is_causal=False, scale=0.3)
    assert out.shape == query.shape and log_sums.shape == (1, 4, 8)
    of_op = {"is_causal": False, "scale": 0.3, "rest": rest}
    found = context._backward(grad_out=out, query=query, key=key, value=value, out=out, logsumexp=log_sums, **of_op)
    assert [grad.shape for grad in found] == [query.shape, key.shape, value.shape]
