"""A user's own advantages: by rollout, by turn, by token."""

import numpy as np
import pytest
from orchestrator.fakes import outcome

from harness_rl.config import RunConfig
from harness_rl.configfile import resolve_config
from harness_rl.errors import UserError
from harness_rl.learner.rows import rows_from_wire, rows_to_wire, verify_row
from harness_rl.orchestrator.batches import Assembler, Group
from harness_rl.orchestrator.main import resolve_inputs
from harness_rl.orchestrator.rollout import Rollout


def rows_of(function, rewards=(0.0, 1.0, None)):
    assembler = Assembler(1, 0.0, "std", function=function)
    members = [Rollout(f"g-{n}", "g", n, 1, r, None if r is None else outcome(r), [], 0.0) for n, r in enumerate(rewards)]
    assembler.add(Group("g", "t", members))
    batch = assembler.close()
    assert batch is not None
    return batch.rows


def test_one_number_a_rollout_over_the_scored_ones_only():
    seen = []

    def mine(outcomes, rewards):
        seen.append((len(outcomes), rewards))
        return [10 * reward - 1 for reward in rewards]

    assert {row.rollout_id: row.advantage for row in rows_of(mine)} == {"g-0": -1.0, "g-1": 9.0}
    assert seen == [(2, [0.0, 1.0])]


def test_by_turn_and_by_token():
    first, second = rows_of(lambda outcomes, rewards: [{"n0": 0.5}, {"n0": np.array([2.0, -1.0])}])
    assert first.credit[first.trained].tolist() == [0.5, 0.5]
    assert second.credit[second.trained].tolist() == [2.0, -1.0]  # prompt (1, 2), completion (3, 4)
    for row in rows_from_wire(*rows_to_wire([first, second])):
        verify_row(row)
        assert not row.without_credit
    (left_out, _) = rows_of(lambda outcomes, rewards: [{}, {"n0": 1.0}])
    assert left_out.without_credit


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda outcomes, rewards: [1.0], "gave 1 credits for 2 rollouts"),
        (lambda outcomes, rewards: [1.0, float("nan")], "rollout g-1: nan is not a finite number"),
        (lambda outcomes, rewards: [1.0, True], "True is not a finite number"),
        (lambda outcomes, rewards: [{"n0": [1.0, 2.0, 3.0]}, 1.0], "rollout g-0, turn n0: 3 for 2 sampled tokens"),
        (lambda outcomes, rewards: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_what_is_no_advantage_ends_the_run_in_one_line(function, words):
    with pytest.raises(UserError, match=words) as caught:
        rows_of(function)
    assert "\n" not in str(caught.value)


def test_it_is_named_in_the_config_and_loaded_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("harness_rl.orchestrator.main.resolve_model", lambda name: name)
    (tmp_path / "mine.py").write_text("def halves(outcomes, rewards):\n    return [r / 2 for r in rewards]\n")
    config = RunConfig.model_validate({"rollout": {"advantage_function": f"{tmp_path}/mine.py:halves"}})

    class Factory:
        def prompt_rows(self):
            return []

    inputs = resolve_inputs(config, factory=Factory())
    assert inputs.advantage_function is not None and inputs.advantage_function([], [1.0]) == [0.5]
    config.rollout.advantage_function = f"{tmp_path}/mine.py:thirds"
    with pytest.raises(UserError, match=r"rollout.advantage_function: .* has no function or class thirds"):
        resolve_inputs(config, factory=Factory())
    with pytest.raises(UserError, match="gives the advantages"):
        resolve_config({"rollout": {"advantage_function": "m:f", "balance_groups": True}}, [], "t")
