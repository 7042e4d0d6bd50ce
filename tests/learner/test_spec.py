from __future__ import annotations

import json
import subprocess
import sys

import pytest

from harness_rl.errors import UserError
from harness_rl.learner.spec import LearnerSpec

SPEC = {"model": "/m", "run_dir": "/r", "lineage": "k3f9"}


def test_round_trip() -> None:
    spec = LearnerSpec(**SPEC, engines=["http://127.0.0.1:1"], learning_rate=1e-4)  # type: ignore[arg-type]
    assert LearnerSpec.from_json(spec.to_json()) == spec
    assert spec.version(12) == "k3f9-12"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rat": 1}, "unknown key 'learning_rat'; did you mean 'learning_rate'"),
        ({"lineage": None}, "lineage = None must be a str"),
        ({"ratio": "both"}, "ratio = 'both'; use one of 'proximal', 'behaviour'"),
        ({"minibatches": 0}, "minibatches = 0 must be above 0"),
        ({"minibatches": True}, "minibatches = True must be a int"),
        ({"learning_rate": -1}, "must not be negative"),
        ({"engines": "http://x"}, "engines must be a list"),
        ({"lineage": "a/b"}, "short name"),
        ({"processes": 3, "context_parallel": 2}, "processes = 3 is not a multiple of context_parallel = 2"),
        ({"context_parallel": 0}, "context_parallel = 0 must be above 0"),
    ],
)
def test_mistakes_are_one_clear_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        LearnerSpec.from_json(json.dumps(SPEC | change))
    assert "\n" not in str(caught.value)


def test_a_row_over_several_processes_fits_each_when_it_is_padded() -> None:
    """Each holds two pieces of one length."""
    for budget in (64, 65):
        for ranks in (2, 3):
            longest = LearnerSpec(**SPEC, processes=ranks, context_parallel=ranks, micro_batch_tokens=budget).longest_row  # type: ignore[arg-type]
            assert 2 * -(-longest // (2 * ranks)) <= budget < 2 * -(-(longest + 1) // (2 * ranks))
    assert LearnerSpec(**SPEC, micro_batch_tokens=65).longest_row == 65  # type: ignore[arg-type]


def test_missing_and_malformed() -> None:
    with pytest.raises(UserError, match="'lineage' is missing"):
        LearnerSpec.from_json('{"model": "m", "run_dir": "r"}')
    for text in ("{", "[]"):
        with pytest.raises(UserError):
            LearnerSpec.from_json(text)


def test_what_control_imports_brings_no_torch() -> None:
    code = (
        "import sys, harness_rl.learner.rows, harness_rl.learner.link, harness_rl.learner.spec, harness_rl.learner.advantages, "
        "harness_rl.learner.packing, harness_rl.learner.metrics, harness_rl.engines.vllm_plugin\n"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
