"""A whole optimizer step on a tiny model: states, normalisation, proofs, metrics."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import alone, random_rows, row_logprobs, sampled_by, tiny_policy, trace, turn

from harness_rl.errors import InvariantError, LearnerError, UserError
from harness_rl.learner import packing
from harness_rl.learner import step as step_module
from harness_rl.learner.mismatch import CAUSES
from harness_rl.learner.rows import Row, RowState, build_rows
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Trainer
from harness_rl.learner.update import scheduled


def trainer(**spec: Any) -> Trainer:
    defaults: dict[str, Any] = {"model": "-", "run_dir": "-", "lineage": "k", "learning_rate": 1e-2, "micro_batch_tokens": 128}
    return Trainer(tiny_policy(), LearnerSpec(**(defaults | spec)))


def weights(t: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in t.updater.parameters]


def grads_of(t: Trainer, rows: list[Row], current: str = "k-0") -> list[torch.Tensor]:
    """The step's gradient, caught before it is applied."""
    caught: list[torch.Tensor] = []

    def catch() -> float:
        caught.extend(p.grad.clone() for p in t.updater.parameters)
        t.updater.optimizer.zero_grad()
        return 0.0

    t.updater.update = catch  # type: ignore[method-assign]
    t.step(rows, current)
    return caught


def naive_gradient(t: Trainer, rows: list[Row]) -> list[torch.Tensor]:
    """The issue's formula, written out row by row with full logits."""
    model = t.policy.model
    model.zero_grad()
    total = sum(int(row.trained.sum()) for row in rows)
    for row in rows:
        logits = model(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None], use_cache=False, branches=alone(row.ids)).logits[0]
        for at in np.flatnonzero(row.trained):
            logp = torch.log_softmax(logits[at - 1] / row.temperature, -1)[int(row.ids[at])]
            rho = torch.exp(logp - logp.detach())
            factor = min(math.exp(logp.item() - float(row.logprobs[at])), t.spec.truncation)
            loss = -factor * torch.minimum(rho * row.advantage, rho.clamp(0.8, 1.28) * row.advantage) / total
            loss.backward(retain_graph=True)
    found = [p.grad.clone() for p in t.updater.parameters]
    model.zero_grad()
    return found


def assert_close(a: list[torch.Tensor], b: list[torch.Tensor], **kwargs: float) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **{"atol": 2e-6, "rtol": 1e-4, **kwargs})


def test_the_step_gradient_is_the_formula_written_out() -> None:
    t, rows = trainer(), random_rows(0)
    expected = naive_gradient(t, rows)
    assert_close(grads_of(t, rows), expected)


@pytest.mark.parametrize("how", ["token", "rollout"])
def test_d16_micro_batches_do_not_change_the_gradient(how: str) -> None:
    rows = random_rows(1, rollouts=8)
    one = grads_of(trainer(micro_batch_tokens=4096, loss_normalisation=how), rows)
    many = grads_of(trainer(micro_batch_tokens=max(len(row) for row in rows), loss_normalisation=how), rows)
    assert_close(one, many)


def test_d17_an_all_zero_row_changes_nothing_and_is_named() -> None:
    good = random_rows(2)
    empty = build_rows(trace(turn("z", [1, 2], [3, 4])), "z", "g9")[0]
    empty.advantage = 1.0
    empty.stale[:] = 1
    alone, together = trainer(), trainer()
    assert_close(grads_of(alone, good), grads_of(together, [*good, empty]))
    assert trainer().step([empty], "k-0").states == {empty.row_id: RowState.STALE}


