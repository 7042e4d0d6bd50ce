from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from harness_rl.errors import UserError
from harness_rl.learner.optimizers import build_optimizer, set_rate
from harness_rl.learner.spec import LearnerSpec


def spec_of(**more: Any) -> LearnerSpec:
    return LearnerSpec(model="-", run_dir="-", lineage="k", **more)


def test_weights_decay_in_matrices_only() -> None:
    """With gradient 0 AdamW multiplies by 1 - rate * decay, and nothing else."""
    matrix, norm = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    for parameter in (matrix, norm):
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer([matrix, norm], spec_of(learning_rate=0.5, weight_decay=0.1)).step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95)) and torch.equal(norm, torch.ones(2))


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)])
def test_a_rate_is_set_in_place_where_it_is_a_tensor(rate: Any) -> None:
    """As torchao's optimizers want it: they refuse a rate that has become a number."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=rate)
    before = optimizer.param_groups[0]["lr"]
    set_rate(optimizer, 0.25)
    assert type(optimizer.param_groups[0]["lr"]) is type(before) and (not isinstance(before, torch.Tensor) or float(before) == 0.25)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert float(weight.detach()) == -0.25


def test_what_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(
        UserError, match=r"learner.optimizer = adamw_8bit needs torchao, which is not installed; pip install torchao, or use"
    ):
        build_optimizer([torch.nn.Parameter(torch.ones(2))], spec_of(optimizer="adamw_8bit"))


def test_activations_are_offloaded_with_checkpointing_only() -> None:
    with pytest.raises(UserError, match="offload_activations moves what gradient_checkpointing keeps; set gradient_checkpointing too"):
        spec_of(offload_activations=True)
