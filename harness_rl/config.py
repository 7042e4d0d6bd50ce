"""The one typed run config. Every deadline, queue size, retry count and limit of a run is a field here, with its unit.

A TOML file, `--set section.key=value` (configfile.py) and the flat TRL-named views of `trl/config.py` all end in one `RunConfig`; nothing
is configured twice. What cannot go together is refused here, in one line. No torch is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness_rl.learner.corrections import parse_corrections
from harness_rl.learner.recipes import RECIPES, check_objective

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM can be started for (`--max-lora-rank`)."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class RunSection(Section):
    name: str = "run"
    """Folder name under `dir`."""
    dir: Path = Path("runs")
    steps: int = Field(20, ge=1)
    """Batches that are trained, each in `learner.minibatches` optimizer steps."""
    seed: int = 0
    """Of the task order and the learner; every sampled call has its own recorded seed."""
    short: bool = False
    """The short form for a continuous-integration machine: few steps, small evals, no reward bar."""
    stop_grace_s: float = Field(30.0, gt=0)
    """On SIGINT or SIGTERM: seconds until what still runs is killed."""
    max_unscorable_steps: int = Field(3, ge=1)
    """The run ends when so many rounds of groups in a row gave nothing to learn from: no reward, or one reward for all of a group."""


class ModelSection(Section):
    name: str = "smollm2-135m"
    """A name of `harness-rl models`, a folder in Hugging Face format, or a hub id."""


class EngineSection(Section):
    url: str | list[str] | None = None
    """A running vLLM, or several that serve the same model; None launches one."""
    python: Path | None = None
    """Interpreter of the torch environment; None = `.venv-torch` beside the control environment, else this one."""
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """0 takes a free port."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on CPU, bfloat16 on a GPU. Of a running engine (`url`): what it was started with; auto: the learner's own. The bound of
    the weights' proof follows from it."""
    max_model_len: int = Field(2048, ge=64)
    max_num_seqs: int = Field(16, ge=1)
    kv_cache_gib: float = Field(1.0, gt=0)
    """CPU only."""
    gpus: str | None = Field(None, pattern=r"^\d+(,\d+)*$")
    """Which of this machine's GPUs it sees, as `"0"` or `"0,1"`; None = all."""
    gpu_memory_fraction: float = Field(0.85, gt=0, le=1)
    threads: int = Field(0, ge=0)
    """CPU only; 0 = the measured plan for this number of cores."""
    tool_call_parser: str = "hermes"
    reasoning_parser: str | None = None
    extra_args: list[str] = []
    start_timeout_s: float = Field(600.0, gt=0)
    """Also how long a running engine (`url`) that no longer answers may take to come back."""
    max_restarts: int = Field(2, ge=0)
    expose_dev: bool = True
    """Start the weight routes. The proxy never exposes them to a sandbox."""

    @property
    def urls(self) -> list[str]:
        """Of running engines; none: one is launched."""
        return [self.url] if isinstance(self.url, str) else list(self.url or [])


class ProxySection(Section):
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    capture: Literal["auto", "tokens", "chat"] = "auto"
    durability: Literal["process", "host"] = "process"
    start_timeout_s: float = Field(30.0, gt=0)
    max_restarts: int = Field(2, ge=0)
    """Of a proxy that died; the rollouts that it served start anew."""
    hold_timeout_s: float = Field(300.0, gt=0)
    """How long a weight update may hold new calls before the agents are told to retry."""


class HarnessSection(Section):
    name: str = "mini-swe-agent"
    model_class: str | None = None
    """None: the harness's default. mini-swe-agent: `light` (default) starts in a tenth of the time; `litellm` is the stock class."""
    config: Path | None = None
    """An ordinary configuration file of the agent, merged over its defaults."""
    step_limit: int = Field(0, ge=0)
    """The agent's own limit of model calls; 0 = none (the proxy's `max_calls` holds anyway)."""


class SandboxSection(Section):
    kind: Literal["local", "none"] = "local"
    """`none`: no environment of a white-box run keeps sandboxes (set by the trainer where it is left out)."""
    memory_mb: int = Field(1024, ge=64)
    cpus: float = Field(1.0, gt=0)
    pids: int = Field(256, ge=16)
    disk_mb: int = Field(512, ge=16)
    download_mb: int = Field(256, ge=1)
    """What one rollout may leave on this machine of its logs and artifacts, in total and by the length of files; the verifier's output may
    take as much again. More is not copied: a log is then missing, and so is an artifact."""
    stop_timeout_s: float = Field(20.0, gt=0)


