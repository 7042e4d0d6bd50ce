"""Everything the learner process is told, in one JSON file. Defaults are visible here and nowhere else; unknown keys are refused.

Imports no torch: the control process writes this file, the learner reads it.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from harness_rl.errors import UserError
from harness_rl.learner.corrections import default_corrections, parse_corrections
from harness_rl.learner.recipes import check_objective


@dataclass
class LearnerSpec:
    model: str
    """Folder in Hugging Face format. With `resume`, the newest complete checkpoint of `run_dir` wins."""
    run_dir: str
    lineage: str
    """Names this process's policies: version = `<lineage>-<step>`. New for every start."""
    engines: list[str] = field(default_factory=list)
    """Base URLs of the engines to sync. Empty: nothing is pushed (a learner alone, for tests and benchmarks)."""
    served_model: str = "policy"
    """Name under which the engines serve the model."""
    resume: bool = False
    seed: int = 0

    objective: str = "grpo"
    """A name of `recipes.RECIPES`, `sft`, or `module:name` or `file.py:name` of the user's own."""
    learning_rate: float = 1e-5
    """May be 0: every part of a step runs, the weights stay."""
    warmup_steps: int = 0
    """Linear from 0; then as `schedule` says."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """constant, or down to 0 at `total_updates`."""
    total_updates: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    """Gradients that are small against it move their weights less: with a large one, noise does not fill every direction."""
    scale_by_signal: bool = False
    """Multiply the learning rate by the gradient's share of signal (see signal.py): where batches do not agree, the weights stay."""
    weight_decay: float = 0.0
    """On matrices only, not on norms and biases."""
    max_grad_norm: float = 1.0
    epsilon_low: float = 0.2
    epsilon_high: float = 0.28
    ratio_max: float = 0.0
    """Largest ratio where the advantage is negative (dual clip), or at all (dppo); 0 = none."""
    ratio: Literal["proximal", "behaviour"] = "proximal"
    corrections: list[str] | None = None
    """See corrections.py; None: `token_truncate` where the ratio is proximal, none for sft."""
    truncation: float = 2.0
    """C in min(pi_old/mu, C), for a `truncate` that names no other."""
    kl_beta: float = 0.0
    """Weight of the KL divergence to the reference policy; 0 loads none."""
    reference_model: str | None = None
    """Folder or hub id; None = `model`, as the run found it."""
    loss_normalisation: Literal["token", "rollout", "constant"] = "token"
    loss_constant: float = 1024.0
    """Tokens per rollout that `constant` divides by, whatever its length."""
    minibatches: int = 1
    """Optimizer steps per batch; groups are kept whole."""
    micro_batch_tokens: int = 2048
    """Tokens of one forward on one rank. A row longer than `longest_row` is `oversize`."""
    packing: Literal["auto", "plain"] = "auto"
    """auto: rows that begin alike share those tokens, where the model's layers allow it; plain: each row lies whole beside the others."""
    logprob_chunk: int = 256
    """Positions of the LM head at once: peak memory is this times the vocabulary."""
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    """Keep what `gradient_checkpointing` keeps of each layer in host memory."""
    lora_rank: int = 0
    """0 trains all weights; else a LoRA adapter of this rank (see lora.py)."""
    lora_alpha: float = 0.0
    """0 = twice the rank."""
    lora_targets: list[str] = field(default_factory=list)
    """Names of linear layers, as peft takes them (`q_proj`); none = all of them but the head."""
    processes: int = 1
    """Of this learner: the model is sharded over them (see sharding.py)."""
    context_parallel: int = 1
    """So many processes side by side share a row that is longer than `micro_batch_tokens` (see context.py)."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """8bit: its state in 8 bits a number, by torchao."""
    offload_optimizer: bool = False
    """Keep float32 parameters, gradients and optimizer state in host memory, and take the optimizer's step there."""
    audit: bool = False
    """Write what the loss consumed to `RUN/audit/step-N.npz` (see audit.py)."""
    max_rejected_rows: int = 0
    """Rows that break invariant 1 a run may hold; one more ends the run. Each is left out of training in any case."""
    max_skipped_steps: int = 2
    """Steps in a row that may be skipped for a gradient that is not finite; one more ends the run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward pass; auto: float32 on CPU, bfloat16 on a GPU. Parameters are always float32."""
    threads: int = 0
    """0 leaves torch's choice."""

    sync_backend: Literal["auto", "gloo", "nccl", "sparse_nccl", "ipc"] = "auto"
    sync_host: str = "127.0.0.1"
    """Address of this machine that the engines reach."""
    sync_mode: Literal["keep", "wait", "abort"] = "keep"
    """What becomes of calls that run when new weights come (see sync/base.py)."""
    sync_kv: Literal["recompute", "keep"] = "recompute"
    sync_every: int = 1
    """Optimizer steps between two pushes."""
    sync_lora: Literal["merged", "adapter"] = "merged"
    """What the engines get of a LoRA policy: all weights with the adapter in them, or the adapter under a name (see sync/adapter.py)."""
    sync_wait_s: float = 60.0
    sync_sleep: bool = False
    """The engines give their memory to this process while it trains."""
    engine_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What is sent; auto: the learner's dtype."""
    sync_timeout_s: float = 300.0
    """Deadline of each call and of each tensor of a sync."""
    probe_tokens: int = 512
    probe_bound: float = 1e-4
    """float32: largest mean |difference| of logprobs between engine and learner."""
    probe_first_bound: float = 0.15
    """Other dtypes: the same for the first sync; later ones may differ 3 times as much as it did, and alarm at 2 times."""

    checkpoint_every: int = 0
    """Steps; 0 = only when asked at the end."""
    keep_checkpoints: int = 2
    push_to_hub: str | None = None
    """Repository of the Hugging Face Hub that gets each checkpoint; None = nothing is uploaded."""
    hub_private: bool = True
    """Of a repository that does not exist yet."""
    hub_timeout_s: float = 600.0
    """Of the last upload, at the end of the run."""

    link_timeout_s: float = 60.0
    """Longest silence of control, which says every few seconds that it lives, while its answer within a sync is awaited."""
    batch_timeout_s: float = 7200.0
    """The same while a batch is: how long one takes to collect has no bound here."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise UserError(f"learner: {name} = {getattr(self, name)} must be above 0")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise UserError(f"learner: {name} = {getattr(self, name)} must not be negative")
        if self.corrections is None:
            self.corrections = [] if self.objective == "sft" else default_corrections(self.ratio)
        try:
            if self.objective != "sft":
                check_objective(self.objective)
            parse_corrections(self.corrections, self.truncation, self.ratio)
        except ValueError as error:
            raise UserError(f"learner: {error}") from None
        if self.processes % self.context_parallel:
            raise UserError(
                f"learner: processes = {self.processes} is not a multiple of context_parallel = {self.context_parallel}; "
                "the processes are divided into groups of that many"
            )
        if self.sync_lora == "adapter" and not self.lora_rank:
            raise UserError("learner: sync_lora = adapter: there is no adapter without lora_rank")
        if self.offload_activations and not self.gradient_checkpointing:
            raise UserError("learner: offload_activations moves what gradient_checkpointing keeps; set gradient_checkpointing too")
        if self.schedule != "constant" and self.total_updates <= self.warmup_steps:
            raise UserError(
                f"learner: a {self.schedule} schedule over {self.total_updates} updates has nothing after {self.warmup_steps} of warm-up; "
                "set run.steps above learner.warmup_steps, or schedule = constant"
            )
        if not self.lineage or "/" in self.lineage:
            raise UserError(f"learner: lineage {self.lineage!r} must be a short name without '/'")

    @property
    def longest_row(self) -> int:
        """Tokens; over several processes a row is padded to two equal pieces for each."""
        return self.micro_batch_tokens if self.context_parallel == 1 else self.context_parallel * 2 * (self.micro_batch_tokens // 2)

    def version(self, step: int) -> str:
        return f"{self.lineage}-{step}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "learner.json") -> LearnerSpec:
        """Raises UserError: not JSON, an unknown or missing key, or a value of the wrong type."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise UserError(f"{where}: expected one JSON object")
        known = [f.name for f in fields(cls)]
        for key in data:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise UserError(
                    f"{where}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else f"; valid: {', '.join(known)}")
                )
        for key in ("model", "run_dir", "lineage"):
            if key not in data:
                raise UserError(f"{where}: {key!r} is missing")
        hints = get_type_hints(cls)
        return cls(**{key: _typed(where, key, value, hints[key]) for key, value in data.items()})

    @classmethod
    def read(cls, path: Path) -> LearnerSpec:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"learner: {path} cannot be read: {error}") from None
        return cls.from_json(text, str(path))


