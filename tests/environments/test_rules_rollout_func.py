"""rollout_func (rule 17): what it returns trains only where the proxy captured it, or where the user vouches for it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from environments.bench import PLAY, Bench, call

from capture_proxy.trace import TrainingTrace
from harness_rl import GRPOConfig, GRPOTrainer
from harness_rl.errors import Cause, UserError
from harness_rl.learner.rows import build_rows, verify_row
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.environment_factory import EnvironmentSessionFactory
from harness_rl.sessions.rollout_func import BudgetSpent
from harness_rl.sessions.rollout_func_session import UsersLoop


class Tokenizer:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        pieces = self._bench.engine.tokenizer.pieces
        return "".join(pieces[i] for i in ids if i < len(pieces))


def loop(bench: Bench, function: Any, trust: bool = False) -> UsersLoop:
    trainer = SimpleNamespace(
        processing_class=Tokenizer(bench), args=SimpleNamespace(num_generations=4), state=SimpleNamespace(global_step=7)
    )
    return UsersLoop(function, trainer, trust)


def one(**_: Any) -> list[float]:
    return [1.0]


def sampled(answers: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The answers as a rollout function returns them."""
    return {key: [answer[key] for answer in answers] for key in ("prompt_ids", "completion_ids", "logprobs")} | more


async def play(bench: Bench, function: Any, *, trust: bool = False, **options: Any) -> Any:
    factory = bench.factory(rollout_func=loop(bench, function, trust), **{"reward_funcs": one, **options})
    return await bench.play(factory)


def trained(session: Any) -> list[list[int]]:
    rows = build_rows(session.fetch_training_trace(), "r", "g")
    for row in rows:
        verify_row(row)
    return [[int(i) for i in row.ids[row.mask == 1]] for row in rows]


async def test_rule_17_what_generate_gave_is_trained_and_further_keys_reach_the_rewards(bench: Bench):
    seen: dict[str, Any] = {}

    def rollout(prompts, trainer):
        seen["prompts"], seen["step"], seen["size"] = prompts, trainer.state.global_step, trainer.args.num_generations
        return sampled(trainer.generate(prompts), moves=[[3]], game="chess")

    def reward(completions, completion_ids, moves, game, **_):
        seen["reward"] = (completions, completion_ids, moves, game)
        return [0.5]

    bench.engine.say("e4")
    session = await play(bench, rollout, reward_funcs=reward)
    ids = [*bench.engine.tokenizer.encode("e4"), 2]
    assert trained(session) == [ids]
    assert (seen["prompts"], seen["step"], seen["size"]) == ([PLAY], 7, 4)
    assert seen["reward"] == ([[{"role": "assistant", "content": "e4<|im_end|>"}]], [ids], [[3]], ["chess"])
    assert session.verify().env_reward == 0.5
    assert session.outcome().metrics["rollout_func/unproven"] == 0.0


async def test_rule_17_a_conversation_with_env_mask_trains_the_models_tokens(bench: Bench):
    def rollout(prompts, trainer):
        messages = list(prompts[0])
        [first] = trainer.generate([messages])
        messages += [first["message"], {"role": "user", "content": "They took your pawn."}]
        [second] = trainer.generate([messages])
        start = len(first["prompt_ids"])
        completion = (second["prompt_ids"] + second["completion_ids"])[start:]
        between = len(completion) - len(first["completion_ids"]) - len(second["completion_ids"])
        mask = [1] * len(first["completion_ids"]) + [0] * between + [1] * len(second["completion_ids"])
        logprobs = first["logprobs"] + [0.0] * between + second["logprobs"]
        return {"prompt_ids": [first["prompt_ids"]], "completion_ids": [completion], "logprobs": [logprobs], "env_mask": [mask]}

    bench.engine.say("e4", style="chars")
    bench.engine.say("d4")
    session = await play(bench, rollout)
    tokens = bench.engine.tokenizer
    assert trained(session) == [[*tokens.encode_chars("e4"), 2, *tokens.encode("d4"), 2]]


async def test_rule_17_what_is_not_returned_is_context_only_and_a_narrower_mask_holds(bench: Bench):
    """An opponent that is asked through the same session is not trained; nor is a token that the function masks."""

    def rollout(prompts, trainer):
        [mine] = trainer.generate(prompts)
        trainer.generate([[{"role": "user", "content": "You are the opponent."}]])
        return sampled([mine], env_mask=[[0] + [1] * (len(mine["completion_ids"]) - 1)])

    bench.engine.say("one two")
    bench.engine.say("resign")
    session = await play(bench, rollout)
    assert trained(session) == [[*bench.engine.tokenizer.encode("one two")[1:], 2]]
    other = session.fetch_training_trace().turns[1]
    assert (other.metadata["mask_reason"], int(other.loss_mask.sum())) == ("discarded", 0)
    record = json.loads((bench.folder / "rollouts" / "e0" / "outcome.json").read_text())
    assert record["capture"]["calls_by_reason"] == {"trained": 1, "discarded": 1}


