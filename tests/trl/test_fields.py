"""TRL's own field lists against the table, and what a value of each kind does."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from harness_rl.config import RunConfig
from harness_rl.configfile import load_config, to_toml
from harness_rl.errors import UserError
from harness_rl.trl.config import LEARNED, AsyncGRPOConfig, GRPOConfig
from harness_rl.trl.docs import render
from harness_rl.trl.fields import ARGUMENTS, ASYNC, COMMON, GRPO, Field, async_fields, grpo_fields
from harness_rl.trl.placement import visible_gpus

ROOT = Path(__file__).resolve().parents[2]
TRL = json.loads((Path(__file__).parent / "trl_1_16_0.json").read_text())
"""Names and literal defaults from the published wheels; `source` names them."""
COMMON_TRL = {**TRL["TrainingArguments"], **TRL["TrainingArguments_4_only"], **TRL["_BaseConfig"]}
GRPO_TRL = {**COMMON_TRL, **TRL["GRPOConfig"]}
ASYNC_TRL = {**COMMON_TRL, **TRL["AsyncGRPOConfig"]}
LATER = {"max_concurrent_rollouts"}
"""Names of later versions that are known here too."""


def test_every_field_of_trls_configs_has_its_place_and_no_other_does():
    assert grpo_fields().keys() == GRPO_TRL.keys()
    assert ASYNC_TRL.keys() <= async_fields().keys()
    assert (COMMON | ASYNC).keys() - LATER <= ASYNC_TRL.keys()


def test_every_argument_of_trls_trainers_has_its_place():
    assert ARGUMENTS.keys() == {*TRL["GRPOTrainer"], *TRL["AsyncGRPOTrainer"]}


@pytest.mark.parametrize(("fields", "theirs"), [(grpo_fields(), GRPO_TRL), (COMMON | ASYNC, ASYNC_TRL)], ids=["grpo", "async"])
def test_the_tables_defaults_are_trls(fields: dict[str, Field], theirs: dict[str, Any]):
    """Defaults that are computed there, and those that mean "nothing" in another word, are not compared."""
    ours = {name: field.default for name, field in fields.items() if name in theirs}
    computed = {name for name, default in theirs.items() if isinstance(default, str) and default.startswith("<")}
    same_by_another_word = {
        "gradient_checkpointing",  # of the base class, overridden by TRL's
        "vllm_server_base_url",  # AsyncGRPOConfig: a server on port 8000 must run; here one is launched
    }
    skip = computed | same_by_another_word
    assert {name: value for name, value in ours.items() if name not in skip} == {
        name: value for name, value in theirs.items() if name not in skip and name in ours
    }


def test_every_mapped_field_lands_on_a_setting_of_the_one_config():
    for field in (COMMON | GRPO | ASYNC).values():
        if field.how == "mapped":
            section, key = field.text.split(".")
            assert key in RunConfig.model_fields[section].annotation.model_fields, field


def test_the_docs_are_the_table():
    assert (ROOT / "docs" / "trl.md").read_text() == render(), "run .venv/bin/python -m harness_rl.trl.docs > docs/trl.md"


def every(how: str) -> list[tuple[type, str, Field]]:
    found = []
    for config, fields in ((GRPOConfig, grpo_fields()), (AsyncGRPOConfig, COMMON | ASYNC)):
        found += [(config, name, field) for name, field in fields.items() if field.how == how]
    return found


def unlike(value: Any) -> Any:
    """Something that says more than the default does."""
    if isinstance(value, bool):
        return not value
    return value + 3 if isinstance(value, int | float) else "something"


@pytest.mark.parametrize(("config", "name", "field"), every("refused"), ids=lambda value: value if isinstance(value, str) else "")
def test_a_refused_field_says_what_to_do_and_its_default_is_no_matter(config, name, field):
    with pytest.raises(UserError, match=f"{config.__name__}: {name} = .* is not supported: ") as caught:
        config(**{name: unlike(field.default)})
    assert field.text in str(caught.value) and "\n" not in str(caught.value)
    config(**{name: field.default})
    config(**{name: None})


@pytest.mark.parametrize(("config", "name", "field"), every("accepted"), ids=lambda value: value if isinstance(value, str) else "")
def test_an_accepted_field_is_one_logged_line(config, name, field, caplog):
    plain = config().config
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        made = config(**{name: unlike(field.default)})
    assert len(caplog.messages) == 1 and caplog.messages == made.notes
    assert name in made.notes[0] and field.text in made.notes[0]
    assert made.config == plain
    assert config(**{name: field.default}).notes == []


@pytest.mark.parametrize(("config", "name", "field"), every("mapped"), ids=lambda value: value if isinstance(value, str) else "")
def test_a_mapped_field_is_the_setting(config, name, field):
    value: Any = {
        "gradient_checkpointing": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "reward_weights": [0.5, 2.0],
        "shuffle_dataset": False,
        "mask_truncated_completions": True,
        "vllm_gpu_memory_utilization": 0.5,
        "adam_beta1": 0.5,
        "adam_beta2": 0.5,
    }.get(name, 4)
    section, key = field.text.split(".")
    assert getattr(getattr(config(**{name: value}).config, section), key) == value
    if name in LEARNED:
        assert getattr(getattr(config().config, section), key) == field.default


def get(config: RunConfig, target: str) -> Any:
    section, key = target.split(".")
    return getattr(getattr(config, section), key)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # a step's completions are batch x accumulation, in whole groups
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 16}, {"rollout.groups_per_step": 8, "learner.minibatches": 1}),
        ({"per_device_train_batch_size": 16, "num_generations": 4}, {"rollout.groups_per_step": 4}),
        ({"steps_per_generation": 4}, {"rollout.groups_per_step": 4, "learner.minibatches": 4}),
        ({"generation_batch_size": 32, "max_steps": 10}, {"rollout.groups_per_step": 4, "learner.minibatches": 4, "run.steps": 3}),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 4}, {"rollout.groups_per_step": 4, "learner.minibatches": 1}),
        # budgets
        ({"max_completion_length": 300}, {"rollout.max_conversation_tokens": 300, "rollout.max_output_tokens_per_call": 300}),
        ({"max_completion_length": None}, {"rollout.max_conversation_tokens": 0, "rollout.max_output_tokens_per_call": 0}),
        ({"max_tool_calling_iterations": 5}, {"rollout.max_calls": 6}),
        ({}, {"rollout.max_calls": 0, "rollout.max_conversation_tokens": 512, "rollout.max_concurrent_rollouts": 8}),
        # on-policy
        ({}, {"rollout.max_staleness": 0, "learner.objective": "dapo", "learner.epsilon_high": 0.2, "learner.loss_normalisation": "token"}),
        # the loss
        ({"loss_type": "grpo", "epsilon": 0.1}, {"learner.loss_normalisation": "rollout", "learner.epsilon_high": 0.1}),
        ({"loss_type": "dr_grpo"}, {"learner.objective": "dr_grpo", "learner.epsilon_high": 0.2}),
        ({"loss_type": "cispo"}, {"learner.objective": "cispo", "learner.epsilon_high": 4.0}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"learner.epsilon_high": 4.0}),
        ({"importance_sampling_level": "sequence"}, {"learner.objective": "gspo", "learner.epsilon_high": 4e-4}),
        ({}, {"learner.corrections": ["sequence_mask:0.0:3.0"]}),
        ({"vllm_importance_sampling_mode": "token_truncate"}, {"learner.corrections": ["token_truncate:3.0"]}),
        ({"vllm_importance_sampling_cap": 2.0}, {"learner.corrections": ["sequence_mask:0.0:2.0"]}),
        ({"vllm_importance_sampling_correction": False}, {"learner.corrections": []}),
        ({"beta": 0.04, "delta": 3.0}, {"learner.kl_beta": 0.04, "learner.ratio_max": 3.0}),
        ({"scale_rewards": False}, {"rollout.normalise_advantage": "none"}),
        # optimizer
        ({"max_steps": 40, "warmup_steps": 0.25}, {"learner.warmup_steps": 10, "learner.schedule": "linear"}),
        ({"max_steps": 40, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine"}, {"learner.warmup_steps": 4, "learner.schedule": "cosine"}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 7}, {"learner.warmup_steps": 7, "learner.schedule": "constant"}),
        ({"bf16": False}, {"learner.dtype": "float32"}),
        ({"bf16": True}, {"learner.dtype": "auto"}),
        ({"use_cpu": True}, {"learner.device": "cpu", "engine.device": "cpu"}),
        # engine
        ({}, {"engine.url": None, "engine.max_model_len": 2048}),
        ({"vllm_mode": "server"}, {"engine.url": "http://127.0.0.1:8000"}),
        ({"vllm_mode": "server", "vllm_server_host": "gpu3", "vllm_server_port": 81}, {"engine.url": "http://gpu3:81"}),
        ({"vllm_mode": "server", "vllm_server_base_url": "http://x:1"}, {"engine.url": "http://x:1"}),
        ({"vllm_mode": "colocate", "use_vllm": True}, {"engine.url": None}),
        ({"vllm_max_model_length": 4096}, {"engine.max_model_len": 4096, "learner.micro_batch_tokens": 4096}),
        ({"vllm_tensor_parallel_size": 2}, {"engine.extra_args": ["--tensor-parallel-size", "2"]}),
        ({"vllm_model_impl": "transformers"}, {"engine.extra_args": ["--model-impl", "transformers"]}),
        # checkpoints and evaluation
        ({"save_strategy": "no"}, {"checkpoint.every": 0}),
        ({"save_steps": 7, "save_total_limit": 3}, {"checkpoint.every": 7, "checkpoint.keep": 3}),
        # ... in optimizer steps, of which a batch may have several
        ({"save_steps": 100, "max_steps": 1000, "steps_per_generation": 4}, {"checkpoint.every": 25, "run.steps": 250}),
        ({"save_steps": 10, "steps_per_generation": 4}, {"checkpoint.every": 3}),
        ({"push_to_hub": True, "hub_model_id": "me/x"}, {"checkpoint.push_to_hub": "me/x", "checkpoint.hub_private": True}),
        ({"push_to_hub": True, "hub_model_id": "me/x", "hub_private_repo": False}, {"checkpoint.hub_private": False}),
        ({"hub_model_id": "me/x"}, {"checkpoint.push_to_hub": None}),
        ({"optim": "adamw_torch_8bit"}, {"learner.optimizer": "adamw_8bit"}),
        ({"eval_strategy": "steps", "eval_steps": 5}, {"eval.at_end": True, "eval.at_start": False}),
        ({"eval_on_start": True}, {"eval.at_end": False, "eval.at_start": True}),
        # data
        ({"train_sampling_strategy": "sequential"}, {"rollout.shuffle_tasks": False}),
        ({"top_k": -1, "min_p": 0.0}, {}),
        ({"output_dir": "runs/wordle"}, {"run.name": "wordle"}),
        # sections win over defaults
        (
            {"rollout": {"groups_per_step": 5}, "learner": {"learning_rate": 0.1}},
            {"rollout.groups_per_step": 5, "learner.learning_rate": 0.1},
        ),
    ],
)
def test_grpo_config_honours(arguments: dict[str, Any], expected: dict[str, Any]):
    config = GRPOConfig(**arguments).config
    assert {target: get(config, target) for target in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"rollout.max_staleness": 4, "rollout.groups_per_step": 1, "rollout.max_concurrent_rollouts": 32}),
        ({}, {"rollout.max_conversation_tokens": 2048, "engine.max_model_len": 3072, "learner.schedule": "constant"}),
        ({"max_staleness": 0, "gradient_accumulation_steps": 4}, {"rollout.max_concurrent_rollouts": 32, "rollout.groups_per_step": 4}),
        ({"per_device_train_batch_size": 1}, {"rollout.groups_per_step": 1, "rollout.shuffle_tasks": False}),
        ({"shuffle_dataset": True}, {"rollout.shuffle_tasks": True}),
        ({"max_inflight_tasks": 12}, {"rollout.max_concurrent_rollouts": 12}),
        ({"max_concurrent_rollouts": 3}, {"rollout.max_concurrent_rollouts": 3}),
        ({"token_budget": 5000}, {"learner.micro_batch_tokens": 5000}),
        ({"dtype": "bfloat16"}, {"learner.dtype": "bfloat16"}),
        ({"vllm_server_base_url": "http://localhost:8000"}, {"engine.url": "http://localhost:8000"}),
        ({"loss_type": "dapo"}, {"learner.objective": "dapo"}),
    ],
)
def test_async_grpo_config_honours(arguments: dict[str, Any], expected: dict[str, Any]):
    config = AsyncGRPOConfig(**arguments).config
    assert {target: get(config, target) for target in expected} == expected


@pytest.mark.parametrize(
    ("gpus", "arguments", "expected"),
    [
        (1, {}, ("ipc", 0.3)),
        (1, {"vllm_gpu_memory_utilization": 0.5}, ("ipc", 0.5)),
        (1, {"engine": {"gpu_memory_fraction": 0.4}}, ("ipc", 0.4)),
        (1, {"sync": {"backend": "gloo"}}, ("gloo", 0.3)),
        (1, {"vllm_mode": "server"}, ("auto", 0.85)),
        (1, {"engine": {"url": "http://x:1"}}, ("auto", 0.85)),
        (1, {"use_cpu": True}, ("auto", 0.85)),
        (1, {"sync": {"lora": "adapter"}, "learner": {"lora_rank": 8}}, ("auto", 0.85)),
        (0, {}, ("auto", 0.85)),
        (2, {}, ("auto", 0.85)),
    ],
)
def test_an_engine_that_is_launched_beside_the_learner_on_one_gpu_shares_it(monkeypatch, tmp_path, gpus, arguments, expected):
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(3))):
        (tmp_path / name).touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    assert visible_gpus(tmp_path) == gpus
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus(tmp_path) == 3
    monkeypatch.setattr("harness_rl.trl.placement.visible_gpus", lambda: gpus)
    config = GRPOConfig(**arguments).config
    assert (config.sync.backend, config.engine.gpu_memory_fraction) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"per_device_train_batch_size": 6}, r"a batch of 6 completions .* must be a multiple of num_generations \(8\)"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "say the same thing"),
        ({"generation_batch_size": 12, "num_generations": 4}, "no whole number of optimizer steps of 8"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type 'polynomial': use one of constant"),
        ({"optim": "adafactor"}, "AdamW is what there is"),
        ({"loss_type": "sapo"}, "loss_type 'sapo': use one of"),
        ({"scale_rewards": "batch"}, "scale_rewards 'batch'"),
        ({"top_k": 50}, "use temperature alone"),
        ({"min_p": 0.1}, "use temperature alone"),
        ({"save_strategy": "best"}, "save_strategy 'best'"),
        ({"vllm_mode": "local"}, "vllm_mode 'local'"),
        ({"vllm_mode": "server", "vllm_tensor_parallel_size": 2}, "give them to your server"),
        ({"max_completion_length": 0}, "max_completion_length 0: give a number of tokens, or None"),
        ({"temperature": 0.0}, "rollout.temperature"),
        ({"num_generation": 4}, "unknown argument 'num_generation'; did you mean 'num_generations'"),
        ({"learning_rate": 1e-5, "learner": {"learning_rate": 1e-4}}, "learning_rate and learner=.* say the same thing"),
        ({"learner": {"learning_rat": 1e-4}}, "did you mean learner.learning_rate"),
    ],
)
def test_what_does_not_fit_is_one_line(arguments: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words) as caught:
        GRPOConfig(**arguments)
    assert "\n" not in str(caught.value)


def test_epochs_count_rows_where_steps_are_not_given():
    config = GRPOConfig(num_train_epochs=2, per_device_train_batch_size=32, warmup_ratio=0.5, save_strategy="epoch")
    resolved = config.for_rows(10)  # 4 groups a step
    assert (resolved.run.steps, resolved.learner.warmup_steps, resolved.checkpoint.every) == (5, 3, 3)
    assert GRPOConfig(max_steps=7).for_rows(10).run.steps == 7
    assert GRPOConfig().for_rows(1).run.steps == 3


def test_a_config_shows_and_takes_trls_names():
    args = GRPOConfig(max_steps=7, learning_rate=1e-5)
    assert (args.max_steps, args.learning_rate, args.max_completion_length, args.per_device_train_batch_size) == (7, 1e-5, 512, 8)
    args.max_steps = 9
    assert (args.max_steps, args.config.run.steps, args.config.learner.learning_rate) == (9, 9, 1e-5)
    with pytest.raises(AttributeError, match="GRPOConfig has no field 'max_step'"):
        _ = args.max_step
    with pytest.raises(UserError, match="did you mean 'max_steps'"):
        args.max_step = 3
    assert args.max_steps == 9


@pytest.mark.parametrize("config", [GRPOConfig, AsyncGRPOConfig])
def test_a_view_reads_back_from_its_file(config, tmp_path):
    made = config(max_steps=3, chat_template_kwargs={"enable_thinking": False, "style": 'a "b"'}, reward_weights=[1.0, 0.5]).config
    (tmp_path / "c.toml").write_text(to_toml(made))
    assert load_config(tmp_path / "c.toml") == made
