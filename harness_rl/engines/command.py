"""vLLM's command line and environment for a run: pure functions of the config, the model and the machine.

Invariant: whatever the device, a served token is sampled from the temperature-scaled model distribution and nothing else, and its logprob
is of that distribution (`processed_logprobs`; the model folder's own sampling defaults are switched off).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness_rl.config import ADAPTER_RANKS, EngineSection, RunConfig, SyncSection
from harness_rl.errors import UserError
from harness_rl.threads import openmp_env, thread_plan

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
PREFILL_TOKENS = 2048
"""Prompt tokens of one engine step on a CPU."""


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters that a server takes by name while it runs."""

    rank: int
    slots: int
    """Different ones whose calls it samples at once; calls under further ones wait."""

    @classmethod
    def of(cls, config: RunConfig) -> Adapters | None:
        """Those of a run; None: the engine gets its policies merged. One slot for each version whose tokens can still be trained, and one
        for that to come."""
        if config.sync.lora != "adapter":
            return None
        rank = next(rank for rank in ADAPTER_RANKS if rank >= config.learner.lora_rank)
        return cls(rank, config.rollout.max_staleness // config.sync.every + 2)


def engine_command(
    section: EngineSection,
    device: Device,
    python: Path,
    model: Path,
    served_model: str,
    port: int,
    sync: SyncSection | None = None,
    adapters: Adapters | None = None,
) -> list[str]:
    """argv of `vllm serve`. `section.extra_args` come last, so that they win. `sync`: how its weights will change; with `adapters` they do
    not, and nothing can change them. Raises UserError."""
    argv = [
        *(str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--served-model-name", served_model),
        *("--host", section.host, "--port", str(port)),
        *("--dtype", dtype(section, device)),
        *("--max-model-len", str(section.max_model_len)),
        *("--max-num-seqs", str(section.max_num_seqs)),
        *("--enable-auto-tool-choice", "--tool-call-parser", section.tool_call_parser),
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        "--enable-prompt-tokens-details",
        "--enable-scale-out",
        "--return-tokens-as-token-ids",  # with this the proxy lets a server that can (0.33) read its answers as it samples them
        "--disable-uvicorn-access-log",
    ]
    if section.reasoning_parser:
        argv += ["--reasoning-parser", section.reasoning_parser]
    if adapters is not None:
        if device == "cuda" and section.dtype == "float32":
            raise UserError("engine.dtype = float32: vLLM's adapters on a GPU are of 16 bits; leave it at auto, or sync.lora at merged")
        argv += ["--enable-lora", "--max-lora-rank", str(adapters.rank), "--max-loras", str(adapters.slots)]
    elif section.expose_dev:
        argv += ["--weight-transfer-config", json.dumps({"backend": weight_backend(device, sync)})]
    if device == "cpu":
        # Compiling costs a minute of start-up and gains little at this size.
        argv += ["--enforce-eager", "--kv-cache-memory-bytes", str(int(section.kv_cache_gib * (1 << 30)))]
        # A prompt that is cut into chunks ends the engine when its request has a seed: vLLM 0.32 then turns the generator back, which the
        # CPU's cannot. Whole prompts only, so that one must fit.
        argv += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(PREFILL_TOKENS, section.max_model_len))]
    else:
        argv += ["--gpu-memory-utilization", str(section.gpu_memory_fraction)]
        if sync is not None and sync.sleep:
            argv.append("--enable-sleep-mode")
    return argv + section.extra_args


def weight_backend(device: Device, sync: SyncSection | None) -> str:
    """The name of vLLM's weight-transfer backend. Raises UserError for one that the device cannot have."""
    chosen = "auto" if sync is None else sync.backend
    if chosen == "auto":
        return "gloo" if device == "cpu" else "nccl"
    if (chosen == "gloo") is not (device == "cpu"):
        raise UserError(f"sync.backend = {chosen} is not for an engine on {device}; leave it at auto")
    return chosen


def dtype(section: EngineSection, device: Device) -> Dtype:
    """float32 on a CPU: there the learner's forward and the engine's agree to 1e-5, which the weight proof relies on."""
    if section.dtype != "auto":
        return section.dtype
    return "float32" if device == "cpu" else "bfloat16"


def engine_environment(
    section: EngineSection,
    device: Device,
    python: Path,
    base: Mapping[str, str],
    sync: SyncSection | None = None,
    adapters: Adapters | None = None,
) -> dict[str, str]:
    """`base` without our own secrets, plus what vLLM needs."""
    env = {key: value for key, value in base.items() if not key.startswith("HARNESS_RL_")}
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # The last makes vLLM sample its base model for any name that it does not know.
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_SKIP_MODEL_NAME_VALIDATION"):
        env.pop(name, None)
    if adapters is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if section.expose_dev:
        env["VLLM_SERVER_DEV_MODE"] = "1"
        if sync is not None and sync.backend == "ipc":
            env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # its IPC backend takes handles as pickles, from the learner alone
    if device == "cuda" and section.gpus:
        env["CUDA_VISIBLE_DEVICES"] = section.gpus
    if device == "cpu":
        # vLLM's own binding reserves a core and pins its worker to the first one, which leaves half of a two-core machine idle.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env |= openmp_env(python, section.threads or thread_plan().engine)
    return env
