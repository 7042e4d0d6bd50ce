"""The white-box trainers as a TRL script sees them, up to the moment at which the run starts."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import harness_rl
from harness_rl import AsyncGRPOConfig, AsyncGRPOTrainer, GRPOConfig, GRPOTrainer
from harness_rl.config import SandboxSection
from harness_rl.errors import HarnessRLError, UserError
from harness_rl.sessions.environments import LocalSandboxes
from harness_rl.trl.callbacks import Callbacks, TrainerState, checked_callbacks
from harness_rl.trl.tokenizer import check_template

TRL = json.loads((Path(__file__).parent / "trl_1_16_0.json").read_text())
PLAY = [{"role": "user", "content": "Play."}]
ROWS = [{"prompt": PLAY, "level": level} for level in range(12)]


class MyEnv:
    """As in TRL's own documentation of environments."""

    def __init__(self) -> None:
        self.score = 0.0

    def reset(self, **kwargs: Any) -> str | None:
        self.score = 0.0
        return None

    def move(self, direction: str) -> str:
        """Move one step.

        Args:
            direction: Where to, "left" or "right".

        Returns:
            What is there.
        """
        self.score += 1.0
        return f"moved {direction}"


def reward(environments: list[MyEnv], **kwargs: Any) -> list[float]:
    return [environment.score for environment in environments]


@pytest.mark.parametrize("trainer", [GRPOTrainer, AsyncGRPOTrainer])
def test_the_signature_begins_with_trls_so_that_positional_arguments_fit(trainer):
    theirs = TRL[trainer.__name__]
    ours = [name for name, parameter in inspect.signature(trainer).parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert ours == theirs


def test_a_script_of_trls_needs_other_imports_only():
    """TRL's documented example: an environment class, a reward function over environments, a data set of conversational prompts."""
    trainer = GRPOTrainer(
        model="smollm2-135m",
        reward_funcs=reward,
        train_dataset=ROWS,
        environment_factory=MyEnv,
        args=GRPOConfig(
            output_dir="runs/t",
            use_vllm=True,
            vllm_mode="colocate",
            chat_template_kwargs={"enable_thinking": False},
            log_completions=True,
            num_generations=4,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_completion_length=256,
            num_train_epochs=1,
        ),
    )
    config = trainer.config
    assert (config.model.name, config.sandbox.kind, config.rollout.max_staleness, config.rollout.groups_per_step) == (
        "smollm2-135m",
        "none",
        0,
        4,
    )
    assert (config.run.steps, trainer.state.max_steps, trainer.state.global_step) == (3, 3, 0)
    assert config.rollout.chat_template_kwargs == {"enable_thinking": False}
    assert trainer.factory.prompt_rows() == ROWS


def test_the_asynchronous_trainer_takes_the_same_script():
    trainer = AsyncGRPOTrainer("smollm2-135m", reward, AsyncGRPOConfig(max_steps=5), ROWS, environment_factory=MyEnv)
    assert (trainer.config.run.steps, trainer.config.rollout.max_staleness, trainer.config.run.name) == (5, 4, "AsyncGRPOConfig")
    assert (trainer.config.rollout.agent_timeout_s, trainer.config.rollout.deadline_s) == (1800.0, 2160.0)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({"agent_timeout_s": 5.0}, (5.0, 6.0)),
        ({"agent_timeout_s": 3600.0}, (3600.0, 4320.0)),
        ({"deadline_s": 60.0}, (50.0, 60.0)),
        ({"agent_timeout_s": 10.0, "deadline_s": 100.0}, (10.0, 100.0)),
    ],
)
def test_one_of_the_two_limits_moves_the_other_so_that_a_conversation_out_of_time_is_scored(given, seconds):
    args = AsyncGRPOConfig(max_steps=5, rollout=given)
    rollout = AsyncGRPOTrainer("m", reward, args, ROWS, environment_factory=MyEnv).config.rollout
    assert (rollout.agent_timeout_s, rollout.deadline_s) == pytest.approx(seconds)


class Boxed(LocalSandboxes, MyEnv):
    """Its instances keep sandboxes of this machine."""


class Limited(Boxed):
    own_sandbox = SandboxSection(memory_mb=100)


