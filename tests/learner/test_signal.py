"""The gradient's share of signal: against the pairs written out, on known signal and noise, and in a trainer's steps."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_helpers import random_rows, sampled_by, tiny_policy

from harness_rl.learner.signal import SignalShare
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Trainer


def observed(gradients: np.ndarray, beta: float) -> SignalShare:
    share, moment = SignalShare(beta), np.zeros(gradients.shape[1])
    for gradient in gradients:
        share.observe(float(moment @ gradient), float(gradient @ gradient))
        moment = beta * moment + (1 - beta) * gradient
    return share


@given(st.integers(0, 10_000), st.integers(2, 12), st.floats(0.1, 0.95))
def test_the_recursion_is_the_weighted_mean_over_pairs(seed: int, updates: int, beta: float) -> None:
    gradients = np.random.default_rng(seed).normal(0.5, 1.0, (updates, 5))
    weights = beta ** np.arange(updates)[::-1]
    pairs = list(itertools.combinations(range(updates), 2))
    product = sum(weights[i] * weights[j] * gradients[i] @ gradients[j] for i, j in pairs) / sum(weights[i] * weights[j] for i, j in pairs)
    square = np.average((gradients**2).sum(1), weights=weights)
    assert observed(gradients, beta).value == pytest.approx(min(1.0, max(0.0, product / square)), rel=1e-9, abs=1e-12)


def test_known_signal_and_noise() -> None:
    """|E g|² = 1 and E|g|² = 1 + 3: a quarter. Averaged over seeds, before the limits at 0 and 1 can bias it."""
    rng, signal = np.random.default_rng(0), np.zeros(4000)
    signal[0] = 1.0
    noise = (3 / 4000) ** 0.5
    assert np.mean([observed(signal + rng.normal(0, noise, (8, 4000)), 0.9).value for _ in range(40)]) == pytest.approx(0.25, abs=0.01)
    assert np.mean([observed(rng.normal(0, noise, (8, 4000)), 0.9).value for _ in range(40)]) < 0.01
    assert observed(np.tile(signal, (5, 1)), 0.9).value == pytest.approx(1.0)


def test_nothing_is_known_after_no_update_or_one() -> None:
    assert SignalShare(0.9).value == 0.0
    assert observed(np.ones((1, 3)), 0.9).value == 0.0
    assert observed(np.zeros((3, 3)), 0.9).value == 0.0


def trainer(**spec: Any) -> Trainer:
    defaults: dict[str, Any] = {"model": "-", "run_dir": "-", "lineage": "k", "learning_rate": 1e-3, "scale_by_signal": True}
    return Trainer(tiny_policy(), LearnerSpec(**(defaults | spec)))


def test_a_trainer_moves_by_the_share_and_not_before_two_batches() -> None:
    t = trainer()
    rows = sampled_by(t.policy, random_rows(3))
    before = [p.detach().clone() for p in t.updater.parameters]
    first = t.step(rows, "k-0")
    assert first.updated and first.metrics["learning_rate"] == 0.0 == first.metrics["grad_signal_share"]
    assert all(torch.equal(a, b) for a, b in zip(before, t.updater.parameters, strict=True))
    second = t.step(rows, "k-0")  # the same batch at the same weights: all of it agrees
    assert second.metrics["grad_signal_share"] == pytest.approx(1.0, abs=1e-4)
    assert second.metrics["learning_rate"] == pytest.approx(1e-3, rel=1e-4)
    assert not all(torch.equal(a, b) for a, b in zip(before, t.updater.parameters, strict=True))


def test_batches_that_contradict_each_other_move_nothing() -> None:
    t = trainer()
    rows = sampled_by(t.policy, random_rows(3))
    before = [p.detach().clone() for p in t.updater.parameters]
    t.step(rows, "k-0")
    for row in rows:
        row.advantage = -row.advantage
    assert t.step(rows, "k-0").metrics["learning_rate"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, t.updater.parameters, strict=True))


def test_the_share_of_the_clipped_gradients() -> None:
    """What Adam is given counts: two batches of very different norms agree in full once both are clipped to one norm."""
    t = trainer(max_grad_norm=1e-3, learning_rate=0.0)
    rows = sampled_by(t.policy, random_rows(3))
    t.step(rows, "k-0")
    for row in rows:
        row.advantage *= 3
    assert t.step(rows, "k-0").metrics["grad_signal_share"] == pytest.approx(1.0, abs=1e-3)


def test_a_resumed_trainer_goes_on_with_the_same_share() -> None:
    rows = random_rows(4)
    whole, resumed = trainer(), trainer()
    for _ in range(2):
        whole.step(rows, "k-0")
    resumed.policy.model.load_state_dict(whole.policy.model.state_dict())
    resumed.updater.optimizer.load_state_dict(copy.deepcopy(whole.updater.optimizer.state_dict()))
    resumed.restore(copy.deepcopy(whole.state()))
    expected, found = whole.step(rows, "k-0"), resumed.step(rows, "k-0")
    assert found.metrics["grad_signal_share"] == expected.metrics["grad_signal_share"] > 0
    assert found.metrics["learning_rate"] == expected.metrics["learning_rate"]
