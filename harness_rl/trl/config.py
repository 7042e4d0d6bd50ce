"""`GRPOConfig` and `AsyncGRPOConfig`: TRL's names as flat views of the one run config.

Invariant: a field that is left out means what it means in TRL where it changes what is learned, and what is best here where it only
changes speed, memory or logging. Every field goes through the table of `fields.py`; what has no TRL name is given by section (`engine=`,
`learner=`, `rollout=` ... with the names of the TOML file), and nothing may be given twice.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from harness_rl.config import RunConfig
from harness_rl.configfile import resolve_config
from harness_rl.errors import UserError
from harness_rl.learner.recipes import TRL_LOSS_ARGUMENTS, from_trl
from harness_rl.trl.fields import Field, async_fields, grpo_fields
from harness_rl.trl.placement import SHARED_FRACTION, shares_gpu

log = logging.getLogger(__name__)

LEARNED = (
    *("seed", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("num_generations", "temperature", "shuffle_dataset", "max_staleness"),
)
"""Mapped fields whose TRL default holds where they are left out."""
PROMPT_ROOM = 1024
"""Tokens for a prompt in an engine whose window is not given."""
PATIENCE = 100
"""`run.max_unscorable_steps`: TRL goes on, whatever a batch was good for."""
Sections = dict[str, dict[str, Any]]
_OPTIMIZERS: dict[str, dict[str, Any]] = {"adamw_torch": {}, "adamw_torch_fused": {}, "adamw_torch_8bit": {"optimizer": "adamw_8bit"}}
"""TRL's `optim` -> what the learner is told."""


