"""Each objective against numbers worked out by hand from its paper's formula, and its gradient against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from harness_rl.errors import UserError
from harness_rl.learner import objectives
from harness_rl.learner.corrections import Correction
from harness_rl.learner.objectives.base import Objective, Terms
from harness_rl.learner.objectives.cispo import CISPO
from harness_rl.learner.objectives.composed import Composed
from harness_rl.learner.objectives.dapo import DAPO
from harness_rl.learner.objectives.dppo import DPPO
from harness_rl.learner.objectives.dr_grpo import DrGRPO
from harness_rl.learner.objectives.grpo import GRPO
from harness_rl.learner.objectives.gspo import GSPO
from harness_rl.learner.objectives.sft import SFT
from harness_rl.learner.spec import LearnerSpec


def terms(
    pi: list[float],
    old: list[float],
    advantages: list[float],
    mu: list[float] | None = None,
    sequence: list[int] | None = None,
    reference: list[float] | None = None,
) -> Terms:
    """From probabilities; without `mu` the engine agrees with pi_old, without `sequence` each token is a row of its own."""
    logs = [torch.tensor(x, dtype=torch.float64).log() for x in (pi, old, mu or old)]
    place = torch.tensor(sequence if sequence is not None else list(range(len(pi))))
    anchor = None if reference is None else torch.tensor(reference, dtype=torch.float64).log()
    return Terms(logs[0].requires_grad_(), logs[1], logs[2], torch.tensor(advantages, dtype=torch.float64), place, anchor)


def gradient(objective: Objective, batch: Terms) -> list[float]:
    objective(batch).loss.sum().backward()
    assert batch.logprobs.grad is not None
    return list(batch.logprobs.grad.tolist())


def tis(high: float = 2.0) -> Composed:
    return Composed(GRPO(), corrections=(Correction.parse(f"token_truncate:{high}", 2.0),))


#            ratio 1, clipped high, clipped low, not clipped (A < 0 and rho high)
PI, OLD, ADVANTAGE = [0.5, 0.8, 0.2, 0.8], [0.5, 0.5, 0.5, 0.5], [1.0, 2.0, -1.0, -2.0]


def test_grpo_by_hand() -> None:
    result = GRPO(0.2, 0.28)(terms(PI, OLD, ADVANTAGE))
    assert result.loss.tolist() == pytest.approx([-1.0, -1.28 * 2, 0.8, 1.6 * 2])
    assert result.flags["clip_high"].tolist() == [False, True, False, False]
    assert result.flags["clip_low"].tolist() == [False, False, True, False]
    assert gradient(GRPO(0.2, 0.28), terms(PI, OLD, ADVANTAGE)) == pytest.approx([-1.0, 0.0, 0.0, 1.6 * 2])


def test_grpo_upper_bound_is_the_dual_clip_by_hand() -> None:
    # c = 1.5: for A = -2 and rho = 1.6, max(min(-3.2, -2.56), -3.0) = -3.0; a ratio under c and tokens with A > 0 are as before
    pi, old, advantage = [*PI, 0.7], [*OLD, 0.5], [*ADVANTAGE, -1.0]
    result = GRPO(0.2, 0.28, 1.5)(terms(pi, old, advantage))
    assert result.loss.tolist() == pytest.approx([-1.0, -2.56, 0.8, 3.0, 1.4])
    assert result.flags["clip_dual"].tolist() == [False, False, False, True, False]
    assert gradient(GRPO(0.2, 0.28, 1.5), terms(pi, old, advantage)) == pytest.approx([-1.0, 0.0, 0.0, 0.0, 1.4])
    # TRL's `delta`: min(min(rho, delta) A, clip(rho) A)
    rho = np.array(pi) / np.array(old)
    two_sided = np.minimum(np.minimum(rho, 1.5) * advantage, rho.clip(0.8, 1.28) * advantage)
    assert result.loss.tolist() == pytest.approx((-two_sided).tolist())


def test_dapo_lets_an_unlikely_token_grow_further_than_dr_grpo() -> None:
    batch = terms([0.0125, 0.0125], [0.01, 0.01], [1.0, -1.0])  # rho 1.25: inside 1.28, outside 1.2
    assert DAPO(0.2, 0.28)(batch).loss.tolist() == pytest.approx([-1.25, 1.25])
    assert DrGRPO(0.2, 0.2)(batch).loss.tolist() == pytest.approx([-1.2, 1.25])


def test_cispo_by_hand() -> None:
    # rho 5, 2, 0.5, 0.1 with weights in [1 - 0.8, 1 + 2] = [0.2, 3]: 3, 2, 0.5, 0.2
    pi, old, advantage = [0.5, 0.8, 0.2, 0.05], [0.1, 0.4, 0.4, 0.5], [1.0, -1.0, 2.0, -2.0]
    result = CISPO(0.8, 2.0)(terms(pi, old, advantage))
    expected = [-3 * math.log(0.5), 2 * math.log(0.8), -0.5 * 2 * math.log(0.2), 0.2 * 2 * math.log(0.05)]
    assert result.loss.tolist() == pytest.approx(expected)
    assert result.flags["clip_high"].tolist() == [True, False, False, False]
    assert result.flags["clip_low"].tolist() == [False, False, False, True]
    assert gradient(CISPO(0.8, 2.0), terms(pi, old, advantage)) == pytest.approx([-3.0, 2.0, -1.0, 0.4])  # none is silenced


def test_gspo_by_hand() -> None:
    # row 0: ratios 1.21 and 1, so s = sqrt(1.21) = 1.1; row 1: 0.64 and 1, so s = 0.8; their tokens come mixed
    pi, old, rows = [0.242, 0.32, 0.4, 0.3], [0.2, 0.5, 0.4, 0.3], [0, 1, 0, 1]
    up = terms(pi, old, [1.0] * 4, sequence=rows)
    assert GSPO(0.05, 0.05)(up).loss.tolist() == pytest.approx([-1.05, -0.8, -1.05, -0.8])
    assert gradient(GSPO(0.05, 0.05), up) == pytest.approx([0.0, -0.8, 0.0, -0.8])  # all of row 0 is clipped, none of row 1
    down = terms(pi, old, [-1.0] * 4, sequence=rows)
    assert GSPO(0.05, 0.05)(down).loss.tolist() == pytest.approx([1.1, 0.95, 1.1, 0.95])
    assert gradient(GSPO(0.05, 0.05), down) == pytest.approx([1.1, 0.0, 1.1, 0.0])


def test_gspo_token_keeps_each_tokens_own_advantage() -> None:
    batch = terms([0.242, 0.4], [0.2, 0.4], [1.0, -3.0], sequence=[0, 0])  # s = 1.1 for both
    assert gradient(GSPO(0.2, 0.2), batch) == pytest.approx([-1.1, 3.3])


def test_dppo_binary_total_variation_by_hand() -> None:
    #    moved up by 0.3,  the same, pushed back,  0.05 only,  down by 0.3,  rho 100 and |d| 0.001
    pi = [0.5, 0.5, 0.3, 0.1, 0.00101]
    old = [0.2, 0.2, 0.25, 0.4, 0.0000101]
    advantage = [1.0, -1.0, 1.0, -1.0, 1.0]
    result = DPPO("tv", 0.2, 0.2, ratio_max=20.0)(terms(pi, old, advantage))
    assert result.loss.tolist() == pytest.approx([0.0, 2.5 * math.log(0.5), -1.2 * math.log(0.3), 0.0, -20 * math.log(0.00101)])
    assert result.flags["clip_high"].tolist() == [True, False, False, False, False]
    assert result.flags["clip_low"].tolist() == [False, False, False, True, False]
    assert gradient(DPPO("tv", 0.2, 0.2, 20.0), terms(pi, old, advantage)) == pytest.approx([0.0, 2.5, -1.2, 0.0, -20.0])


def test_dppo_binary_kl_by_hand() -> None:
    # KL((0.5, 0.5) || (0.25, 0.75)) = 0.5 ln 2 + 0.5 ln(2 / 3) = 0.143841
    batch = terms([0.25], [0.5], [-1.0])
    assert DPPO("kl", 0.143, 0.143)(batch).loss.tolist() == [0.0]
    assert DPPO("kl", 0.144, 0.144)(batch).loss.tolist() == pytest.approx([0.5 * math.log(0.25)])
    certain = terms([1.0, 0.5], [1.0, 1.0], [1.0, -1.0])  # pi_old = 1 leaves no other token: KL = ln(1 / pi)
    assert DPPO("kl", 0.6, 0.6)(certain).flags["clip_low"].tolist() == [False, True]


def test_kl_to_reference_by_hand() -> None:
    # r = 0.25 / 0.5: r - 1 - ln r = -0.5 + ln 2; r = 1: 0; r = 0.6 / 0.3: 1 - ln 2. Its slope is 1 - r.
    batch = terms([0.5, 0.4, 0.3], [0.5, 0.4, 0.3], [0.0, 0.0, 0.0], reference=[0.25, 0.4, 0.6])
    loss = Composed(GRPO(), kl_beta=0.1)
    result = loss(batch)
    assert result.values["kl_reference"].tolist() == pytest.approx([math.log(2) - 0.5, 0.0, 1 - math.log(2)])
    assert result.loss.tolist() == pytest.approx([0.1 * (math.log(2) - 0.5), 0.0, 0.1 * (1 - math.log(2))])
    assert gradient(loss, batch) == pytest.approx([0.05, 0.0, -0.1])
    assert not loss.uses_advantage and Composed(GRPO()).uses_advantage


def test_sft_is_the_negative_logprob() -> None:
    batch = terms([0.5, 0.25], [1.0, 1.0], [0.0, -3.0])
    assert SFT()(batch).loss.tolist() == pytest.approx([math.log(2), math.log(4)])


def test_decoupled_by_hand() -> None:
    """pi_old / mu, truncated at 2, times the clipped surrogate against pi_old."""
    batch = terms([*PI, 0.3], [*OLD, 0.3], [*ADVANTAGE, 1.0], mu=[0.4, 0.5, 0.5, 0.25, 0.05])
    result = tis()(batch)
    assert result.loss.tolist() == pytest.approx([-1.25, -2.56, 0.8, 2 * 3.2, -2.0])  # pi_old / mu = 2 is just not capped, 6 is
    assert result.flags["capped"].tolist() == [False, False, False, False, True]
    assert gradient(tis(), batch) == pytest.approx([-1.25, 0.0, 0.0, 6.4, -2.0])  # the correction carries no gradient


def test_behaviour_ratio_is_trls_asynchronous_form() -> None:
    result = Composed(GRPO(), ratio="behaviour")(terms([0.5, 0.8, 0.1], [0.5] * 3, [1.0, 1.0, -1.0], mu=[0.4] * 3))
    assert result.loss.tolist() == pytest.approx([-1.25, -1.28, 0.8])
    assert "capped" not in result.flags


@pytest.mark.parametrize("objective", [GRPO(), CISPO(), GSPO(), DPPO("tv"), DPPO("kl")])
def test_on_policy_first_pass_is_reinforce(objective: Objective) -> None:
    assert gradient(objective, terms([0.5, 0.3], [0.5, 0.3], [1.0, -2.0])) == pytest.approx([-1.0, 2.0])


def random_terms(rows: int = 8) -> Terms:
    torch.manual_seed(0)
    logprobs, old, mu, reference = (-2 * torch.rand(40, dtype=torch.float64) - 0.05 for _ in range(4))
    sequence = torch.arange(40) % rows
    return Terms(logprobs.requires_grad_(), old, mu, torch.randn(rows, dtype=torch.float64)[sequence], sequence, reference)


def by_differences(batch: Terms, value: Callable[[torch.Tensor], torch.Tensor], step: float = 1e-6) -> torch.Tensor:
    """The gradient of `value`, a scalar function of the logprobs [N], one coordinate at a time."""
    found = torch.zeros_like(batch.logprobs)
    for n in range(len(found)):
        move = torch.zeros_like(found)
        move[n] = step
        found[n] = (value(batch.logprobs.detach() + move) - value(batch.logprobs.detach() - move)) / (2 * step)
    return found


REJECT = Correction.parse("geometric_reject:0.5:2", 2.0)


@pytest.mark.parametrize(
    "objective",
    [GRPO(), GRPO(ratio_max=1.5), DAPO(), DrGRPO(0.2, 0.2), SFT(), tis(), tis(1.0), Composed(GRPO(), "behaviour", (REJECT,), 0.3)],
)
def test_gradient_by_finite_differences(objective: Objective) -> None:
    batch = random_terms()
    found = gradient(objective, batch)

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        return objective(Terms(logprobs, batch.old, batch.behaviour, batch.advantages, batch.sequence, batch.reference)).loss.sum()

    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), by_differences(batch, value), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        *("token_truncate:1.2", "token_mask:0.5:2", "token_reject:0.5:2"),
        *("sequence_truncate:1.2", "sequence_mask:0.5:2", "sequence_reject:0.5:2"),
        *("geometric_truncate:1.1", "geometric_mask:0.8:1.2", "geometric_reject:0.8:1.2"),
    ],
)
def test_gradient_of_each_correction_by_finite_differences(name: str) -> None:
    """The factor is one of pi_old and mu: it weighs the gradient and has none itself."""
    batch = random_terms()
    correction = Correction.parse(name, 2.0)
    objective = Composed(GRPO(), corrections=(correction,))
    factors, touched = correction.factor(batch)
    assert 0 < touched.sum() < len(touched) and not factors.requires_grad
    found = torch.tensor(gradient(objective, batch), dtype=torch.float64)

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        weighed = Terms(logprobs, batch.old, batch.behaviour, batch.advantages, batch.sequence, batch.reference)
        return (GRPO()(weighed).loss * factors).sum()

    torch.testing.assert_close(found, by_differences(batch, value), atol=1e-6, rtol=1e-6)
    assert torch.all(found[factors == 0] == 0)


def test_gspo_gradient_is_that_of_the_sequence_loss_by_finite_differences() -> None:
    """Of eq. 5, written out: -min(s_i A_i, clip(s_i) A_i) for each row, times its length as each of its tokens counts once."""
    batch, rows = random_terms(), 8

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in range(rows):
            mine = batch.sequence == i
            s = (logprobs[mine] - batch.old[mine]).mean().exp()
            a = batch.advantages[mine][0]
            total = total - mine.sum() * torch.minimum(s * a, s.clamp(0.8, 1.3) * a)
        return total

    torch.testing.assert_close(
        torch.tensor(gradient(GSPO(0.2, 0.3), batch), dtype=torch.float64), by_differences(batch, value), atol=1e-6, rtol=1e-6
    )


def test_gradients_with_a_frozen_weight_by_finite_differences() -> None:
    """CISPO and DPPO: of -weight A log pi, the weight held where it is; it is worked out here from the paper's formulas."""
    batch = random_terms()
    pi, old = batch.logprobs.detach().exp().numpy(), batch.old.exp().numpy()
    a, rho = batch.advantages.numpy(), pi / old
    leaves = (a * (rho - 1)) > 0
    kl = old * np.log(old / pi) + (1 - old) * np.log((1 - old) / (1 - pi))
    for objective, weight in (
        (CISPO(0.6, 0.5), rho.clip(0.4, 1.5)),
        (DPPO("tv", 0.1, 0.1, 3.0), np.where(leaves & (abs(pi - old) > 0.1), 0.0, rho.clip(max=3.0))),
        (DPPO("kl", 0.02, 0.02, 3.0), np.where(leaves & (kl > 0.02), 0.0, rho.clip(max=3.0))),
    ):
        batch.logprobs.grad = None
        frozen = torch.from_numpy(weight * a)
        expected = by_differences(batch, lambda x, frozen=frozen: -(frozen * x).sum())  # type: ignore[misc]
        torch.testing.assert_close(torch.tensor(gradient(objective, batch), dtype=torch.float64), expected, atol=1e-6, rtol=1e-6)
        assert 0 < (weight == 0).sum() < 40 or isinstance(objective, CISPO)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "cispo", "gspo", "dppo_tv", "dppo_kl"])