@pytest.mark.parametrize(
    ("environment", "given", "words"),
    [
        (MyEnv, {"memory_mb": 2000}, r"sandbox.memory_mb has no effect: no environment here keeps sandboxes"),
        (MyEnv, {"kind": "local", "pids": 20}, r"sandbox.pids has no effect"),
        (Boxed, {"kind": "none"}, r"sandbox.kind = none, and Boxed keeps local sandboxes"),
        (Limited, {"memory_mb": 2000}, r"sandbox=\{'memory_mb': ...\} and Limited\(sandbox=...\) say the same thing"),
    ],
)
def test_a_setting_of_sandboxes_that_would_reach_none_is_refused(environment, given, words):
    with pytest.raises(UserError, match=words):
        GRPOTrainer("m", reward, GRPOConfig(max_steps=3, sandbox=given), ROWS, environment_factory=environment)
    args = GRPOConfig(max_steps=3, sandbox={"stop_timeout_s": 5.0})
    trainer = GRPOTrainer("m", reward, args, ROWS, environment_factory=environment)
    assert trainer.config.sandbox.kind == ("none" if environment is MyEnv else "local")


def test_without_a_config_the_run_is_named_after_the_model():
    trainer = GRPOTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", reward, train_dataset=ROWS, environment_factory=MyEnv)
    assert str(trainer.config.run_dir) == "runs/SmolLM2-135M-Instruct-GRPO"


def test_a_single_environment_may_ask_by_itself():
    class Asks(MyEnv):
        def reset(self, **kwargs: Any) -> str:
            return "What is 1 + 1?"

    trainer = GRPOTrainer("m", reward, GRPOConfig(max_steps=3), environment_factory=Asks)
    assert trainer.factory.prompt_rows() == [{"prompt": [{"role": "user", "content": ""}]}]
    for arguments, words in (
        ({"environment_factory": Asks}, "max_steps must say how long to train"),
        ({"environment_factory": {"a": Asks}, "args": GRPOConfig(max_steps=3)}, "train_dataset is missing"),
        ({"args": GRPOConfig(max_steps=3)}, "train_dataset is missing"),
    ):
        with pytest.raises(UserError, match=words):
            GRPOTrainer("m", reward, **arguments)


def test_a_stream_gives_as_many_rows_as_the_run_can_use():
    def forever():
        number = 0
        while True:
            yield {"prompt": PLAY, "level": number}
            number += 1

    trainer = GRPOTrainer("m", reward, GRPOConfig(max_steps=3, per_device_train_batch_size=16), forever(), environment_factory=MyEnv)
    assert [row["level"] for row in trainer.factory.prompt_rows()] == list(range(6))
    with pytest.raises(UserError, match="train_dataset has no length; set max_steps"):
        GRPOTrainer("m", reward, GRPOConfig(), forever(), environment_factory=MyEnv)