def test_every_row_ends_in_one_counted_state() -> None:
    rows = random_rows(3, rollouts=6)
    rows[0].advantage = 0.0
    rows[1].stale[:] = 1
    rows[2].logprobs[rows[2].spans[0].start] -= 0.5
    long = build_rows(trace(turn("l", [1] * 100, [2] * 100)), "long", "g7")[0]
    long.advantage = 1.0
    report = trainer(max_rejected_rows=1).step([*rows, long], "k-0")
    assert [report.states[row.row_id] for row in [*rows, long]] == [
        RowState.ZERO_ADVANTAGE,
        RowState.STALE,
        RowState.REJECTED,
        RowState.TRAINED,
        RowState.TRAINED,
        RowState.TRAINED,
        RowState.OVERSIZE,
    ]
    assert "logprobs or mask" in report.reasons[rows[2].row_id]
    assert {k: v for k, v in report.metrics.items() if k.startswith("rows/")} == {
        "rows/trained": 3,
        "rows/stale": 1,
        "rows/oversize": 1,
        "rows/zero_advantage": 1,
        "rows/rejected": 1,
    }
    assert report.metrics["tokens/trained"] == sum(row.trained.sum() for row in rows[3:])
    assert report.metrics["tokens/stale"] == rows[1].mask.sum()


def by_turn(completions: list[list[int]], credit: list[float], rows_of: list[list[int]], rollout: str = "r") -> list[Row]:
    """A rollout of so many turns, turn t with `credit[t]` on each token; `rows_of`: which turns are in each of its rows."""
    rows = []
    for number, turns in enumerate(rows_of):
        ids, made, parent = [1, 2 + number], [], None
        for t in turns:
            made.append(turn(f"n{t}", ids, completions[t], parent=parent))
            ids, parent = [*ids, *completions[t], 9], f"n{t}"
        (row,) = build_rows(trace(*made), rollout, "g0")
        row.token_advantages = np.zeros(len(row), dtype=np.float32)
        for span, t in zip(row.spans, turns, strict=True):
            row.token_advantages[span.start : span.end] = credit[t]
        rows.append(row)
    return rows


@pytest.mark.parametrize("how", ["token", "rollout", "constant"])
def test_invariant_3_turns_without_credit_weigh_the_same_in_a_row_of_their_own(how: str) -> None:
    """The row with credit alone is forwarded; what its tokens weigh must not depend on where the others lie."""
    completions, credit = [[3] * 10, [4] * 40, [5] * 40], [1.0, 0.0, 0.0]
    other = random_rows(1, rollouts=2)

    def weight(rows_of: list[list[int]]) -> float:
        rows = [*by_turn(completions, credit, rows_of), *other]
        prepared = trainer(loss_normalisation=how, micro_batch_tokens=512).prepare(rows, rollouts=3)
        (found,) = {
            float(w) for pack in prepared.minibatches[0] for w, at in zip(pack.weights, pack.sequence, strict=True) if pack.rows[at] == 0
        }
        return found

    assert weight([[0, 1, 2]]) == weight([[0, 1], [2]]) == weight([[0], [1], [2]]) == weight([[0], [1, 2]])


@pytest.mark.parametrize(("how", "total"), [("token", 1.0), ("rollout", 1.0), ("constant", None)])
def test_a_rollout_of_advantage_0_counts_and_one_that_its_group_left_out_does_not(how: str, total: float | None) -> None:
    rows = random_rows(2, rollouts=6)

    def of_first(left_out: bool, advantage: float) -> tuple[float, float]:
        rows[3].advantage, rows[3].left_out = advantage, left_out
        prepared = trainer(loss_normalisation=how, micro_batch_tokens=512).prepare(rows, rollouts=8)
        packs = prepared.minibatches[0]
        assert (prepared.states[rows[3].row_id] is RowState.ZERO_ADVANTAGE) is (advantage == 0.0)
        return float(packs[0].weights[packs[0].sequence == packs[0].rows.index(0)][0]), sum(float(pack.weights.sum()) for pack in packs)

    (whole, summed), (zero, _), (gone, of_rest) = of_first(False, 1.0), of_first(False, 0.0), of_first(True, 0.0)
    assert zero == whole
    if total is None:
        assert gone == whole == pytest.approx(1 / (8 * 1024.0))  # all rollouts of the step, also those without rows
    else:
        assert gone > whole and summed == pytest.approx(total) and of_rest == pytest.approx(total)


def test_a_rejected_row_is_never_trained() -> None:
    rows = random_rows(4)
    bad = copy.deepcopy(rows[2])
    bad.ids[0] += 1
    assert_close(
        grads_of(trainer(max_rejected_rows=1), [*rows[:2], bad, *rows[3:]]),
        grads_of(trainer(), [*rows[:2], *rows[3:]]),
        atol=0,
        rtol=0,
    )


