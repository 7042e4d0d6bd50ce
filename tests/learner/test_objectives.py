from __future__ import annotations

import math

import pytest
import torch

from harness_rl.learner.objectives.base import Terms
from harness_rl.learner.objectives.grpo import GRPO
from harness_rl.learner.objectives.sft import SFT


def terms(pi: list[float], old: list[float], mu: list[float], advantages: list[float]) -> Terms:
    """From probabilities."""
    t = [torch.tensor(x, dtype=torch.float64).log() for x in (pi, old, mu)]
    return Terms(t[0].requires_grad_(), t[1], t[2], torch.tensor(advantages, dtype=torch.float64))


def test_grpo_by_hand() -> None:
    #            inside   clipped high  clipped low  not clipped (A < 0, rho high)  capped
    pi = [0.50, 0.80, 0.20, 0.80, 0.30]
    old = [0.50, 0.50, 0.50, 0.50, 0.30]
    mu = [0.40, 0.50, 0.50, 0.25, 0.05]
    advantage = [1.0, 2.0, -1.0, -2.0, 1.0]
    result = GRPO(epsilon_low=0.2, epsilon_high=0.28, truncation=2.0)(terms(pi, old, mu, advantage))
    expected = [
        -(0.5 / 0.4) * 1.0,  # rho 1
        -1.0 * 1.28 * 2.0,  # rho 1.6 -> 1.28
        -1.0 * -0.8,  # rho 0.4 -> 0.8, min(-0.4, -0.8)
        -2.0 * 1.6 * -2.0,  # rho 1.6 stays for A < 0; pi_old / mu = 2 is just not capped
        -2.0 * 1.0,  # pi_old / mu = 6 -> 2
    ]
    assert result.loss.tolist() == pytest.approx(expected)
    assert result.flags["clip_high"].tolist() == [False, True, False, False, False]
    assert result.flags["clip_low"].tolist() == [False, False, True, False, False]
    assert result.flags["capped"].tolist() == [False, False, False, False, True]


def test_grpo_gradient_by_hand() -> None:
    batch = terms([0.5, 0.8, 0.2, 0.8, 0.3], [0.5, 0.5, 0.5, 0.5, 0.3], [0.4, 0.5, 0.5, 0.25, 0.05], [1.0, 2.0, -1.0, -2.0, 1.0])
    GRPO()(batch).loss.sum().backward()
    # d loss / d log pi = -factor * rho * A where not clipped, else 0; the correction carries no gradient
    assert batch.logprobs.grad.tolist() == pytest.approx([-1.25, 0.0, 0.0, 2.0 * 1.6 * 2.0, -2.0])


def test_behaviour_ratio_is_trls_form() -> None:
    batch = terms([0.5, 0.8, 0.1], [0.5, 0.5, 0.5], [0.4, 0.4, 0.4], [1.0, 1.0, -1.0])
    result = GRPO(ratio="behaviour")(batch)
    assert result.loss.tolist() == pytest.approx([-1.25, -1.28, 0.8])
    assert "capped" not in result.flags


def test_on_policy_first_pass_is_reinforce() -> None:
    batch = terms([0.5, 0.3], [0.5, 0.3], [0.5, 0.3], [1.0, -2.0])
    GRPO()(batch).loss.sum().backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([-1.0, 2.0])


@pytest.mark.parametrize("objective", [GRPO(), GRPO(ratio="behaviour"), GRPO(truncation=1.0), SFT()])
def test_gradient_by_finite_differences(objective) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    logprobs, old, mu = (-torch.rand(40, dtype=torch.float64) for _ in range(3))
    advantages = torch.randn(40, dtype=torch.float64)
    logprobs.requires_grad_()
    objective(Terms(logprobs, old, mu, advantages)).loss.sum().backward()
    step = 1e-6
    up = objective(Terms(logprobs.detach() + step, old, mu, advantages)).loss
    down = objective(Terms(logprobs.detach() - step, old, mu, advantages)).loss
    torch.testing.assert_close(logprobs.grad, (up - down) / (2 * step), atol=1e-6, rtol=1e-6)


def test_d18_a_ratio_blow_up_stays_bounded() -> None:
    batch = Terms(torch.tensor([-0.5]).requires_grad_(), torch.tensor([-0.5]), torch.tensor([-12.0]), torch.tensor([1.0]))
    result = GRPO(truncation=2.0)(batch)
    result.loss.sum().backward()
    assert batch.logprobs.grad.item() == pytest.approx(-2.0)
    assert result.flags["capped"].tolist() == [True]


def test_sft_is_the_negative_logprob() -> None:
    batch = terms([0.5, 0.25], [1.0, 1.0], [1.0, 1.0], [0.0, -3.0])
    assert SFT()(batch).loss.tolist() == pytest.approx([math.log(2), math.log(4)])
