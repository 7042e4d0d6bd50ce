"""The trainers under TRL's names. Thin: everything is done by `orchestrator`; what a script says is checked here, before anything starts.

`HarnessAsyncGRPOTrainer` trains inside an unmodified agent, `AsyncGRPOTrainer` and `GRPOTrainer` in environments and with tools whose loop
is ours. All three end in one RunConfig and one run.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from harness_rl.config import RunConfig
from harness_rl.errors import UserError
from harness_rl.models import resolve_model
from harness_rl.orchestrator.evaluate import Evaluation
from harness_rl.orchestrator.main import (
    Inputs,
    Outcome,
    evaluate_only,
    free_name,
    resolve_inputs,
    resumed_config,
    run_until_signal,
    train,
)
from harness_rl.orchestrator.rewards import RewardFunction
from harness_rl.sessions.base import SessionFactory
from harness_rl.sessions.environment_factory import Demonstrations, EnvironmentSessionFactory
from harness_rl.sessions.environments import EnvironmentFactory
from harness_rl.sessions.rewardfuncs import RewardFunc
from harness_rl.sessions.rollout_func import RolloutFunc
from harness_rl.sessions.rollout_func_session import UsersLoop
from harness_rl.shortform import shorten
from harness_rl.trl.callbacks import Callbacks, TrainerState, checked_callbacks
from harness_rl.trl.config import AsyncGRPOConfig, FlatConfig, GRPOConfig
from harness_rl.trl.fields import ARGUMENTS
from harness_rl.trl.peft import from_peft
from harness_rl.trl.tokenizer import check_template, load_tokenizer

log = logging.getLogger(__name__)

Environments = EnvironmentFactory | Mapping[str, EnvironmentFactory] | None
Resume = bool | str | Path | None
Around = Callable[[Coroutine[Any, Any, Outcome]], Coroutine[Any, Any, Outcome]]
"""What is done before and after a run."""
EPISODE_S = 1800.0
"""Wall clock of a conversation in an environment, where none is given: TRL knows no such limit, here every wait has one."""
_NOT_THE_MODEL = ("optimizer*", "rng*", "COMPLETE", "trainer*")
"""Of a checkpoint: what only a resumed run needs."""


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
        self.args = args or AsyncGRPOConfig()
        self._factory = harness_session_factory
        self._rows = None if train_dataset is None else [dict(row) for row in train_dataset]
        self._reward = rollout_reward_fn
        config = self.args.for_rows(None if self._rows is None else len(self._rows))
        self.config = shorten(_with_model(config, model))

    def train(self, resume_from_checkpoint: Resume = None) -> Outcome:
        """Run to the last step. With `resume_from_checkpoint`, go on in a run folder (True: the config's own) from its newest checkpoint.

        Raises HarnessRLError with the cause when the run cannot go on; KeyboardInterrupt after a signal.
        """
        inputs = resolve_inputs(self.config, factory=self._factory(), rows=self._rows, reward_function=self._reward)
        return _run(self.config, inputs, resume_from_checkpoint)


class _EnvironmentTrainer:
    """What both white-box trainers do. A script reads `args`, `state`, `processing_class`, `train_dataset`."""

    CONFIG: ClassVar[type[FlatConfig]]

    def _set_up(
        self,
        model: Any,
        args: FlatConfig | None,
        rewards: RewardFunc | Sequence[RewardFunc] | None,
        train_dataset: Iterable[dict[str, Any]] | None,
        eval_dataset: Any,
        environments: Environments,
        tools: Sequence[Callable[..., Any]] | None,
        callbacks: Iterable[Any] | None,
        processing_class: Any,
        demonstrations: Demonstrations | None,
        rollout_func: RolloutFunc | None,
        peft_config: Any,
        **refused: Any,
    ) -> None:
        name = type(self).__name__
        for argument, value in refused.items():
            if ARGUMENTS[argument].asks(value):
                raise UserError(f"{name}: {argument} is not supported: {ARGUMENTS[argument].text}")
        if not isinstance(model, str | Path):
            raise UserError(
                f"{name}: model is a {type(model).__name__}: save it and its tokenizer with save_pretrained, and give the folder"
            )
        if args is not None and not isinstance(args, self.CONFIG):
            raise UserError(f"{name}: args is a {type(args).__name__}; import {self.CONFIG.__name__} from harness_rl")
        self.model = str(model)
        self.args = args or self.CONFIG(output_dir=f"runs/{Path(self.model).name}-GRPO")
        self.train_dataset = train_dataset
        self._given_processing_class = processing_class
        self._processing_class = processing_class
        rows = _rows(train_dataset, self.args, isinstance(environments, Mapping) or environments is None, name)
        self.config = shorten(_with_model(self.args.for_rows(None if train_dataset is None else len(rows)), self.model))
        if peft_config is not None:
            self._train_adapter(peft_config, name)
        self._set_deadlines()
        updates = self.config.learner.minibatches
        self.state = TrainerState(max_steps=self.config.run.steps * updates, num_train_epochs=self.args.num_train_epochs)
        options: dict[str, Any] = {
            "tools": tuple(tools or ()),
            "reward_funcs": rewards,
            "reward_weights": self.config.reward.weights,
            "demonstrations": demonstrations,
            "trainer_state": self.state,
            "rollout_func": None if rollout_func is None else UsersLoop(rollout_func, self, self.config.rollout.trust_rollout_func),
        }
        self._decodes = rollout_func is not None
        self.factory = EnvironmentSessionFactory(environments, rows=rows, **options)
        self._choose_sandbox(name)
        if eval_dataset is None and self.config.tasks.eval is None and (self.config.eval.at_start or self.config.eval.at_end):
            raise UserError(f"{name}: an evaluation is asked for (eval_strategy, eval_on_start), and eval_dataset is missing; give both")
        self._eval = None if eval_dataset is None else self.factory.on(_eval_rows(eval_dataset, name))
        self._observer = Callbacks(
            self.args,
            self.state,
            checked_callbacks(callbacks),
            steps_per_epoch=max(1.0, len(rows) / self.config.rollout.groups_per_step),
            updates_per_step=updates,
            extra={"model": None, "processing_class": processing_class},
        )

    def _set_deadlines(self) -> None:
        """Reset and rewards get a fifth of what the conversation may take; who gives one of the two limits moves the other with it, so that
        a conversation that runs into its limit is still scored."""
        given, rollout = self.args.sections.get("rollout", {}), self.config.rollout
        if "agent_timeout_s" not in given:
            rollout.agent_timeout_s = rollout.deadline_s / 1.2 if "deadline_s" in given else EPISODE_S
        if "deadline_s" not in given:
            rollout.deadline_s = 1.2 * rollout.agent_timeout_s

    def _choose_sandbox(self, name: str) -> None:
        """Local where an environment keeps sandboxes of this machine, so that they are checked, reclaimed and audited; else none.

        Raises UserError for settings that would have no effect.
        """
        given = self.args.sections.get("sandbox", {})
        limits = sorted(given.keys() - {"kind", "stop_timeout_s"})
        keepers = [kind for kind in self.factory.kinds.values() if kind.keeps_sandboxes]
        if keepers and given.get("kind") == "none":
            raise UserError(f"{name}: sandbox.kind = none, and {keepers[0].label} keeps local sandboxes; leave it out")
        if limits and not keepers:
            raise UserError(f"{name}: sandbox.{limits[0]} has no effect: no environment here keeps sandboxes; leave it out")
        if limits and (own := [kind.label for kind in keepers if kind.own_sandbox]):
            raise UserError(f"{name}: sandbox={{{limits[0]!r}: ...}} and {own[0]}(sandbox=...) say the same thing; give one of them")
        if "kind" not in given:
            self.config.sandbox.kind = "local" if keepers else "none"

    def _train_adapter(self, peft_config: Any, name: str) -> None:
        """Raises UserError."""
        settings, notes = from_peft(peft_config)
        twice = sorted(settings.keys() & self.args.sections.get("learner", {}).keys())
        if twice:
            raise UserError(f"{name}: peft_config and learner={{{twice[0]!r}: ...}} say the same thing; give one of them")
        self.config.learner = self.config.learner.model_copy(update=settings)
        for note in notes:
            log.warning("%s", note)

    @property
    def processing_class(self) -> Any:
        """The script's, or the model's tokenizer, loaded when it is asked for. Raises UserError."""
        if self._processing_class is None:
            self._processing_class = load_tokenizer(Path(resolve_model(self.model)))
        return self._processing_class

    def train(self, resume_from_checkpoint: Resume = None) -> Outcome:
        """Run to the last step. With `resume_from_checkpoint`, go on in a run folder (True: the config's own) from its newest checkpoint.

        Raises HarnessRLError with the cause when the run cannot go on; KeyboardInterrupt after a signal.
        """
        inputs = resolve_inputs(self.config, factory=self.factory, eval_factory=self._eval, observer=self._observer)
        check_template(self._given_processing_class, inputs.model_path)
        self._load_what_is_decoded_with()
        outcome = _run(self.config, inputs, resume_from_checkpoint or self.args.resume_from_checkpoint, self._with_servers)
        self._trained = None if outcome.result is None else outcome.result.checkpoint
        return outcome

    def evaluate(self, eval_dataset: Any = None, *, samples: int | None = None, greedy: bool = True) -> dict[str, float]:
        """`samples` episodes of every row (None: `eval.samples`) with the trained model (before `train()`, the given one), in a run folder
        of its own; with `greedy`, one more of each row at temperature 0. A running engine (`vllm_mode="server"`) is scored with the weights
        that it holds, which one line names: after `train()` those are the trained ones (`sync.lora = adapter`: still the base model's).

        Returns the mean reward as `eval_reward`, its 95 % interval as `eval_reward_low` and `_high`, and how many episodes had none as
        `eval_unscored`; `eval_greedy_reward` and so on of the greedy ones. Raises UserError without a data set.
        """
        name = type(self).__name__
        factory = self._eval if eval_dataset is None else self.factory.on(_eval_rows(eval_dataset, name))
        if factory is None:
            raise UserError(f"{name}: evaluate() needs an eval_dataset")
        if samples is not None and samples < 1:
            raise UserError(f"{name}: evaluate(samples={samples}): play one episode of each row or more")
        config = _with_model(self.config, str(self._trained or self.model))
        about = {"samples": samples or config.eval.samples, "greedy": greedy}
        config = config.model_copy(
            update={
                "run": config.run.model_copy(update={"name": f"{config.run.name}-eval"}),
                "eval": config.eval.model_copy(update=about),
            }
        )
        config.run.name = free_name(config)
        inputs = resolve_inputs(config, factory=self.factory, eval_factory=factory)
        self._load_what_is_decoded_with()
        ended = run_until_signal(lambda: self._with_servers(evaluate_only(config, inputs)), config.run.stop_grace_s)
        assert ended.evaluation is not None, "evaluate_only made it"
        found = {"eval": ended.evaluation} | ({"eval_greedy": ended.greedy} if ended.greedy is not None else {})
        return {key: value for name, evaluation in found.items() for key, value in _numbers(name, evaluation).items()}

    def _load_what_is_decoded_with(self) -> None:
        """A rollout_func's samples become text for reward functions: the tokenizer is loaded once, before anything runs.

        Raises UserError.
        """
        if self._decodes and not hasattr(self.processing_class, "decode"):
            kind = type(self.processing_class).__name__
            raise UserError(f"processing_class: a {kind} has no decode(), which a rollout_func needs; give a tokenizer, or leave it out")

    async def _with_servers(self, work: Coroutine[Any, Any, Outcome]) -> Outcome:
        """The run, once the OpenEnv servers have room for it; its environments are given up with it. Raises UserError."""
        try:
            try:
                await self.factory.check_servers(self.config.rollout.max_concurrent_rollouts)
            except BaseException:
                work.close()
                raise
            return await work
        finally:
            await self.factory.close()

    @property
    def has_eval_dataset(self) -> bool:
        return self._eval is not None

    _trained: Path | None = None

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """The trained model, copied to `output_dir` (None: where the run left it). Raises UserError before the end of `train()`."""
        if self._trained is None:
            raise UserError("save_model: nothing is trained yet; call train() first")
        if output_dir is None:
            return self._trained
        shutil.copytree(self._trained, output_dir, ignore=shutil.ignore_patterns(*_NOT_THE_MODEL), dirs_exist_ok=True)
        return Path(output_dir)


class AsyncGRPOTrainer(_EnvironmentTrainer):
    """Asynchronous GRPO in environments whose loop is ours. Arguments as in TRL (docs/trl.md says what becomes of each), and
    `demonstrations`: data set row -> the assistant turns that solve it, for a warm start (`warmup={"enabled": True}`).

    Raises UserError for whatever can be known wrong before anything starts.
    """

    CONFIG = AsyncGRPOConfig

    def __init__(
        self,
        model: str | Path,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        args: AsyncGRPOConfig | None = None,
        train_dataset: Iterable[dict[str, Any]] | None = None,
        processing_class: Any = None,
        callbacks: Iterable[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Environments = None,
        rollout_worker: Any = None,
        weight_transfer: Any = None,
        *,
        eval_dataset: Any = None,
        rollout_func: RolloutFunc | None = None,
        demonstrations: Demonstrations | None = None,
    ) -> None:
        self._set_up(
            model,
            args,
            reward_funcs,
            train_dataset,
            eval_dataset,
            environment_factory,
            tools,
            callbacks,
            processing_class,
            demonstrations,
            rollout_func,
            peft_config,
            optimizers=optimizers,
            rollout_worker=rollout_worker,
            weight_transfer=weight_transfer,
        )


class GRPOTrainer(_EnvironmentTrainer):
    """On-policy GRPO: the same as `AsyncGRPOTrainer` with `max_staleness = 0`, under the signature of TRL's GRPOTrainer."""

    CONFIG = GRPOConfig

    def __init__(
        self,
        model: str | Path,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Iterable[dict[str, Any]] | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Iterable[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: Environments = None,
        *,
        demonstrations: Demonstrations | None = None,
    ) -> None:
        self._set_up(
            model,
            args,
            reward_funcs,
            train_dataset,
            eval_dataset,
            environment_factory,
            tools,
            callbacks,
            processing_class,
            demonstrations,
            rollout_func,
            peft_config,
            reward_processing_classes=reward_processing_classes,
            optimizers=optimizers,
            quantization_config=quantization_config,
        )


def _with_model(config: RunConfig, model: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"name": model})})


def _numbers(name: str, evaluation: Evaluation) -> dict[str, float]:
    return {
        f"{name}_reward": evaluation.reward,
        f"{name}_reward_low": evaluation.low,
        f"{name}_reward_high": evaluation.high,
        f"{name}_unscored": float(evaluation.unscored),
    }


async def _alone(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    return await work


def _run(config: RunConfig, inputs: Inputs, resume: Resume, around: Around = _alone) -> Outcome:
    config = config.model_copy(update={"run": config.run.model_copy()})
    if resume:
        config = resumed_config(config.run_dir if resume is True else Path(resume), config)
    else:
        config.run.name = free_name(config)
    return run_until_signal(lambda: around(train(config, inputs, resume=bool(resume))), config.run.stop_grace_s)


def _rows(dataset: Iterable[dict[str, Any]] | None, args: FlatConfig, needs_rows: bool, name: str) -> list[dict[str, Any]]:
    """The data set's rows; of a stream, as many as the run can use. Without one, a single empty prompt that `reset` fills."""
    steps, groups = args.max_steps, args.config.rollout.groups_per_step
    if dataset is None:
        if needs_rows:
            raise UserError(f"{name}: train_dataset is missing; only a single environment_factory, whose reset() asks, can do without")
        if steps <= 0:
            raise UserError(f"{name}: without a train_dataset, max_steps must say how long to train")
        return [{"prompt": [{"role": "user", "content": ""}]}]
    if isinstance(dataset, str | Mapping):
        raise UserError(f"{name}: train_dataset is a {type(dataset).__name__}; give rows, as datasets.load_dataset(...) makes them")
    if hasattr(dataset, "__len__"):
        return [dict(row) for row in dataset]
    if steps <= 0:
        raise UserError(f"{name}: train_dataset has no length; set max_steps")
    return [dict(row) for row in itertools.islice(dataset, steps * groups)]


def _eval_rows(dataset: Any, name: str) -> list[dict[str, Any]]:
    if isinstance(dataset, Mapping):
        raise UserError(f"{name}: eval_dataset is a mapping; give one data set, and run harness-rl eval for the others")
    return [dict(row) for row in dataset]