def test_too_many_rejected_rows_end_the_run_before_anything_is_trained() -> None:
    t, rows = trainer(), random_rows(5)
    rows[1].mask[rows[1].spans[0].start] = 0
    before = weights(t)
    with pytest.raises(InvariantError, match=r"1 rows were rejected, 0 are allowed .*row r1/n0, turn n0"):
        t.step(rows, "k-0")
    assert_close(before, weights(t), atol=0, rtol=0)


def test_a_packer_that_is_off_by_one_is_caught_and_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(trained, path):  # type: ignore[no-untyped-def]
        sampled = np.flatnonzero(trained)
        return path[sampled], sampled

    monkeypatch.setattr(packing, "loss_terms", off_by_one)
    t, rows = trainer(max_rejected_rows=99), random_rows(6)
    before = weights(t)
    report = t.step(rows, "k-0")
    assert set(report.states.values()) == {RowState.REJECTED} and not report.updated
    assert "loss terms are not at the row's trained tokens" in next(iter(report.reasons.values()))
    assert_close(before, weights(t), atol=0, rtol=0)


def test_the_proof_is_of_the_packed_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows arrive whole and are mixed up in packing: only the packed check can see it."""
    real = step_module.pack_rows

    def swaps_two_rows(*args):  # type: ignore[no-untyped-def]
        packs = real(*args)
        for pack in packs:
            pack.rows.reverse()
        return packs

    monkeypatch.setattr(step_module, "pack_rows", swaps_two_rows)
    rows = random_rows(7, rollouts=4)
    report = trainer(max_rejected_rows=99, micro_batch_tokens=4096).step(rows, "k-0")
    assert list(report.states.values()).count(RowState.REJECTED) == 4


def test_b12_ratio_and_gap_are_zero_on_policy_at_any_temperature() -> None:
    t, rows = trainer(), random_rows(8)
    for row in rows:
        row.temperature = 0.6
    metrics = t.step(sampled_by(t.policy, rows), "k-0").metrics
    assert metrics["logprob_gap/max"] < 1e-5 and metrics["logprob_gap/kl"] < 1e-9 and metrics["ratio"] == pytest.approx(1)
    assert metrics["clip_ratio"] == 0 and metrics["capped_ratio"] == 0


def test_d19_fresh_and_older_tokens_are_measured_apart() -> None:
    t = trainer()
    fresh = sampled_by(t.policy, random_rows(9, version="k-4"))
    older = random_rows(10, version="k-2")
    for i, row in enumerate(older):
        row.row_id, row.rollout_id, row.group_id = f"old{i}", f"old{i}", "old"
    metrics = t.step([*fresh, *older], "k-4").metrics
    assert metrics["logprob_gap/max"] < 1e-5 < 0.1 < metrics["mismatch/stale/mean"]
    assert metrics["logprob_gap/tokens"] == sum(row.trained.sum() for row in fresh)
    assert metrics["mismatch/stale/over_10_percent"] > 0.5
    assert metrics["staleness/max"] == 2 and 0 < metrics["staleness/mean"] < 2


def test_d18_capped_tokens_are_counted() -> None:
    t = trainer()
    rows = sampled_by(t.policy, random_rows(11, rollouts=1))
    at = rows[0].spans[0].start
    rows[0].logprobs[at] = -30.0
    (row,) = rows
    part = slice(row.spans[0].start, row.spans[0].end)
    from capture_proxy.trace import hash_sample

    object.__setattr__(row.spans[0], "sample_hash", hash_sample(row.ids[part], row.logprobs[part], row.mask[part]))
    metrics = t.step(rows, "k-0").metrics
    assert metrics["capped_ratio"] == pytest.approx(1 / row.trained.sum())
    assert math.isfinite(metrics["grad_norm"]) and math.isfinite(metrics["loss"])


def test_d16_metrics_do_not_depend_on_the_order_of_micro_batches() -> None:
    rows = random_rows(12)
    rows[0].stale[rows[0].spans[0].start : rows[0].spans[-1].end] = 1
    size = max(len(row) for row in rows)
    a = trainer(micro_batch_tokens=size).step(rows, "k-0").metrics
    b = trainer(micro_batch_tokens=size).step(rows[::-1], "k-0").metrics
    for name in a:
        if not name.startswith(("seconds/", "tokens_per_second")):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name


def test_g13_a_gradient_that_is_not_finite_changes_nothing_and_is_reported() -> None:
    t = trainer(max_skipped_steps=1)
    rows = random_rows(13)
    rows[0].advantage = 1e38
    rows[1].advantage = -1e38
    before, updates = weights(t), t.updater.updates
    report = t.step(rows, "k-0")
    assert not report.updated and report.metrics["updates_skipped"] == 1 and t.updater.updates == updates
    assert set(report.states.values()) == {RowState.REJECTED} and "not finite" in next(iter(report.reasons.values()))
    assert_close(before, weights(t), atol=0, rtol=0)
    with pytest.raises(LearnerError, match="2 steps in a row"):
        t.step(rows, "k-0")


def test_minibatches_are_optimizer_steps_against_the_policy_at_the_start() -> None:
    t = trainer(minibatches=2, epsilon_low=0.01, epsilon_high=0.01, learning_rate=5e-2)
    metrics = t.step(sampled_by(t.policy, random_rows(14)), "k-0").metrics
    assert t.updater.updates == 2 and metrics["updates"] == 2
    assert metrics["clip_ratio"] > 0  # the second minibatch has moved away from pi_old
    assert metrics["logprob_gap/max"] < 1e-5  # measured at the start of the batch


def test_learning_rate_zero_runs_everything_and_moves_nothing() -> None:
    t = trainer(learning_rate=0.0)
    before = weights(t)
    report = t.step(random_rows(15), "k-0")
    assert report.updated and report.metrics["grad_norm"] > 0
    assert_close(before, weights(t), atol=0, rtol=0)


def test_warm_up_then_constant() -> None:
    t = trainer(learning_rate=1.0, warmup_steps=4)
    seen = []
    for t.updater.updates in range(6):
        seen.append(t.updater.learning_rate())
    assert seen == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_decay_goes_to_nothing_at_the_last_update_and_never_below() -> None:
    """Four of warm-up, then 1 at the fifth of twelve and 0 after the last: a line, and half a cosine through the same ends."""
    line = [scheduled(done, 4, 12, "linear") for done in range(14)]
    assert line == [0.25, 0.5, 0.75, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    cosine = [scheduled(done, 4, 12, "cosine") for done in (4, 8, 12)]
    assert cosine == pytest.approx([1.0, 0.5, 0.0])
    t = trainer(learning_rate=2.0, schedule="linear", total_updates=4)
    t.updater.updates = 1
    assert t.updater.learning_rate() == 1.5
    with pytest.raises(UserError, match="a linear schedule over 4 updates has nothing after 4 of warm-up"):
        trainer(schedule="linear", total_updates=4, warmup_steps=4)


def test_sft_trains_rows_without_advantage_and_makes_them_likelier() -> None:
    t = trainer(objective="sft", learning_rate=3e-3)
    rows = random_rows(16)
    for row in rows:
        row.advantage = 0.0
    losses = [t.step(rows, "k-0").metrics["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1
    expected = np.mean(np.concatenate([row_logprobs(t.policy.model, row.ids.tolist())[np.flatnonzero(row.trained) - 1] for row in rows]))
    assert t.step(rows, "k-0").metrics["loss"] == pytest.approx(-expected, rel=1e-4)


def test_grpo_moves_probability_with_the_advantage() -> None:
    t = trainer(learning_rate=1e-3)
    rows = sampled_by(t.policy, random_rows(17))

    def mean_logprob(row: Row) -> float:
        return float(row_logprobs(t.policy.model, row.ids.tolist())[np.flatnonzero(row.trained) - 1].mean())

    before = [mean_logprob(row) for row in rows]
    t.step(rows, "k-0")
    gain = [(mean_logprob(row) - b) * row.advantage for row, b in zip(rows, before, strict=True)]
    assert sum(gain) > 0


def test_a_row_twice_in_a_batch_is_refused() -> None:
    rows = random_rows(18)
    with pytest.raises(InvariantError, match="twice"):
        trainer().step([*rows, rows[0]], "k-0")


def test_the_first_update_is_adams_with_the_epsilon_that_was_asked_for() -> None:
    """AdamW's first step moves a weight by lr * g / (|g| + epsilon), whatever its betas are (arXiv 1412.6980, algorithm 1)."""
    t = trainer(adam_epsilon=0.1, max_grad_norm=1e9, warmup_steps=0)
    rows = random_rows(5)
    gradient = grads_of(trainer(), rows)
    before = weights(t)
    t.step(rows, "k-0")
    for old, new, g in zip(before, weights(t), gradient, strict=True):
        torch.testing.assert_close(new, old - 1e-2 * g / (g.abs() + 0.1), rtol=1e-4, atol=1e-7)