class Dataset:
    """What is used of the `datasets` package's."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


def test_data_sets_are_rows_for_training_and_for_evaluation():
    dataset = Dataset([{"prompt": PLAY, "level": level} for level in (1, 2, 3)])
    trainer = GRPOTrainer("m", reward, GRPOConfig(max_steps=1), dataset, dataset, environment_factory=MyEnv)
    assert [row["level"] for row in trainer.factory.prompt_rows()] == [1, 2, 3]
    assert trainer._eval is not None and len(trainer._eval.prompt_rows()) == 3
    assert trainer._eval.kinds is trainer.factory.kinds  # the same instances


class Model:
    """As a loaded model would be given."""


@dataclass
class Lora:
    """What is read of peft's LoraConfig (tests/learner has the real one)."""

    r: int = 8
    lora_alpha: int = 8
    target_modules: Any = None
    lora_dropout: float = 0.0
    use_dora: bool = False
    peft_type: str = "LORA"
    task_type: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": Model()}, r"model is a Model: save it and its tokenizer with save_pretrained"),
        ({"args": AsyncGRPOConfig()}, "args is a AsyncGRPOConfig; import GRPOConfig from harness_rl"),
        ({"args": {"max_steps": 3}}, "args is a dict; import GRPOConfig from harness_rl"),
        ({"peft_config": object()}, "peft_config is a object; give a peft.LoraConfig"),
        ({"peft_config": Lora(r=4, target_modules=None)}, r"target_modules = None: name the layers in a list"),
        ({"peft_config": Lora(target_modules=["q_proj"], use_dora=True)}, "peft_config: use_dora = True is not supported; leave it out"),
        ({"peft_config": Lora(peft_type="IA3")}, "peft_config: IA3 is not trained here"),
        (
            {"peft_config": Lora(target_modules=["q_proj"]), "args": GRPOConfig(learner={"lora_rank": 4})},
            r"peft_config and learner=\{'lora_rank': ...\} say the same thing",
        ),
        ({"quantization_config": object()}, "quantization_config is not supported"),
        ({"optimizers": (object(), None)}, "optimizers is not supported: leave it out"),
        ({"reward_processing_classes": object()}, "reward models are not loaded here"),
        ({"reward_funcs": "org/reward-model"}, "reward models are not loaded here: serve it"),
        ({"train_dataset": "org/data"}, "train_dataset is a str; give rows"),
        ({"eval_dataset": {"a": ROWS}}, "eval_dataset is a mapping; give one data set"),
        ({"environment_factory": None, "tools": [len]}, "tool len: "),
        ({"callbacks": [object()]}, "callbacks: object has none of on_train_begin"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_starts(arguments, words):
    options: dict[str, Any] = {"model": "m", "reward_funcs": reward, "train_dataset": ROWS, "environment_factory": MyEnv}
    with pytest.raises(UserError, match=words) as caught:
        GRPOTrainer(**{**options, **arguments})
    assert "\n" not in str(caught.value)


def test_a_peft_config_is_the_learners_adapter(caplog: pytest.LogCaptureFixture):
    lora = Lora(r=4, lora_alpha=32, target_modules={"v_proj", "q_proj"}, lora_dropout=0.05, task_type="CAUSAL_LM")
    for kind in (GRPOTrainer, AsyncGRPOTrainer):
        caplog.clear()
        learner = kind("m", reward, train_dataset=ROWS, environment_factory=MyEnv, peft_config=lora).config.learner
        assert (learner.lora_rank, learner.lora_alpha, learner.lora_targets) == (4, 32.0, ["q_proj", "v_proj"])
        assert [line for line in caplog.messages if "peft" in line] == [
            "peft_config: lora_dropout = 0.05 has no effect: the policy that samples has none"
        ]
    everything = GRPOTrainer("m", reward, train_dataset=ROWS, environment_factory=MyEnv, peft_config=Lora(target_modules="all-linear"))
    assert (everything.config.learner.lora_rank, everything.config.learner.lora_targets) == (8, [])


@pytest.mark.parametrize("argument", ["rollout_worker", "weight_transfer"])
def test_swapped_internals_of_the_asynchronous_trainer_are_refused(argument):
    with pytest.raises(UserError, match=f"{argument} is not supported"):
        AsyncGRPOTrainer("m", reward, train_dataset=ROWS, environment_factory=MyEnv, **{argument: object()})


def test_reward_weights_reach_the_functions():
    trainer = GRPOTrainer("m", [reward], GRPOConfig(reward_weights=[0.5]), ROWS, environment_factory=MyEnv)
    assert [entry.weight for entry in trainer.factory.rewards] == [0.5]


class Tokenizer:
    chat_template = "{{ messages }}"


def test_a_processing_class_is_kept_and_another_template_is_refused(tmp_path):
    given = Tokenizer()
    trainer = GRPOTrainer("m", reward, train_dataset=ROWS, environment_factory=MyEnv, processing_class=given)
    assert trainer.processing_class is given
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}\n")
    check_template(given, tmp_path)
    check_template(None, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("another")
    with pytest.raises(UserError, match=r"its chat template is not the one of .*; save the tokenizer beside the model"):
        check_template(given, tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    check_template(given, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "third"}))
    with pytest.raises(UserError, match="its chat template"):
        check_template(given, tmp_path)


def test_save_model_needs_a_trained_one_and_leaves_out_what_only_a_resumed_run_needs(tmp_path):
    trainer = GRPOTrainer("m", reward, train_dataset=ROWS, environment_factory=MyEnv)
    with pytest.raises(UserError, match="nothing is trained yet"):
        trainer.save_model(tmp_path / "out")
    folder = tmp_path / "step-3"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "optimizer.pt", "COMPLETE"):
        (folder / name).write_text(name)
    trainer._trained = folder
    assert trainer.save_model() == folder
    out = trainer.save_model(tmp_path / "out")
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]


def test_evaluate_needs_rows_and_leaves_the_training_run_alone(monkeypatch):
    seen: list[Any] = []

    async def evaluated(config: Any, inputs: Any) -> Any:
        seen.append((config.run.name, len(inputs.eval_rows), config.eval.samples, config.eval.greedy))
        return SimpleNamespace(evaluation=SimpleNamespace(reward=0.5, low=0.4, high=0.6, unscored=1), greedy=None)

    monkeypatch.setattr("harness_rl.trainer.evaluate_only", evaluated)
    monkeypatch.setattr("harness_rl.orchestrator.main.resolve_model", lambda name: f"/models/{name}")
    trainer = GRPOTrainer("m", reward, GRPOConfig(output_dir="runs/a", max_steps=1), ROWS, environment_factory=MyEnv)
    with pytest.raises(UserError, match=r"evaluate\(\) needs an eval_dataset"):
        trainer.evaluate()
    with pytest.raises(UserError, match=r"evaluate\(samples=0\): play one episode of each row or more"):
        trainer.evaluate(ROWS[:3], samples=0)
    found = trainer.evaluate(ROWS[:3], samples=7, greedy=False)
    assert found == {"eval_reward": 0.5, "eval_reward_low": 0.4, "eval_reward_high": 0.6, "eval_unscored": 1.0}
    assert (seen, trainer.config.run.name) == ([("a-eval", 3, 7, False)], "a")


