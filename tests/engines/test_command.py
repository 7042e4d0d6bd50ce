"""The flags and the environment: pure functions, checked by table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness_rl.config import EngineSection, RunConfig, SyncSection
from harness_rl.engines.command import Adapters, Device, engine_command, engine_environment
from harness_rl.engines.logs import last_error
from harness_rl.errors import UserError

PYTHON = Path("/env/bin/python")


def flags(section: EngineSection, device: Device) -> list[str]:
    return engine_command(section, device, PYTHON, Path("/model"), "policy", 8100)


def value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sampling_is_the_models_own_distribution_on_every_device(device: Device) -> None:
    argv = flags(EngineSection(), device)
    assert value(argv, "--logprobs-mode") == "processed_logprobs"
    assert value(argv, "--generation-config") == "vllm"
    assert {"--enable-scale-out", "--return-tokens-as-token-ids"} <= set(argv) and value(argv, "--host") == "127.0.0.1"


def test_device_flags() -> None:
    cpu, gpu = flags(EngineSection(), "cpu"), flags(EngineSection(), "cuda")
    assert value(cpu, "--dtype") == "float32" and "--enforce-eager" in cpu and "--gpu-memory-utilization" not in cpu
    assert value(gpu, "--dtype") == "bfloat16" and "--enforce-eager" not in gpu and value(gpu, "--gpu-memory-utilization") == "0.85"
    assert value(flags(EngineSection(kv_cache_gib=0.5), "cpu"), "--kv-cache-memory-bytes") == str(1 << 29)
    assert "--no-enable-chunked-prefill" in cpu and "--no-enable-chunked-prefill" not in gpu
    assert value(flags(EngineSection(max_model_len=8192), "cpu"), "--max-num-batched-tokens") == "8192"
    assert json.loads(value(cpu, "--weight-transfer-config")) == {"backend": "gloo"}
    assert json.loads(value(gpu, "--weight-transfer-config")) == {"backend": "nccl"}


def test_an_engine_that_shares_the_learners_gpu_takes_its_weights_by_ipc_and_may_sleep() -> None:
    sync = SyncSection(backend="ipc", sleep=True)
    argv = engine_command(EngineSection(gpu_memory_fraction=0.4), "cuda", PYTHON, Path("/model"), "policy", 8100, sync)
    assert json.loads(value(argv, "--weight-transfer-config")) == {"backend": "ipc"} and value(argv, "--gpu-memory-utilization") == "0.4"
    assert "--enable-sleep-mode" in argv and "--enable-sleep-mode" not in flags(EngineSection(), "cuda")
    assert engine_environment(EngineSection(), "cuda", PYTHON, {}, sync)["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in engine_environment(EngineSection(), "cuda", PYTHON, {}, SyncSection())


@pytest.mark.parametrize(("rank", "every", "flags"), [(1, 1, ("1", "4")), (9, 1, ("16", "4")), (512, 3, ("512", "2"))])
def test_an_engine_that_takes_adapters_has_a_slot_for_each_version_that_trains_and_one_to_come(
    rank: int, every: int, flags: tuple[str, str]
) -> None:
    sections = {"learner": {"lora_rank": rank}, "sync": {"lora": "adapter", "every": every}, "rollout": {"max_staleness": 2}}
    config = RunConfig.model_validate(sections)
    argv = engine_command(config.engine, "cpu", PYTHON, Path("/model"), "policy", 8100, config.sync, Adapters.of(config))
    assert (value(argv, "--max-lora-rank"), value(argv, "--max-loras")) == flags and "--enable-lora" in argv
    assert "--weight-transfer-config" not in argv  # nothing replaces the weights under the adapters
    inherited = {"VLLM_SKIP_MODEL_NAME_VALIDATION": "1"}  # with it the base model would answer for a name that is not there
    env = engine_environment(config.engine, "cpu", PYTHON, inherited, config.sync, Adapters.of(config))
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1" and "VLLM_SKIP_MODEL_NAME_VALIDATION" not in env
    assert Adapters.of(RunConfig.model_validate({"learner": {"lora_rank": rank}})) is None
    with pytest.raises(UserError, match=r"engine.dtype = float32: .* sync.lora at merged"):
        engine_command(EngineSection(dtype="float32"), "cuda", PYTHON, Path("/model"), "policy", 8100, config.sync, Adapters.of(config))


def test_an_engine_that_takes_patches_is_told_so() -> None:
    argv = engine_command(EngineSection(), "cuda", PYTHON, Path("/model"), "policy", 8100, SyncSection(backend="sparse_nccl"))
    assert json.loads(value(argv, "--weight-transfer-config")) == {"backend": "sparse_nccl"}


@pytest.mark.parametrize(("backend", "device"), [("ipc", "cpu"), ("nccl", "cpu"), ("sparse_nccl", "cpu"), ("gloo", "cuda")])
def test_a_transport_that_the_device_has_not_is_refused(backend: str, device: Device) -> None:
    with pytest.raises(UserError, match=rf"sync\.backend = {backend} is not for an engine on {device}"):
        engine_command(EngineSection(), device, PYTHON, Path("/model"), "policy", 8100, SyncSection(backend=backend))


def test_extra_arguments_win_and_weight_routes_can_be_off() -> None:
    argv = flags(EngineSection(extra_args=["--dtype", "bfloat16"], expose_dev=False, reasoning_parser="qwen3"), "cpu")
    assert argv[-2:] == ["--dtype", "bfloat16"] and "--weight-transfer-config" not in argv and value(argv, "--reasoning-parser") == "qwen3"


def test_environment_has_no_secret_of_ours_and_no_binding() -> None:
    base = {"HARNESS_RL_LINK_TOKEN": "x", "VLLM_SERVER_DEV_MODE": "1", "HOME": "/root"}
    env = engine_environment(EngineSection(threads=3), "cpu", PYTHON, base)
    assert "HARNESS_RL_LINK_TOKEN" not in env and env["HOME"] == "/root"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and env["OMP_NUM_THREADS"] == "3"
    assert "VLLM_SERVER_DEV_MODE" not in engine_environment(EngineSection(expose_dev=False), "cpu", PYTHON, base)
    assert "OMP_NUM_THREADS" not in engine_environment(EngineSection(), "cuda", PYTHON, base)


def test_it_sees_the_gpus_that_the_config_gives_it() -> None:
    base = {"CUDA_VISIBLE_DEVICES": "5"}
    assert engine_environment(EngineSection(gpus="0,3"), "cuda", PYTHON, base)["CUDA_VISIBLE_DEVICES"] == "0,3"
    assert engine_environment(EngineSection(), "cuda", PYTHON, base)["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", ""),
        ("INFO: starting\n\n", "INFO: starting"),
        ("pydantic_core.ValidationError: 1 validation error for Config\n  Value error, no such backend\n    For further information\n",
         "pydantic_core.ValidationError: 1 validation error for Config Value error, no such backend"),
        ("OSError: [Errno 98] Address already in use\nINFO: shutting down\n", "OSError: [Errno 98] Address already in use"),
        ("RuntimeError: Executor failed.\nfastapi.exceptions.RequestValidationError: 3 validation errors:\n  x\n",
         "RuntimeError: Executor failed."),
        ("usage: vllm serve\nvllm serve: error: unrecognized arguments: --nope\n", "vllm serve: error: unrecognized arguments: --nope"),
        ("(Worker pid=3) torch.OutOfMemoryError: no room\n(APIServer pid=1) RuntimeError: Engine core initialization failed.\n",
         "torch.OutOfMemoryError: no room"),
        ("(EngineCore pid=2) ERROR 11-30 11:46:16 [e.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down.\n"
         "(APIServer pid=1) ERROR 11-30 11:47:17 [hermes.py:117] json.decoder.JSONDecodeError: Unterminated string: line 2 column 43\n",
         "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down."),
        ("(APIServer pid=1) WARNING 11-30 11:26:35 [u.py:255] Found ulimit of 20000. This can cause `OSError: [Errno 24] Too many`\n"
         "(APIServer pid=1) ERROR 11-30 11:27:00 [u.py:2] RuntimeError: the cause\n", "RuntimeError: the cause"),
    ],
)  # fmt: skip
def test_last_error(tmp_path: Path, log: str, line: str) -> None:
    path = tmp_path / "engine.log"
    path.write_text("ValueError: from an earlier start\n" + log)
    assert last_error(path, len("ValueError: from an earlier start\n")) == line


def test_no_log(tmp_path: Path) -> None:
    assert last_error(tmp_path / "none.log") == ""