def scaled(gradient: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
    return [g * factor for g in gradient]


def test_constant_normalisation_divides_by_all_rollouts_times_the_constant() -> None:
    """Dr. GRPO: 1 / (G L) for each token, per token of the step it is 1 / n; G and n count the rollout without advantage too."""
    rows = random_rows(19)
    rows[0].advantage = 0.0
    tokens = sum(int(row.trained.sum()) for row in rows)
    by_token = grads_of(trainer(), rows)
    constant = grads_of(trainer(loss_normalisation="constant", loss_constant=50.0), rows)
    assert_close(constant, scaled(by_token, tokens / (len(rows) * 50.0)))


def test_per_token_advantages_are_those_of_the_loss() -> None:
    """A row whose tokens have advantages 0, 1 and -2 pushes as three rows would, each with its own; at the formula's weight."""
    rows = random_rows(20)
    one = copy.deepcopy(rows[0])
    pattern = np.zeros(len(one), dtype=np.float32)
    pattern[np.flatnonzero(one.trained)] = np.resize([0.0, 1.0, -2.0], int(one.trained.sum()))
    parts = []
    for value in (1.0, -2.0):
        part = copy.deepcopy(one)
        part.advantage = value
        part.token_advantages = np.where(pattern == value, pattern, np.float32(0))
        parts.append(grads_of(trainer(), [part]))
    one.token_advantages = pattern
    assert_close(grads_of(trainer(), [one]), [a + b for a, b in zip(*parts, strict=True)])


def test_rows_without_any_credit_are_not_forwarded() -> None:
    rows = random_rows(21, rollouts=4)
    rows[0].advantage = 0.0
    rows[1].token_advantages = np.zeros(len(rows[1]), dtype=np.float32)
    report = trainer().step(rows, "k-0")
    assert [report.states[row.row_id] for row in rows[:2]] == [RowState.ZERO_ADVANTAGE] * 2
    assert report.metrics["tokens/forwarded"] <= sum(len(row) for row in rows[2:])


def with_reference(seed: int, **spec: Any) -> Trainer:
    defaults: dict[str, Any] = {"model": "-", "run_dir": "-", "lineage": "k", "learning_rate": 1e-2, "micro_batch_tokens": 128}
    return Trainer(tiny_policy(), LearnerSpec(**(defaults | spec)), tiny_policy(seed))


def test_the_kl_term_is_zero_at_the_reference_and_pulls_back_to_it() -> None:
    rows = random_rows(22)
    for row in rows:
        row.advantage = 0.0  # nothing but the KL term
    at_home = with_reference(0, kl_beta=0.5)
    metrics = at_home.step(rows, "k-0").metrics
    assert metrics["kl_reference"] == pytest.approx(0, abs=1e-6) and metrics["rows/trained"] == len(rows)
    assert metrics["grad_norm"] < 1e-4

    away = with_reference(1, kl_beta=0.5, learning_rate=3e-3)
    distances = [away.step(rows, "k-0").metrics["kl_reference"] for _ in range(8)]
    assert distances[-1] < 0.7 * distances[0]
    # k3 by hand on the tokens of the first row, at the start
    trained = np.flatnonzero(rows[0].trained) - 1
    pi, reference = (row_logprobs(tiny_policy(seed).model, rows[0].ids.tolist())[trained].double() for seed in (0, 1))
    by_hand = (torch.exp(reference - pi) - 1 - (reference - pi)).mean()
    alone_first = with_reference(1, kl_beta=0.5).step(rows[:1], "k-0").metrics["kl_reference"]
    assert alone_first == pytest.approx(float(by_hand), rel=1e-3)


@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "cispo", "gspo", "dppo_tv", "dppo_kl"])
def test_every_objective_takes_a_step(name: str) -> None:
    t = trainer(objective=name, minibatches=2)
    before = weights(t)
    report = t.step(sampled_by(t.policy, random_rows(23)), "k-0")
    assert report.updated and math.isfinite(report.metrics["loss"])
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(t), strict=True))