class RolloutSection(Section):
    num_generations: int = Field(8, ge=2)
    """Rollouts of one task that share a baseline."""
    groups_per_step: int = Field(3, ge=1)
    max_concurrent_rollouts: int = Field(8, ge=1)
    max_staleness: int = Field(2, ge=0)
    """Sampled tokens older than this many optimizer steps are masked `stale`."""
    admission: Literal["eager", "just_in_time"] = "eager"
    """When a group starts that `max_staleness` allows: at once; or, by the measured durations of groups and steps, only so early that it is
    done when the learner asks for it: younger tokens for a learner that is the slower half."""
    delay_stale_share: float = Field(1.0, ge=0, le=1)
    """A full batch, and with it the next update of the weights, waits while more than this share of the work under way would be too old for
    the batch after it. 1 = never."""
    delay_s: float = Field(60.0, gt=0)
    """Longest such wait of one batch."""
    min_fresh_share: float = Field(0.0, ge=0, lt=1)
    """A group under way is given up once no more than this share of its work could still be trained."""
    temperature: float = Field(1.0, gt=0)
    max_output_tokens_per_call: int = Field(128, ge=0)
    """0 = what the engine's window holds."""
    max_conversation_tokens: int = Field(1024, ge=0)
    """Everything after a rollout's first prompt, tool results included; 0 = what the engine's window holds."""
    chat_template_kwargs: dict[str, Any] = {}
    """For the model's chat template, as `enable_thinking = false`."""
    history: Literal["template", "keep_reasoning"] = "template"
    """What the model sees of its earlier thinking: what template and agent show, or all of it, so that every conversation is one row."""
    control_tokens: Literal["as_engine", "split"] = "as_engine"
    """What a control token becomes that a tool's output quotes: one of the engine's, or the text that it is."""
    mask_truncated: bool = False
    """Keep the tokens of a rollout that a limit cut (the last answer's length, or the conversation's) out of the loss. Its reward stays in
    the baseline (DAPO's overlong filtering, arXiv 2503.14476)."""
    max_calls: int = Field(8, ge=0)
    """Answers of the model in one rollout; 0 = no such limit."""
    deadline_s: float = Field(300.0, gt=0)
    """Wall clock of a whole rollout: sandbox, agent, verifier."""
    agent_timeout_s: float = Field(180.0, gt=0)
    max_retries: int = Field(2, ge=0)
    """Of a rollout whose failure is not the policy's."""
    seal_grace_s: float = Field(5.0, ge=0)
    max_group_replacements: float = Field(1.0, ge=0)
    """Zero-variance groups are replaced up to this multiple of `groups_per_step`; then the step is short."""
    advantage_baseline: Literal["mean", "leave_one_out"] = "mean"
    """Of a rollout: the mean reward of its group, or of the group's others (RLOO)."""
    normalise_advantage: Literal["std", "none"] = "std"
    """Divide by the group's standard deviation, or by nothing. A group of one outcome, whose rewards differ by 0.1 at most by what a reward
    function adds, is not divided: that would make a full-size signal of small terms."""
    advantage_function: str | None = None
    """`module:function` or `file.py:function` of your own, in place of baseline and spread: (outcomes, rewards) of a group's scored
    rollouts -> for each a number, or {node_id: a number, or one for each sampled token}. Groups of one reward are still left out."""
    balance_groups: bool = False
    """Train as many rollouts above their group's mean as below it, the best and the worst; the others get advantage 0."""
    shuffle_advantages: bool = False
    """A control: advantages are shuffled inside each group, so that nothing can be learned."""
    shuffle_tasks: bool = True
    trust_rollout_func: bool = False
    """Train what a `rollout_func` returns although the proxy did not capture it (counted as `rollout_func/trusted`)."""