_POSITIVE = (
    *(
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "epsilon_low",
        "epsilon_high",
        "truncation",
        "loss_constant",
        "minibatches",
    ),
    *("micro_batch_tokens", "logprob_chunk", "sync_timeout_s", "probe_tokens", "probe_bound", "probe_first_bound"),
    *("keep_checkpoints", "link_timeout_s", "batch_timeout_s", "sync_every", "sync_wait_s", "hub_timeout_s"),
    *("processes", "context_parallel"),
)
_NOT_NEGATIVE = (
    *("learning_rate", "warmup_steps", "weight_decay", "checkpoint_every", "threads"),
    *("max_rejected_rows", "max_skipped_steps", "ratio_max", "kl_beta", "total_updates", "lora_rank", "lora_alpha"),
)


def _typed(where: str, key: str, value: Any, hint: Any) -> Any:
    if type(None) in get_args(hint):
        return None if value is None else _typed(where, key, value, next(arg for arg in get_args(hint) if arg is not type(None)))
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UserError(f"{where}: {key} = {value!r}; use one of {', '.join(map(repr, get_args(hint)))}")
        return value
    if get_origin(hint) is list:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{where}: {key} must be a list of strings")
        return value
    wrong = isinstance(value, bool) is not (hint is bool) or not isinstance(value, (int, float) if hint is float else hint)
    if wrong:
        raise UserError(f"{where}: {key} = {value!r} must be a {hint.__name__}")
    return float(value) if hint is float else value