def test_d18_a_ratio_blow_up_stays_bounded(name: str, sign: float) -> None:
    """One token stored at -12 where the learner says -0.5, of any sign of advantage: with each name's own settings it pushes little."""
    from harness_rl.configfile import resolve_config

    section = resolve_config({"learner": {"objective": name}}, [], "test").learner
    keys = ("objective", "epsilon_low", "epsilon_high", "ratio", "ratio_max")
    loss = objectives.build(spec(**{key: getattr(section, key) for key in keys}))
    logprobs = torch.tensor([-0.5]).requires_grad_()
    loss(Terms(logprobs, torch.tensor([-0.5]), torch.tensor([-12.0]), torch.tensor([sign]), torch.tensor([0]))).loss.sum().backward()
    assert abs(logprobs.grad.item()) <= 20.0  # type: ignore[union-attr]


def spec(**fields: object) -> LearnerSpec:
    return LearnerSpec(model="-", run_dir="-", lineage="k", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("grpo", GRPO),
        ("dapo", DAPO),
        ("dr_grpo", DrGRPO),
        ("cispo", CISPO),
        ("gspo", GSPO),
        ("dppo_tv", DPPO),
        ("dppo_kl", DPPO),
        ("sft", SFT),
    ],
)
def test_every_name_builds_its_objective(name: str, kind: type) -> None:
    built = objectives.build(spec(objective=name))
    assert isinstance(built.objective, kind)
    assert [c.level for c in built.corrections] == ([] if name == "sft" else ["token"])