class FlatConfig:
    """TRL-named arguments and whole sections. `.config` is the RunConfig that they make, `.for_rows(n)` that for a data set of n rows."""

    FIELDS: ClassVar[dict[str, Field]]
    LOSS: ClassVar[dict[str, Any]] = {}
    """Of TRL's loss arguments, what holds where none is given."""

    def __init__(self, output_dir: str | Path | None = None, **arguments: Any) -> None:
        given = {name: value for name, value in arguments.items() if name in self.FIELDS}
        sections = {name: value for name, value in arguments.items() if name not in given}
        for name, value in sections.items():
            if name not in RunConfig.model_fields or not isinstance(value, dict):
                near = difflib.get_close_matches(name, [*self.FIELDS, *RunConfig.model_fields], n=1)
                raise UserError(f"{self._name}: unknown argument {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if output_dir is not None:
            given["output_dir"] = output_dir
        self.__dict__.update(arguments=given, sections=sections, notes=self._notes(given))
        for note in self.notes:
            log.warning("%s", note)
        self.__dict__["config"] = self.for_rows(None)

    arguments: dict[str, Any]
    """The TRL fields that were given."""
    sections: Sections
    notes: list[str]
    """One line for each value that has no effect."""
    config: RunConfig

    def __getattr__(self, name: str) -> Any:
        """A TRL field, as given or as TRL has it."""
        if name not in self.FIELDS:
            raise AttributeError(f"{self._name} has no field {name!r}")
        return self.arguments.get(name, self.FIELDS[name].default)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a TRL field, or a section, after all."""
        type(self)(**{name: value})  # says what is wrong with it
        self.__init__(**{**self.arguments, **self.sections, name: value})  # type: ignore[misc]

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _notes(self, given: Mapping[str, Any]) -> list[str]:
        notes = []
        for name, value in given.items():
            field = self.FIELDS[name]
            if not field.asks(value):
                continue
            if field.how == "refused":
                raise UserError(f"{self._name}: {name} = {value!r:.80} is not supported: {field.text}")
            if field.how == "accepted":
                notes.append(f"{self._name}: {name} = {value!r:.80} has no effect: {field.text}")
        return notes

    def for_rows(self, rows: int | None) -> RunConfig:
        """The run config for a data set of so many rows (None: not known yet). Raises UserError."""
        data: Sections = {}

        def put(target: str, value: Any) -> None:
            section, key = target.split(".")
            if name in self.arguments and key in self.sections.get(section, {}):
                raise UserError(f"{self._name}: {name} and {section}={{{key!r}: ...}} say the same thing; give one of them")
            data.setdefault(section, {})[key] = value

        for name, field in self.FIELDS.items():
            if field.how == "mapped" and (self.arguments.get(name) is not None or (name not in self.arguments and name in LEARNED)):
                put(field.text, self.arguments.get(name, field.default))
        try:
            for section, settings in self._honoured(rows).items():
                data.setdefault(section, {}).update(settings)
        except ValueError as error:
            raise UserError(f"{self._name}: {error}") from None
        for section, settings in self.sections.items():
            data.setdefault(section, {}).update(settings)
        return resolve_config(data, [], self._name)

    def _honoured(self, rows: int | None) -> Sections:
        """What takes more than a name. Raises ValueError."""
        sections: Sections = {"run": {"max_unscorable_steps": PATIENCE}, "rollout": {}, "learner": {}, "engine": {}, "eval": {}}
        checkpoint = sections["checkpoint"] = {}
        folder = Path(self.output_dir or f"runs/{self._name}")
        sections["run"] |= {"dir": folder.parent, "name": folder.name}
        groups, minibatches = self._batches()
        sections["rollout"]["groups_per_step"] = groups
        sections["learner"]["minibatches"] = minibatches
        steps = self._steps(rows, groups, minibatches)
        if steps is not None:
            sections["run"]["steps"] = steps
        sections["learner"] |= self._schedule(steps, minibatches) | self._precision()
        length, iterations = self.max_completion_length, self.max_tool_calling_iterations
        if length is not None and length < 1:
            raise ValueError(f"max_completion_length {length}: give a number of tokens, or None for no limit but the engine's window")
        sections["rollout"] |= {"max_conversation_tokens": length or 0, "max_output_tokens_per_call": length or 0}
        sections["rollout"]["max_calls"] = 0 if iterations is None else iterations + 1
        sections["rollout"]["max_concurrent_rollouts"] = self._concurrent(groups)
        if self.top_k not in (0, -1, None) or self.min_p not in (0, None):
            raise ValueError("top_k and min_p cut the distribution whose logprobs are trained; leave them out and use temperature alone")
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise ValueError(f"train_sampling_strategy {self.train_sampling_strategy!r}: use 'random' or 'sequential'")
        if self.train_sampling_strategy == "sequential":
            sections["rollout"]["shuffle_tasks"] = False
        checkpoint |= self._checkpoints(rows, groups, minibatches)
        sections["eval"] |= {"at_end": str(self.eval_strategy) not in ("no", "IntervalStrategy.NO"), "at_start": bool(self.eval_on_start)}
        if self.use_cpu or self.no_cuda:
            sections["learner"]["device"] = sections["engine"]["device"] = "cpu"
        sections["engine"] |= self._engine()
        running = "url" in sections["engine"] or self.sections.get("engine", {}).get("url")
        if not running and not (self.use_cpu or self.no_cuda) and shares_gpu(self.sections):
            sections["sync"] = {"backend": "ipc"}
            if self.arguments.get("vllm_gpu_memory_utilization") is None:
                sections["engine"]["gpu_memory_fraction"] = SHARED_FRACTION
        window = (
            self.sections.get("engine", {}).get("max_model_len") or self.vllm_max_model_length or max(2048, (length or 0) + PROMPT_ROOM)
        )
        sections["engine"]["max_model_len"] = window
        sections["learner"]["micro_batch_tokens"] = window  # no conversation is longer
        for section, settings in self._loss().items():
            sections[section] |= settings
        return sections

    def _batches(self) -> tuple[int, int]:
        """(groups, optimizer steps) of each batch of new samples."""
        update = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise ValueError("generation_batch_size and steps_per_generation say the same thing; give one of them")
        sampled = self.generation_batch_size
        if sampled is None:
            sampled = self.per_device_train_batch_size * (self.steps_per_generation or self.gradient_accumulation_steps)
        sampled = max(sampled, update)
        if sampled % update:
            raise ValueError(f"{sampled} completions are sampled at once, which are no whole number of optimizer steps of {update}")
        if sampled % self.num_generations:
            raise ValueError(
                f"a batch of {sampled} completions (per_device_train_batch_size * gradient_accumulation_steps) must be a multiple of "
                f"num_generations ({self.num_generations}): it holds whole groups"
            )
        return sampled // self.num_generations, sampled // update

    def _steps(self, rows: int | None, groups: int, minibatches: int) -> int | None:
        if self.max_steps is not None and self.max_steps > 0:
            return math.ceil(self.max_steps / minibatches)
        return None if rows is None else max(1, math.ceil(self.num_train_epochs * rows / groups))

    def _schedule(self, steps: int | None, minibatches: int) -> dict[str, Any]:
        kind = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        known = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
        if kind not in known:
            raise ValueError(f"lr_scheduler_type {kind!r}: use one of {', '.join(known)}")
        optim = str(getattr(self.optim, "value", self.optim))
        if optim not in _OPTIMIZERS:
            raise ValueError(f"optim {self.optim!r}: AdamW is what there is ({', '.join(_OPTIMIZERS)})")
        warmup = self.warmup_steps or self.warmup_ratio or 0
        if 0 < warmup < 1:
            warmup = math.ceil(warmup * steps * minibatches) if steps is not None else 0
        return {"schedule": known[kind], "warmup_steps": int(warmup)} | _OPTIMIZERS[optim]

    def _precision(self) -> dict[str, Any]:
        if "dtype" in self.arguments:
            kind = str(self.arguments["dtype"]).removeprefix("torch.")
            if kind not in ("auto", "float32", "bfloat16"):
                raise ValueError(f"dtype {kind!r}: use auto, float32 or bfloat16")
            return {"dtype": kind}
        return {"dtype": "float32"} if self.bf16 is False else {}

    def _checkpoints(self, rows: int | None, groups: int, minibatches: int) -> dict[str, Any]:
        settings: dict[str, Any] = {} if self.save_total_limit is None else {"keep": max(1, self.save_total_limit)}
        if self.push_to_hub and not self.hub_model_id:
            raise ValueError("push_to_hub needs hub_model_id = 'owner/name'")
        if self.push_to_hub:
            settings |= {"push_to_hub": self.hub_model_id, "hub_private": self.hub_private_repo is not False}
        match str(getattr(self.save_strategy, "value", self.save_strategy)):
            case "no":
                return settings | {"every": 0}
            case "epoch":
                return settings | ({} if rows is None else {"every": max(1, math.ceil(rows / groups))})
            case "steps":
                if not float(self.save_steps).is_integer():
                    raise ValueError(f"save_steps {self.save_steps}: give a number of steps")
                return settings | {"every": math.ceil(self.save_steps / minibatches)}
            case other:
                raise ValueError(f"save_strategy {other!r}: use 'no', 'steps' or 'epoch'")

    def _engine(self) -> dict[str, Any]:
        extra: list[str] = []
        if self.vllm_tensor_parallel_size > 1:
            extra += ["--tensor-parallel-size", str(self.vllm_tensor_parallel_size)]
        if self.vllm_model_impl != "vllm":
            extra += ["--model-impl", self.vllm_model_impl]
        settings: dict[str, Any] = {"extra_args": extra} if extra else {}
        if self.vllm_mode not in ("server", "colocate"):
            raise ValueError(f"vllm_mode {self.vllm_mode!r}: use 'colocate' (an engine is launched here) or 'server'")
        if self.vllm_server_base_url is not None:
            settings["url"] = self.vllm_server_base_url
        elif self.vllm_mode == "server":
            host = "127.0.0.1" if self.vllm_server_host == "0.0.0.0" else self.vllm_server_host
            settings["url"] = f"http://{host}:{self.vllm_server_port}"
        if "url" in settings and extra:
            raise ValueError(
                "vllm_tensor_parallel_size and vllm_model_impl are for an engine that is launched here; give them to your server"
            )
        return settings

    def _loss(self) -> Sections:
        """TRL's loss arguments in the learner's words."""
        loss = {name: value for name, value in self.arguments.items() if name in TRL_LOSS_ARGUMENTS}
        if self.arguments.get("vllm_importance_sampling_cap") is not None:
            loss["vllm_importance_sampling_clip_max"] = self.arguments["vllm_importance_sampling_cap"]
        plain = loss.get("loss_type") != "cispo" and loss.get("importance_sampling_level", "token") == "token"
        if plain:  # the others' own papers have better bounds than TRL's one default
            loss.setdefault("epsilon", self.FIELDS["epsilon"].default)
        return from_trl(self.LOSS | loss)

    def _concurrent(self, groups: int) -> int:
        """One step's rollouts run at once."""
        return int(groups * self.num_generations)


class GRPOConfig(FlatConfig):
    """On-policy GRPO under TRL's names: the same engine as `AsyncGRPOConfig`, with `max_staleness = 0`.

        GRPOConfig(output_dir="runs/first", num_generations=8, max_steps=20, learning_rate=1e-5, engine={"max_model_len": 4096})

    Raises UserError for an unknown name (with the nearest valid one), for what is not supported, and for a value that does not fit.
    """

    FIELDS = grpo_fields()
    LOSS: ClassVar[dict[str, Any]] = {"loss_type": "dapo", "vllm_importance_sampling_mode": "sequence_mask"}

    def _honoured(self, rows: int | None) -> Sections:
        sections = super()._honoured(rows)
        sections["rollout"]["max_staleness"] = 0
        return sections


class AsyncGRPOConfig(FlatConfig):
    """Asynchronous GRPO under TRL's names; GRPOConfig's loss and engine fields are taken too. See `GRPOConfig`."""

    FIELDS = async_fields()

    def _batches(self) -> tuple[int, int]:
        """TRL's asynchronous trainer fills micro-batches by tokens; a step here holds at least one whole group."""
        if self.generation_batch_size is None and self.steps_per_generation is None:
            return max(1, math.ceil(self.per_device_train_batch_size * self.gradient_accumulation_steps / self.num_generations)), 1
        return super()._batches()

    def _concurrent(self, groups: int) -> int:
        for name in ("max_concurrent_rollouts", "max_inflight_tasks"):
            if (self.arguments.get(name) or -1) > 0:
                return int(self.arguments[name])
        return int(max(self.max_staleness, 1) * groups * self.num_generations)

    def _honoured(self, rows: int | None) -> Sections:
        sections = super()._honoured(rows)
        if "shuffle_dataset" not in self.arguments:
            sections["rollout"]["shuffle_tasks"] = False  # TRL's asynchronous trainer takes rows in order
        if self.token_budget is not None:
            if self.token_budget <= 0:
                raise ValueError("token_budget: micro-batches are filled by tokens; give a number above 0, or leave it out")
            sections["learner"]["micro_batch_tokens"] = self.token_budget
        return sections