def test_gspo_ratios_do_not_depend_on_how_rows_are_packed() -> None:
    rows = random_rows(24)
    one = grads_of(trainer(objective="gspo", ratio="behaviour", epsilon_low=0.9, epsilon_high=9.0, micro_batch_tokens=4096), rows)
    size = max(len(row) for row in rows)
    many = grads_of(trainer(objective="gspo", ratio="behaviour", epsilon_low=0.9, epsilon_high=9.0, micro_batch_tokens=size), rows)
    assert_close(one, many)


def test_every_token_that_could_train_is_in_one_counted_state() -> None:
    rows = random_rows(25, rollouts=6)
    rows[0].advantage = 0.0
    rows[0].stale[rows[0].spans[0].start] = 1
    rows[1].stale[:] = 1
    rows[2].logprobs[rows[2].spans[0].start] -= 0.5
    rows[3].stale[rows[3].spans[0].start] = 1
    long = build_rows(trace(turn("l", [1] * 100, [2] * 100)), "long", "g7")[0]
    long.advantage = 1.0
    metrics = trainer(max_rejected_rows=1).step([*rows, long], "k-0").metrics
    count = {row.row_id: int(row.mask.sum()) for row in [*rows, long]}
    by_state = {state: metrics[f"tokens/{state}"] for state in RowState}
    assert by_state == {
        "trained": count[rows[3].row_id] - 1 + count[rows[4].row_id] + count[rows[5].row_id],
        "stale": 1 + count[rows[1].row_id] + 1,
        "oversize": 100,
        "zero_advantage": count[rows[0].row_id] - 1,
        "rejected": count[rows[2].row_id],
    }
    assert sum(by_state.values()) == sum(count.values())