MINE = """
from __future__ import annotations
from dataclasses import dataclass
from harness_rl.learner.objectives.base import TokenLoss

@dataclass(frozen=True)
class Mine:
    scale: float = 3.0
    def __call__(self, terms):
        return TokenLoss(-self.scale * terms.advantages * terms.logprobs)

def plain(terms):
    return TokenLoss(-terms.advantages * terms.logprobs)

def wrong(terms):
    return -terms.logprobs

def flat(terms):
    return TokenLoss(-terms.old)
"""


def test_your_own_objective_by_import_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    batch = terms([0.5], [0.5], [2.0], mu=[0.25])
    for name, slope in (("Mine", -6.0), ("plain", -2.0)):
        batch.logprobs.grad = None
        loss = objectives.build(spec(objective=f"{file}:{name}"))
        assert loss.uses_advantage
        assert gradient(loss, batch) == pytest.approx([2.0 * slope])  # corrected by pi_old / mu = 2 like any other
    for name, message in (("wrong", r"gave Tensor; return a TokenLoss whose loss is \[1\]"), ("flat", "without gradient")):
        with pytest.raises(UserError, match=message):
            objectives.build(spec(objective=f"{file}:{name}"))(batch)
    with pytest.raises(UserError, match="has no function or class nothing"):
        objectives.build(spec(objective=f"{file}:nothing"))
