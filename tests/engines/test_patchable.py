"""Models and servers that vLLM would patch in the wrong place, or not everywhere, are refused before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness_rl.cli import main
from harness_rl.config import EngineSection, RunConfig, SyncSection
from harness_rl.doctor import engine_checks
from harness_rl.engines.patchable import check_patchable
from harness_rl.errors import UserError

DENSE = {"model_type": "qwen3", "hidden_size": 1024, "num_key_value_heads": 8}


def model(folder: Path, **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(DENSE | settings))
    return folder


def config(backend: Any = "sparse_nccl", **engine: Any) -> RunConfig:
    return RunConfig(sync=SyncSection(backend=backend), engine=EngineSection(**engine))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"num_experts": 128}, r"mixture of experts \(num_experts\)"),
        ({"n_routed_experts": 64}, r"mixture of experts \(n_routed_experts\)"),
        ({"text_config": {"num_local_experts": 8}}, r"mixture of experts \(num_local_experts\)"),
        ({"mamba_d_state": 128}, r"state-space layers \(mamba_d_state\)"),
    ],
)
def test_a_model_whose_served_weights_are_not_the_checkpoints_is_refused(tmp_path: Path, settings: Any, words: str) -> None:
    with pytest.raises(UserError, match=rf"sync\.backend = sparse_nccl: vLLM cannot patch .*{words}.*; use sync\.backend = nccl"):
        check_patchable(config(), model(tmp_path, **settings))
    check_patchable(config("nccl"), model(tmp_path, **settings))


def test_a_dense_model_passes(tmp_path: Path) -> None:
    check_patchable(config(), model(tmp_path, num_experts=None, num_local_experts=0, mamba_ssm_dtype="float32", text_config=None))


@pytest.mark.parametrize("arguments", [["--quantization", "fp8"], ["-q", "fp8"], ["--quantization=fp8"], ["--enable_lora"]])
def test_arguments_of_the_engine_that_patches_cannot_live_with_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(UserError, match=r"engine\.extra_args has"):
        check_patchable(config(extra_args=arguments), model(tmp_path))
    check_patchable(config(extra_args=arguments, url="http://127.0.0.1:1"), model(tmp_path))  # that server was started without them
    check_patchable(config(extra_args=["--enable-prefix-caching"]), model(tmp_path))


def test_it_is_one_line_and_exit_2_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model(tmp_path, num_experts=8)
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    task = tmp_path / "tasks" / "one"
    for part in ("instruction.md", "task.toml", "tests/test.sh", "environment/Dockerfile"):
        (task / part).parent.mkdir(parents=True, exist_ok=True)
        (task / part).write_text("version = '1.0'\n" if part == "task.toml" else "FROM debian\n")
    file = tmp_path / "config.toml"
    file.write_text(
        f'[run]\ndir = "{tmp_path}/runs"\n[model]\nname = "{folder}"\n'
        f'[tasks]\ntrain = "{tmp_path}/tasks"\n[sync]\nbackend = "sparse_nccl"\n'
    )
    assert main(["train", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "vLLM cannot patch a mixture of experts (num_experts)" in error
    assert not (tmp_path / "runs").exists()
    (check,) = [check for check in engine_checks(RunConfig.model_validate(_settings(folder))) if check.name == "model"]
    assert not check.ok and "mixture of experts" in check.detail and check.remedy == "use sync.backend = nccl"


def _settings(folder: Path) -> dict[str, Any]:
    return {"model": {"name": str(folder)}, "sync": {"backend": "sparse_nccl"}, "engine": {"url": "http://127.0.0.1:9"}}