class Recorder:
    def __init__(self, stop_at: int = 99) -> None:
        self.heard: list[Any] = []
        self.stop_at = stop_at

    def on_train_begin(self, args, state, control, **kwargs):
        self.heard.append(("begin", state.global_step))

    def on_step_end(self, args, state, control, **kwargs):
        self.heard.append(("step", state.global_step, args.max_steps))
        control.should_training_stop = state.global_step >= self.stop_at

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.heard.append(("log", logs["reward"], state.log_history[-1]["step"]))

    def on_train_end(self, args, state, control, **kwargs):
        self.heard.append("end")


@pytest.mark.parametrize("asked", [{"eval_strategy": "steps"}, {"eval_on_start": True}, {"eval": {"at_end": True}}])
def test_an_evaluation_of_nothing_is_refused(asked):
    with pytest.raises(UserError, match=r"an evaluation is asked for \(eval_strategy, eval_on_start\), and eval_dataset is missing"):
        GRPOTrainer("m", reward, GRPOConfig(max_steps=3, **asked), ROWS, environment_factory=MyEnv)
    GRPOTrainer("m", reward, GRPOConfig(max_steps=3, **asked), ROWS, ROWS[:2], environment_factory=MyEnv)


def test_a_callback_counts_optimizer_steps_as_max_steps_does():
    recorder = Recorder(stop_at=8)
    args = GRPOConfig(max_steps=12, steps_per_generation=4)
    trainer = GRPOTrainer("m", reward, args, ROWS, environment_factory=MyEnv, callbacks=[recorder])
    assert (trainer.config.run.steps, trainer.state.max_steps) == (3, 12)
    trainer._observer.begun(0)
    assert [trainer._observer.step_ended(step, {"reward": 0.5}) for step in (1, 2)] == [False, True]
    assert [heard[1] for heard in recorder.heard if heard[0] == "step"] == [4, 8]
    assert [line["step"] for line in trainer.state.log_history] == [4.0, 8.0]


def test_callbacks_hear_of_each_step_and_can_end_the_run():
    recorder, state = Recorder(stop_at=2), TrainerState(max_steps=9)
    observer = Callbacks(GRPOConfig(max_steps=9), state, checked_callbacks([recorder]), steps_per_epoch=4.0)
    observer.begun(0)
    assert observer.step_ended(1, {"reward": 0.25}) is False
    assert observer.step_ended(2, {"reward": 0.5}) is True
    observer.saved(2, Path("x"))
    observer.ended()
    assert recorder.heard == [("begin", 0), ("step", 1, 9), ("log", 0.25, 1.0), ("step", 2, 9), ("log", 0.5, 2.0), "end"]
    assert (state.global_step, state.epoch) == (2, 0.5)


def test_transformers_own_callbacks_fit():
    from transformers import TrainerCallback

    class Own(TrainerCallback):
        steps = 0

        def on_step_end(self, args, state, control, **kwargs):
            Own.steps += 1

    observer = Callbacks(GRPOConfig(), TrainerState(), checked_callbacks([Own]))
    observer.begun(0)
    assert observer.step_ended(1, {"reward": 0.0}) is False
    assert Own.steps == 1


def test_an_event_that_never_comes_is_logged(caplog):
    class Evaluates(Recorder):
        def on_evaluate(self, args, state, control, **kwargs): ...

    with caplog.at_level(logging.WARNING):
        checked_callbacks([Evaluates()])
    assert caplog.messages == [
        "callbacks: Evaluates.on_evaluate is never called; the events are on_train_begin, on_step_end, on_log, on_save, on_train_end"
    ]


def test_a_callback_that_raises_ends_the_run_by_its_name():
    class Broken(Recorder):
        def on_log(self, args, state, control, logs=None, **kwargs):
            raise KeyError("loss")

    observer = Callbacks(GRPOConfig(max_steps=3), TrainerState(), checked_callbacks([Broken()]))
    with pytest.raises(HarnessRLError, match=r"callback Broken\.on_log raised KeyError: 'loss'"):
        observer.step_ended(1, {"reward": 1.0})


def test_the_public_names_are_there():
    assert {"GRPOTrainer", "GRPOConfig", "AsyncGRPOTrainer", "AsyncGRPOConfig"} <= set(harness_rl.__all__)
    for name in harness_rl.__all__:
        assert getattr(harness_rl, name).__name__ == name