def test_the_mismatch_is_split_by_cause_and_the_worst_rows_are_named() -> None:
    t = trainer()
    fresh = sampled_by(t.policy, random_rows(26, version="k-4"))
    older = random_rows(27, version="k-2")
    for i, row in enumerate(older):
        row.row_id, row.rollout_id, row.group_id = f"old{i}", f"old{i}", "old"
    raw = sampled_by(t.policy, random_rows(28, version="k-4"))  # logprobs at temperature 1, but sampled at 0.5: raw, not processed
    for i, row in enumerate(raw):
        row.row_id, row.rollout_id, row.group_id, row.temperature = f"raw{i}", f"raw{i}", "raw", 0.5
    report = t.step([*fresh, *older, *raw], "k-4")
    metrics = report.metrics
    assert sum(metrics[f"mismatch/{cause}/tokens"] for cause in CAUSES) == metrics["tokens/trained"]
    assert metrics["mismatch/numeric/max"] < 1e-5
    assert metrics["mismatch/temperature/mean"] > 0.1 and metrics["mismatch/stale/mean"] > 0.1
    assert metrics["mismatch/kv_mixed/tokens"] == metrics["mismatch/template/tokens"] == 0
    assert len(report.worst) == 10
    assert {entry["row_id"] for entry in report.worst[: len(raw)]} == {row.row_id for row in raw}
    first = report.worst[0]
    row = next(row for row in raw if row.row_id == first["row_id"])
    assert first["worst"]["engine"] == pytest.approx(float(row.logprobs[first["worst"]["position"]]))
    assert first["worst"]["token"] == row.ids[first["worst"]["position"]] and first["worst"]["cause"] == "temperature"