def altered(change: Any) -> Any:
    def rollout(prompts, trainer):
        return change(sampled(trainer.generate(prompts)))

    return rollout


def other_id(result: dict[str, Any]) -> dict[str, Any]:
    result["completion_ids"][0][0] += 1
    return result


def other_prompt(result: dict[str, Any]) -> dict[str, Any]:
    result["prompt_ids"][0] = result["prompt_ids"][0][1:]
    return result


def other_logprob(result: dict[str, Any]) -> dict[str, Any]:
    result["logprobs"][0][0] -= 0.01
    return result


def no_logprob(result: dict[str, Any]) -> dict[str, Any]:
    result["logprobs"][0][0] = None
    return result


def prompt_trained(result: dict[str, Any]) -> dict[str, Any]:
    """Claims the last prompt token as sampled."""
    prompt = result["prompt_ids"][0]
    result["completion_ids"][0].insert(0, prompt.pop())
    result["logprobs"][0].insert(0, -0.5)
    return result


CHANGES = [other_id, other_prompt, other_logprob, no_logprob, prompt_trained]


@pytest.mark.parametrize("change", CHANGES)
async def test_rule_17_what_was_not_captured_so_is_unproven_and_not_trained(bench: Bench, change):
    bench.engine.say("e4 e5")
    session = await play(bench, altered(change))
    assert trained(session) == []
    assert {turn.metadata["mask_reason"] for turn in session.fetch_training_trace().turns} == {"unproven"}
    assert session.outcome().metrics["rollout_func/unproven"] == 1.0
    assert session.verify().env_reward == 1.0  # it stays in the baseline
    record = json.loads((bench.folder / "rollouts" / "e0" / "outcome.json").read_text())
    assert record["capture"]["calls_by_reason"] == {"unproven": 1}


@pytest.mark.parametrize("change", [change for change in CHANGES if change is not no_logprob])
async def test_rule_17_it_trains_as_returned_where_the_user_vouches_for_it(bench: Bench, change):
    await bench.proxy.release("t-3")
    bench.engine.say("e4 e5")
    returned: list[dict[str, Any]] = []

    def rollout(prompts, trainer):
        returned.append(change(sampled(trainer.generate(prompts))))
        return returned[0]

    session = await play(bench, rollout, trust=True)
    assert trained(session) == [returned[0]["completion_ids"][0]]
    [turn] = session.fetch_training_trace().turns
    assert turn.metadata["weight_versions"] == [["t-3", 0, len(turn.completion_token_ids)]]
    assert (session.outcome().metrics["rollout_func/trusted"], session.outcome().metrics["rollout_func/unproven"]) == (1.0, 0.0)


async def test_rule_17_a_sample_of_another_server_trains_only_if_vouched_for_and_under_one_version(bench: Bench):
    def rollout(prompts, trainer):
        return {"prompt_ids": [[1, 5, 6]], "completion_ids": [[7, 8, 9]], "logprobs": [[-0.1, 0.0, -0.2]], "env_mask": [[1, 0, 1]]}

    with pytest.raises(RolloutFailure, match=r"did not ask trainer\.generate; set rollout\.trust_rollout_func") as caught:
        await play(bench, rollout)
    assert caught.value.cause is Cause.ENVIRONMENT
    session = await play(bench, rollout, trust=True)  # no version was ever released
    assert trained(session) == [] and session.outcome().metrics["rollout_func/unproven"] == 1.0
    await bench.proxy.release("t-3")
    session = await play(bench, rollout, trust=True)
    assert trained(session) == [[7, 9]]


async def test_rule_17_a_training_trace_may_be_returned(bench: Bench):
    captured: list[TrainingTrace] = []

    def rollout(prompts, trainer):
        answers = [*trainer.generate(prompts), *trainer.generate(prompts)]
        turns = [
            {
                "node_id": f"n{index}",
                "prompt_token_ids": answer["prompt_ids"],
                "completion_token_ids": answer["completion_ids"],
                "per_token_logps": answer["logprobs"],
                "loss_mask": [0] * len(answer["prompt_ids"]) + [index] * len(answer["completion_ids"]),
                "request": {},
                "response": {},
                "metadata": {},
            }
            for index, answer in enumerate(answers)
        ]
        captured.append(TrainingTrace.model_validate({"turns": turns}))
        return captured[0]

    bench.engine.say("one")
    bench.engine.say("two")
    session = await play(bench, rollout)
    assert trained(session) == [[*bench.engine.tokenizer.encode("two"), 2]]