class LearnerSection(Section):
    python: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    learning_rate: float = Field(1e-5, ge=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after its warm-up: constant, or down to 0 at the last step."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = Field(1e-8, gt=0)
    scale_by_signal: bool = False
    """Multiply the learning rate by the share of the gradient on which successive batches agree (arXiv 1812.06162): noise moves nothing."""
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    objective: str = "grpo"
    """grpo, dapo, dr_grpo, cispo, gspo, dppo_tv, dppo_kl, or your own as `module:name` or `file.py:name`. A name sets what is left out
    below to the numbers of its paper (learner/recipes.py)."""
    epsilon_low: float = Field(0.2, gt=0)
    epsilon_high: float = Field(0.28, gt=0)
    ratio_max: float = Field(0.0, ge=0)
    """Upper bound of the ratio where the advantage is negative (dual clip; TRL's `delta`); 0 = none."""
    ratio: Literal["proximal", "behaviour"] = "proximal"
    """`proximal`: pi/pi_old, the engine's difference corrected apart; `behaviour`: pi/mu for both, as in TRL's asynchronous trainer."""
    corrections: list[str] | None = None
    """Factors on a token's loss from pi_old/mu: `token_truncate`, `token_mask:0.5:5`, `geometric_reject` ... (learner/corrections.py).
    None: `token_truncate` with the proximal ratio, none with the other. [] switches them off."""
    truncation: float = Field(2.0, gt=0)
    """C in min(pi_old/mu, C), for a `truncate` that names no other."""
    kl_beta: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the reference policy; 0 = none, and no second model in memory."""
    reference_model: str | None = None
    """A folder in Hugging Face format or a hub id; None = the model that the run starts from."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch."""
    micro_batch_tokens: int = Field(2048, ge=64)
    """Tokens that one process forwards at once. A longer row is left out as `oversize`, unless `context_parallel` processes share it."""
    loss_normalisation: Literal["token", "rollout", "constant"] = "token"
    """Over the optimizer step: each token alike, each rollout alike, or each token 1 / (rollouts * loss_constant)."""
    loss_constant: float | None = Field(None, gt=0)
    """Tokens; None = rollout.max_conversation_tokens, or engine.max_model_len where that is 0."""
    packing: Literal["auto", "plain"] = "auto"
    """auto: rows that begin alike share those tokens, where the model's layers allow it; plain: nothing is shared."""
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    """Keep what `gradient_checkpointing` keeps of each layer in host memory."""
    lora_rank: int = Field(0, ge=0)
    """0 trains all weights; else a LoRA adapter of this rank, which each weight update and each checkpoint merges. It needs peft."""
    lora_alpha: float = Field(0.0, ge=0)
    """0 = twice the rank."""
    lora_targets: list[str] = []
    """Names of linear layers, as peft takes them (`q_proj`); none = all of them but the head."""
    processes: int = Field(1, ge=1)
    """Of the learner, each with a GPU of its own (or all on the CPU): FSDP2 shards the model over them. One that dies ends them all, and
    they are started again, from the newest checkpoint."""
    context_parallel: int = Field(1, ge=1)
    """So many processes share a row that is longer than `micro_batch_tokens`, up to that many times as long: each holds its part of the
    tokens and of the activations. `processes` is a multiple of it. Models with sliding windows, sinks or linear attention are refused."""
    gpus: str | None = Field(None, pattern=r"^\d+(,\d+)*$")
    """Which of this machine's GPUs the processes take, one each, as `"1,2"`; None = the first ones."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps its state in 8 bits a number; it needs torchao."""
    offload_optimizer: bool = False
    """Keep float32 parameters, gradients and optimizer state in host memory, and take the optimizer's step there."""
    threads: int = Field(0, ge=0)
    audit: bool = False
    """Write every trained row, as the loss consumed it, to RUN/audit/."""
    start_timeout_s: float = Field(300.0, gt=0)
    step_timeout_s: float = Field(1800.0, gt=0)
    """How long it may say nothing while it has a batch or an update to make; while it waits for one, nothing is expected of it."""
    max_restarts: int = Field(2, ge=0)
    """How often a learner that died is started again, from its newest checkpoint."""
    max_rejected_rows: int = Field(0, ge=0)
    """Rows that break invariant 1 a run may hold (each is left out of training); one more stops the run."""


class SyncSection(Section):
    backend: Literal["auto", "gloo", "nccl", "sparse_nccl", "ipc"] = "auto"
    """auto: gloo on a CPU; nccl where engine and learner have GPUs of their own. sparse_nccl: as nccl, but only weights that changed are
    sent. ipc: they share one GPU, of which the engine takes engine.gpu_memory_fraction."""
    mode: Literal["keep", "wait", "abort"] = "keep"
    """What becomes of calls that run when new weights come: frozen, then on under the new ones; first to their end; or ended with what they
    have, and the rest asked for under the new weights. A token always carries the version that sampled it."""
    kv: Literal["recompute", "keep"] = "recompute"
    """What becomes of keys and values of earlier weights: computed again, or kept; then sessions share cached blocks only with sessions
    that began under the same weights."""
    every: int = Field(1, ge=1)
    """Steps (batches) between two pushes; at most rollout.max_staleness + 1."""
    wait_s: float = Field(60.0, gt=0)
    """mode = wait: how long running calls have to end; those that take longer are ended as under abort."""
    lora: Literal["merged", "adapter"] = "merged"
    """With learner.lora_rank. merged: the engine gets all weights, the adapter in them. adapter: it keeps the base model and gets each
    policy as an adapter beside the earlier ones, under a name that says its version; calls end under the one that they began with."""
    sleep: bool = False
    """backend = ipc: the engine gives its memory to the learner while that trains; agents' calls wait."""
    host: str = "127.0.0.1"
    """Address of the learner that the engines reach, for gloo."""
    timeout_s: float = Field(300.0, gt=0)
    """Of each step of a push."""
    probe_tokens: int = Field(512, ge=1)
    """Tokens of real rows that the engine scores after each sync."""
    probe_bound: float = Field(1e-4, gt=0)
    """fp32: largest mean |difference| of logprobs between engine and learner."""


class CheckpointSection(Section):
    every: int = Field(10, ge=0)
    """Steps between two; a run that dies goes on from the last. 0 = only at the end."""
    keep: int = Field(2, ge=1)
    push_to_hub: str | None = None
    """Repository of the Hugging Face Hub (`owner/name`) that gets each checkpoint as a commit, without the optimizer's state. The token is
    huggingface_hub's own (HF_TOKEN, or `hf auth login`)."""
    hub_private: bool = True
    """Of a repository that does not exist yet."""
    hub_timeout_s: float = Field(600.0, gt=0)
    """Of the last upload, at the end of the run."""


class TasksSection(Section):
    train: Path | None = None
    eval: Path | None = None


class RewardSection(Section):
    function: str | None = None
    """`module:function` or `file.py:function`: outcome -> float | None. One that is not asynchronous is called in
    threads, several at once."""
    deadline_s: float = Field(120.0, gt=0)
    """Of one call of that function; a rollout whose call takes longer is left out as `reward_timeout`."""
    weights: list[float] = []
    """Of `reward_funcs`, in their order; none: 1 each."""
    key: str = "reward"
    """Which of the verifier's numbers is the reward."""
    tampered: Literal["zero", "keep"] = "zero"
    """What a verdict is worth that was given in the agent's own sandbox after the agent had replaced programs that verifiers run: at most
    0, or what the verifier said. A task with a separate verifier is not concerned. Where such a rollout gets no verdict it earns 0 either
    way."""


class EvalSection(Section):
    samples: int = Field(4, ge=1)
    temperature: float = Field(1.0, ge=0)
    """0 takes the likeliest token each time."""
    greedy: bool = False
    """An evaluation by itself (`harness-rl eval`, `evaluate()`) also plays each task once at temperature 0."""
    at_start: bool = False
    at_end: bool = False
    max_tasks: int = Field(0, ge=0)
    """0 = all."""


class WarmupSection(Section):
    enabled: bool = False
    demonstrations: int = Field(72, ge=1)
    """At most so many episodes are captured and trained."""
    batch: int = Field(6, ge=1)
    learning_rate: float = Field(4e-5, gt=0)
    target_low: float = Field(0.25, ge=0, le=1)
    target_high: float = Field(0.5, ge=0, le=1)
    """It ends at the first measurement in the upper half of this range (or above it by less than the measurement's standard error), or at
    one inside it that is followed by one further above."""
    check_from: int = Field(24, ge=0)
    """Demonstrations before the first measurement of success."""
    check_every: int = Field(1, ge=1)
    """Optimizer steps between measurements."""
    check_tasks: int = Field(24, ge=1)
    """Rollouts per measurement."""


class SimulateSection(Section):
    """Of `harness-rl simulate` alone. What follows `learners` is not used where a run's own durations are (`--from RUN`)."""

    engines: int = Field(1, ge=1)
    learners: int = Field(1, ge=1)
    """A step takes so many times less."""
    calls: float = Field(6.0, ge=1)
    """Of one rollout, in the mean."""
    call_s: float = Field(5.0, gt=0)
    """In an engine that has room for it."""
    tokens_per_call: int = Field(200, ge=1)
    gap_s: float = Field(2.0, ge=0)
    """In the sandbox between two calls."""
    start_s: float = Field(5.0, ge=0)
    """Before the first call."""
    verify_s: float = Field(2.0, ge=0)
    """After the last call."""
    spread: float = Field(0.5, ge=0)
    """Of the logarithm of what one rollout takes; 0: all alike."""
    calls_per_engine: float = Field(32.0, gt=0)
    """Calls that one engine runs at that speed; more share it."""
    usable: float = Field(0.8, gt=0, le=1)
    """Share of groups whose rewards differ."""
    step_s: float = Field(60.0, gt=0)
    """Of one learner's step, without its update of the engines."""
    stopped_s: float = Field(2.0, ge=0)
    """Engines stand during an update."""
    probe_s: float = Field(3.0, ge=0)
    """Its proof, during which new calls are held."""


class RunConfig(Section):
    """The whole of a run. `harness-rl train CONFIG --dry-run` prints it resolved."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    proxy: ProxySection = ProxySection()
    harness: HarnessSection = HarnessSection()
    sandbox: SandboxSection = SandboxSection()
    tasks: TasksSection = TasksSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    learner: LearnerSection = LearnerSection()
    sync: SyncSection = SyncSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    warmup: WarmupSection = WarmupSection()
    simulate: SimulateSection = SimulateSection()

    @model_validator(mode="before")
    @classmethod
    def _recipe(cls, data: Any) -> Any:
        """What the objective's paper sets, where the user does not."""
        learner = data.get("learner") if isinstance(data, dict) else None
        objective = learner.get("objective") if isinstance(learner, dict) else getattr(learner, "objective", None)
        data = dict(data) if isinstance(data, dict) else data
        for name, settings in RECIPES.get(str(objective), {}).items():
            given = data.get(name) or {}
            if isinstance(given, Section):
                given = {key: getattr(given, key) for key in given.model_fields_set}
            if isinstance(given, dict):  # else pydantic says what is wrong with it
                data[name] = settings | given
        return data

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        check_objective(self.learner.objective)
        if self.learner.corrections is not None:
            parse_corrections(self.learner.corrections, self.learner.truncation, self.learner.ratio)
        if self.rollout.advantage_function and (self.rollout.balance_groups or self.rollout.shuffle_advantages):
            raise ValueError("rollout.advantage_function gives the advantages; leave balance_groups and shuffle_advantages out")
        if self.rollout.balance_groups and self.rollout.advantage_baseline != "mean":
            raise ValueError("rollout.balance_groups takes the mean as its baseline; leave advantage_baseline out")
        if self.sync.every > self.rollout.max_staleness + 1:
            raise ValueError(
                f"sync.every = {self.sync.every}: the last steps before a push would train on tokens {self.sync.every - 1} steps old, "
                f"and rollout.max_staleness is {self.rollout.max_staleness}; raise it, or push more often"
            )
        if self.sync.sleep and self.sync.backend != "ipc":
            raise ValueError("sync.sleep is for an engine that shares the learner's GPU; set sync.backend = ipc, or leave it out")
        if self.sync.lora == "adapter":
            self._check_adapter()
        if self.learner.gpus and self.learner.gpus.count(",") + 1 < self.learner.processes:
            raise ValueError(f"learner.gpus = {self.learner.gpus} are fewer than learner.processes = {self.learner.processes}")
        if self.learner.processes % self.learner.context_parallel:
            raise ValueError(
                f"learner.processes = {self.learner.processes} is not a multiple of learner.context_parallel = "
                f"{self.learner.context_parallel}; the processes are divided into groups of that many"
            )
        if self.warmup.target_low >= self.warmup.target_high:
            raise ValueError("warmup.target_low must be below warmup.target_high")
        return self

    def _check_adapter(self) -> None:
        """Raises ValueError for what policies that are adapters do without."""
        rank = self.learner.lora_rank
        if not rank:
            raise ValueError("sync.lora = adapter: there is no adapter without learner.lora_rank; set it, or leave sync.lora out")
        if rank > ADAPTER_RANKS[-1]:
            raise ValueError(f"sync.lora = adapter: vLLM takes ranks up to {ADAPTER_RANKS[-1]}, and learner.lora_rank is {rank}; lower it")
        for name in ("backend", "mode", "kv", "wait_s", "sleep"):
            value = getattr(self.sync, name)
            if value != SyncSection.model_fields[name].default:
                raise ValueError(f"sync.{name} = {value} is for weights that are replaced; with sync.lora = adapter leave it out")
        if self.warmup.enabled:
            raise ValueError(
                "sync.lora = adapter: the engine keeps the model that it starts with, and a warm-up would train another one; "
                "run harness-rl warmup first, and set model.name to the folder that it prints"
            )

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name
