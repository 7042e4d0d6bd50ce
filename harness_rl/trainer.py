"""The Python API: TRL's names over the one run config. Thin: everything is done by `orchestrator`.

`AsyncGRPOConfig` is a flat, TRL-named view of `RunConfig`. What has no TRL name is given by section (`engine=`, `learner=`, ...),
with the names of the TOML file.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness_rl.config import RunConfig, resolve_config
from harness_rl.errors import UserError
from harness_rl.learner.recipes import TRL_LOSS_ARGUMENTS, from_trl
from harness_rl.orchestrator.main import Outcome, free_name, resolve_inputs, resumed_config, run_until_signal, train
from harness_rl.orchestrator.rewards import RewardFunction
from harness_rl.sessions.base import SessionFactory
from harness_rl.shortform import shorten

TRL_NAMES = {
    "max_steps": "run.steps",
    "seed": "run.seed",
    "num_generations": "rollout.num_generations",
    "max_completion_length": "rollout.max_conversation_tokens",
    "max_tool_calling_iterations": "rollout.max_calls",
    "temperature": "rollout.temperature",
    "max_staleness": "rollout.max_staleness",
    "max_concurrent_rollouts": "rollout.max_concurrent_rollouts",
    "learning_rate": "learner.learning_rate",
    "warmup_steps": "learner.warmup_steps",
    "adam_beta1": "learner.adam_beta1",
    "adam_beta2": "learner.adam_beta2",
    "adam_epsilon": "learner.adam_epsilon",
    "weight_decay": "learner.weight_decay",
    "max_grad_norm": "learner.max_grad_norm",
    "gradient_checkpointing": "learner.gradient_checkpointing",
    "token_budget": "learner.micro_batch_tokens",
    "vllm_server_base_url": "engine.url",
    "vllm_server_timeout": "engine.start_timeout_s",
    "weight_sync_timeout": "sync.timeout_s",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
}
"""TRL field -> `section.key`. `output_dir` is the run folder."""


class AsyncGRPOConfig:
    """TRL-named arguments and whole sections, resolved into `.config` (a RunConfig).

        AsyncGRPOConfig(output_dir="runs/first", num_generations=8, max_steps=20, learning_rate=1e-5, engine={"max_model_len": 4096})

    Raises UserError for an unknown name (with the nearest valid one) or a value that does not fit.
    """

    def __init__(self, output_dir: str | Path = "runs/run", **arguments: Any) -> None:
        folder = Path(output_dir)
        data: dict[str, Any] = {"run": {"dir": str(folder.parent), "name": folder.name}}
        loss: dict[str, Any] = {}
        for name, value in arguments.items():
            if name in TRL_NAMES:
                section, key = TRL_NAMES[name].split(".")
                data.setdefault(section, {})[key] = value
            elif name in TRL_LOSS_ARGUMENTS:
                loss[name] = value
            elif name in RunConfig.model_fields and isinstance(value, dict):
                data.setdefault(name, {}).update(value)
            else:
                near = difflib.get_close_matches(name, [*TRL_NAMES, *TRL_LOSS_ARGUMENTS, *RunConfig.model_fields], n=1)
                raise UserError(f"AsyncGRPOConfig: unknown argument {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        try:
            for section, settings in from_trl(loss).items():
                data[section] = settings | data.get(section, {})
        except ValueError as error:
            raise UserError(f"AsyncGRPOConfig: {error}") from None
        self.config = resolve_config(data, [], "AsyncGRPOConfig")


class HarnessAsyncGRPOTrainer:
    """Asynchronous GRPO inside an unmodified agent.

    `harness_session_factory`: a callable without arguments that returns a session factory (a `functools.partial` of one).
    `train_dataset`: rows with the factory's task columns; None takes the factory's own tasks.
    `rollout_reward_fn`: outcome -> float, or None to leave the rollout out; may be async. None takes the verifier's reward.
    """

    def __init__(
        self,
        model: str,
        harness_session_factory: Callable[[], SessionFactory],
        args: AsyncGRPOConfig | None = None,
        train_dataset: Iterable[dict[str, Any]] | None = None,
        rollout_reward_fn: RewardFunction | None = None,
    ) -> None:
        config = (args or AsyncGRPOConfig()).config
        self.config = shorten(config.model_copy(update={"model": config.model.model_copy(update={"name": model})}))
        self._factory = harness_session_factory
        self._rows = None if train_dataset is None else [dict(row) for row in train_dataset]
        self._reward = rollout_reward_fn

    def train(self, resume_from_checkpoint: bool | str | Path = False) -> Outcome:
        """Run to the last step. With `resume_from_checkpoint`, go on in a run folder (True: the config's own) from its newest checkpoint.

        Raises HarnessRLError with the cause when the run cannot go on; KeyboardInterrupt after a signal.
        """
        inputs = resolve_inputs(self.config, factory=self._factory(), rows=self._rows, reward_function=self._reward)
        config = self.config.model_copy(update={"run": self.config.run.model_copy()})
        if resume_from_checkpoint:
            config = resumed_config(config.run_dir if resume_from_checkpoint is True else Path(resume_from_checkpoint), config)
        else:
            config.run.name = free_name(config)
        return run_until_signal(lambda: train(config, inputs, resume=bool(resume_from_checkpoint)), config.run.stop_grace_s)