async def test_rule_17_tools_may_be_shown_and_the_budget_holds(bench: Bench):
    bench.limits = {"max_calls": 1}
    raised: list[Exception] = []

    def rollout(prompts, trainer):
        def look(where: str) -> str:
            """Look somewhere.

            Args:
                where: Where.
            """
            return where

        answers = trainer.generate(prompts, tools=[look])
        try:
            trainer.generate(prompts)
        except BudgetSpent as error:
            raised.append(error)
        assert answers[0]["message"]["tool_calls"][0]["function"]["name"] == "look"
        return sampled(answers)

    bench.engine.say(call("look", where="up"))
    session = await play(bench, rollout)
    assert len(raised) == 1 and len(trained(session)) == 1


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "it returned a NoneType; return a dict with prompt_ids, completion_ids, logprobs, or a TrainingTrace"),
        ({"prompt_ids": [[1]]}, "its dict lacks completion_ids, logprobs"),
        ({"prompt_ids": [[1], [2]], "completion_ids": [[1]], "logprobs": [[0.0]]}, "prompt_ids: 2 entries for 1 prompt"),
        ({"prompt_ids": [[1]], "completion_ids": [[1.5]], "logprobs": [[0.0]]}, "completion_ids: token ids are whole numbers"),
        ({"prompt_ids": [[1]], "completion_ids": [[1, 2]], "logprobs": [[0.0]]}, "logprobs: 1 values for 2 completion_ids"),
        ({"prompt_ids": [[1]], "completion_ids": [[1]], "logprobs": [["x"]]}, "logprobs: they are numbers"),
        ({"prompt_ids": [[1]], "completion_ids": [[1]], "logprobs": [[0.0]], "env_mask": [[2]]}, "env_mask: 1 values for 1"),
        ({"prompt_ids": [[1]], "completion_ids": [[1]], "logprobs": [[0.0]], "env_mask": [[0]]}, "nothing was sampled"),
    ],
)
async def test_rule_17_any_other_form_is_a_named_failure(bench: Bench, result, words):
    with pytest.raises(RolloutFailure, match=words) as caught:
        await play(bench, lambda prompts, trainer: result, trust=True)
    assert caught.value.cause is Cause.ENVIRONMENT


async def test_rule_17_what_it_raises_fails_its_rollout(bench: Bench):
    def rollout(prompts, trainer):
        raise ConnectionError("the game server is gone")

    with pytest.raises(RolloutFailure, match="rollout_func raised: ConnectionError: the game server is gone"):
        await play(bench, rollout)


def test_rule_17_it_owns_its_environments_and_tools():
    def rollout(prompts, trainer):
        return {}

    for options in ({"tools": [len]}, {"environments": object}):
        with pytest.raises(UserError, match="the loop is yours"):
            EnvironmentSessionFactory(rows=[{"prompt": PLAY}], reward_funcs=one, rollout_func=UsersLoop(rollout, None, False), **options)

    async def later(prompts, trainer):
        return {}

    with pytest.raises(UserError, match="give a plain function"):
        EnvironmentSessionFactory(rows=[{"prompt": PLAY}], reward_funcs=one, rollout_func=UsersLoop(later, None, False))


async def test_the_samples_are_decoded_once_and_beside_the_event_loop(bench: Bench):
    threads: list[threading.Thread] = []

    class Threaded(Tokenizer):
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            threads.append(threading.current_thread())
            return super().decode(ids)

    def rollout(prompts, trainer):
        return sampled(trainer.generate(prompts))

    users = loop(bench, rollout)
    users.trainer.processing_class = Threaded(bench)
    bench.engine.say("e4")
    await bench.play(bench.factory(rollout_func=users, reward_funcs=one))
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


@pytest.mark.parametrize("ask", ["train", "evaluate"])
def test_a_tokenizer_that_cannot_be_had_is_one_line_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ask: str):
    def rollout(prompts, trainer):
        return {}

    def missing(folder: Path) -> None:
        raise UserError("processing_class: transformers is not installed")

    monkeypatch.setattr("harness_rl.trainer.load_tokenizer", missing)
    monkeypatch.setattr("harness_rl.trainer.resolve_model", lambda name: str(tmp_path))
    monkeypatch.setattr("harness_rl.orchestrator.main.resolve_model", lambda name: str(tmp_path))
    monkeypatch.setattr("harness_rl.trainer.run_until_signal", lambda *_: pytest.fail("the run began"))
    rows, args = [{"prompt": PLAY}], GRPOConfig(output_dir=tmp_path / "run", max_steps=1)
    trainer = GRPOTrainer("m", one, args, rows, rows, rollout_func=rollout)
    with pytest.raises(UserError, match="transformers is not installed"):
        getattr(trainer, ask)()
    trainer = GRPOTrainer("m", one, args, rows, rows, rollout_func=rollout, processing_class="tokenizer")
    with pytest.raises(UserError, match=r"a str has no decode\(\), which a rollout_func needs"):
        getattr(trainer, ask)()


def test_rule_17_the_trainer_offers_what_scripts_read():
    def rollout(prompts, trainer):
        return {}

    trainer = GRPOTrainer("m", one, train_dataset=[{"prompt": PLAY}], rollout_func=rollout, processing_class="tokenizer")
    facade = trainer.factory._loop.trainer
    assert (facade.processing_class, facade.args.num_generations, facade.state.global_step) == ("tokenizer", 8, 0)
    assert np.isclose(facade.args.temperature, 1.0)
