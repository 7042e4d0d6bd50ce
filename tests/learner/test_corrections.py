"""Each correction against factors worked out by hand, alone and composed."""

from __future__ import annotations

import pytest
import torch

from harness_rl.errors import UserError
from harness_rl.learner.corrections import Correction, default_corrections, parse_corrections
from harness_rl.learner.objectives.base import Terms
from harness_rl.learner.objectives.composed import Composed
from harness_rl.learner.objectives.grpo import GRPO
from harness_rl.learner.spec import LearnerSpec

OLD, MU, ROWS = [0.5, 0.4, 0.1, 0.3], [0.4, 0.1, 0.5, 0.3], [0, 0, 1, 1]
"""w = 1.25, 4, 0.2, 1; products of the rows 5 and 0.2; geometric means sqrt(5) = 2.2361 and sqrt(0.2) = 0.4472."""


def batch(old: list[float] = OLD, mu: list[float] = MU, rows: list[int] = ROWS) -> Terms:
    logs = [torch.tensor(x, dtype=torch.float64).log() for x in (old, mu)]
    return Terms(logs[0].clone().requires_grad_(), logs[0], logs[1], torch.ones(len(old), dtype=torch.float64), torch.tensor(rows))


@pytest.mark.parametrize(
    ("name", "factors", "touched"),
    [
        ("token_truncate:2", [1.25, 2, 0.2, 1], [0, 1, 0, 0]),
        ("token_mask:0.5:3", [1.25, 0, 0, 1], [0, 1, 1, 0]),  # IcePop
        ("token_reject:0.5:3", [1, 0, 0, 1], [0, 1, 1, 0]),
        ("sequence_truncate:2", [2, 2, 0.2, 0.2], [1, 1, 0, 0]),
        ("sequence_mask:0:3", [0, 0, 0.2, 0.2], [1, 1, 0, 0]),
        ("sequence_reject:0:3", [0, 0, 1, 1], [1, 1, 0, 0]),
        ("geometric_truncate:2", [2, 2, 0.4472136, 0.4472136], [1, 1, 0, 0]),
        ("geometric_mask:0.5:3", [2.2360680, 2.2360680, 0, 0], [0, 0, 1, 1]),
        ("geometric_reject:0.5:3", [1, 1, 0, 0], [0, 0, 1, 1]),
    ],
)
def test_factors_by_hand(name: str, factors: list[float], touched: list[int]) -> None:
    found, flags = Correction.parse(name, 9.0).factor(batch())
    assert found.tolist() == pytest.approx(factors) and not found.requires_grad
    assert flags.int().tolist() == touched


def test_they_compose_by_multiplication() -> None:
    both = tuple(parse_corrections(["token_truncate:2", "geometric_reject:0.5:3"], 9.0, "proximal"))
    result = Composed(GRPO(), corrections=both)(batch())
    assert result.loss.tolist() == pytest.approx([-1.25, -2.0, 0.0, 0.0])  # rho = 1, A = 1
    assert result.flags["capped"].int().tolist() == [0, 1, 0, 0] and result.flags["masked"].int().tolist() == [0, 0, 1, 1]
    assert Composed(GRPO())(batch()).loss.tolist() == [-1.0] * 4  # off


def test_d18_five_hundred_tokens_each_off_by_a_little_stay_finite() -> None:
    """The product over a row is e^200, which no float32 holds."""
    logprobs = torch.full((2000,), -0.5)
    terms = Terms(logprobs, logprobs, logprobs - 0.1, torch.ones(2000), torch.zeros(2000, dtype=torch.long))
    for name, factor in (("sequence_truncate:2", 2.0), ("sequence_mask", 0.0), ("sequence_reject", 0.0), ("geometric_truncate:2", 1.1052)):
        found, touched = Correction.parse(name, 2.0).factor(terms)
        assert found.tolist() == pytest.approx([factor] * 2000, rel=1e-3) and bool(touched.all()) == (name != "geometric_truncate:2")


@pytest.mark.parametrize(
    ("names", "ratio", "message"),
    [
        (["tis"], "proximal", r"correction 'tis': write token\|sequence\|geometric_truncate\|mask\|reject"),
        (["token_truncate:x"], "proximal", "its bounds are not numbers"),
        (["token_mask:2"], "proximal", "mask takes 2 bounds, low:high"),
        (["token_truncate:1:2"], "proximal", "truncate takes 1 bound, high"),
        (["token_mask:3:1"], "proximal", "0 <= low < high"),
        (["token_truncate", "sequence_mask"], "proximal", "token_truncate and sequence_mask are both weights"),
        (["token_truncate"], "behaviour", 'with ratio = "behaviour" the ratio itself corrects'),
    ],
)
def test_mistakes_are_one_clear_line(names: list[str], ratio: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        LearnerSpec(model="-", run_dir="-", lineage="k", corrections=names, ratio=ratio)  # type: ignore[arg-type]


def test_defaults() -> None:
    assert default_corrections("proximal") == ["token_truncate"] and default_corrections("behaviour") == []
    (default,) = parse_corrections(["token_truncate"], 2.0, "proximal")
    assert (default.low, default.high) == (0.0, 2.0)
    (icepop,) = parse_corrections(["token_mask"], 2.0, "proximal")
    assert (icepop.low, icepop.high) == (0.5, 5.0)
    assert parse_corrections(["geometric_reject"], 2.0, "behaviour")[0].high == 1.01
