"""LoRA: what is trained is the adapter alone, and what leaves the learner is what it computes with. peft itself is the peer."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import random_rows, row_logprobs, tiny_llama
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from harness_rl.errors import UserError
from harness_rl.learner import checkpoint
from harness_rl.learner.policy import Policy
from harness_rl.learner.ranks import ALONE
from harness_rl.learner.saving import Saver, load_optimizer, load_state
from harness_rl.learner.spec import LearnerSpec
from harness_rl.learner.step import Trainer
from harness_rl.trl.peft import from_peft


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return folder


def spec_of(base: Path, **more: Any) -> LearnerSpec:
    values = {"learning_rate": 1e-2, "micro_batch_tokens": 128, "lora_rank": 4, "device": "cpu"} | more
    return LearnerSpec(model=str(base), run_dir="-", lineage="k", **values)


def trainer(spec: LearnerSpec, source: Path | None = None, reference: Policy | None = None) -> Trainer:
    torch.manual_seed(spec.seed)
    return Trainer(Policy.load(spec, source or Path(spec.model)), spec, reference)


def save(t: Trainer, root: Path, step: int) -> checkpoint.Checkpoint:
    done: list[checkpoint.Checkpoint] = []
    saver = Saver(root, t.spec, Path(t.spec.model), ALONE, lambda found, _: done.append(found))
    saver.begin(step, f"k-{step}", t.policy, t.updater.optimizer, t.state())
    saver.wait()
    return done[0]


def test_the_adapter_alone_is_trained_and_the_first_policy_is_the_model(base: Path) -> None:
    t, model, rows = trainer(spec_of(base)), tiny_llama(), random_rows(0)
    own = dict(model.named_parameters())
    assert all(torch.equal(value, own[name]) for name, value in t.policy.weights(torch.float32).items())
    frozen = {name: value.clone() for name, value in t.policy.model.named_parameters() if ".lora_" not in name}
    # 7 linear layers of 2 layers: q 32x32, k and v 32x16, o 32x32, gate and up 32x48, down 48x32; rank 4 costs 4 (in + out).
    assert sum(p.numel() for p in t.updater.parameters) == 2 * 4 * (64 + 48 + 48 + 64 + 80 + 80 + 80)
    for step in range(3):
        assert t.step(rows, f"k-{step}").updated
    assert all(torch.equal(value, frozen[name]) for name, value in t.policy.model.named_parameters() if ".lora_" not in name)


def test_merged_weights_under_the_models_own_names_compute_the_same(base: Path) -> None:
    t = trainer(spec_of(base, lora_targets=["q_proj", "down_proj"], lora_alpha=5.0))
    for step in range(3):
        t.step(random_rows(step), f"k-{step}")
    merged, plain = t.policy.weights(torch.float32), tiny_llama()
    assert merged.keys() == dict(plain.named_parameters()).keys()
    changed = {name for name, value in plain.named_parameters() if not torch.equal(value, merged[name])}
    assert changed == {name for name in merged if "q_proj" in name or "down_proj" in name}
    plain.load_state_dict(merged, strict=False)
    ids = list(range(5, 40))
    found, expected = row_logprobs(Policy.wrap(plain, torch.float32).model, ids), row_logprobs(t.policy.model, ids)
    assert float((found - expected).abs().max()) < 1e-5 < float((row_logprobs(tiny_llama_wrapped(), ids) - expected).abs().max())


def tiny_llama_wrapped() -> Any:
    return Policy.wrap(tiny_llama(), torch.float32).model


def test_a_checkpoint_is_a_merged_model_and_an_adapter_that_peft_reads(base: Path, tmp_path: Path) -> None:
    t = trainer(spec_of(base, lora_alpha=5.0))
    for step in range(2):
        t.step(random_rows(step), f"k-{step}")
    saved = save(t, tmp_path, 2)
    merged = load_file(saved.path / "model.safetensors")
    peers = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), saved.path / "adapter")
    theirs = dict(peers.merge_and_unload().named_parameters())
    assert theirs.keys() == merged.keys()
    assert all(float((theirs[name] - value).abs().max()) < 1e-6 for name, value in merged.items())
    start = load_file(base / "model.safetensors")
    assert not all(torch.equal(start[name], value) for name, value in merged.items())
    assert "lora" not in (saved.path / "config.json").read_text()


def test_resumed_equals_uninterrupted(base: Path, tmp_path: Path) -> None:
    whole = trainer(spec_of(base))
    whole.step(random_rows(0), "k-0")
    saved = save(whole, tmp_path, 1)
    losses = [whole.step(random_rows(i), "k-0").metrics["loss"] for i in (1, 2)]
    again = trainer(spec_of(base, seed=9), saved.path)
    load_optimizer(saved, again.policy, again.updater.optimizer)
    again.restore(load_state(saved))
    assert [again.step(random_rows(i), "k-0").metrics["loss"] for i in (1, 2)] == losses


def test_a_run_that_begins_from_a_checkpoint_takes_its_adapter_once(base: Path, tmp_path: Path) -> None:
    """As after a warm start: the folder's model has the adapter merged, and a new one is trained on it."""
    t = trainer(spec_of(base))
    for step in range(2):
        t.step(random_rows(step), f"k-{step}")
    saved, expected = save(t, tmp_path, 2), t.policy.weights(torch.float32)
    begun = trainer(spec_of(saved.path)).policy.weights(torch.float32)
    assert all(float((begun[name] - value).abs().max()) < 1e-7 for name, value in expected.items())


def test_another_adapter_than_the_checkpoints_is_refused(base: Path, tmp_path: Path) -> None:
    t = trainer(spec_of(base))
    t.step(random_rows(0), "k-0")
    saved = save(t, tmp_path, 1)
    with pytest.raises(UserError, match=r"has another rank or other targets than learner.lora_rank and lora_targets say"):
        trainer(spec_of(base, lora_rank=8), saved.path)
    whole = trainer(spec_of(base, lora_rank=0), saved.path)
    with pytest.raises(
        UserError, match=r"optimizer's state in .* is not this one's \(learner.optimizer and lora_rank must be the run's own\)"
    ):
        load_optimizer(saved, whole.policy, whole.updater.optimizer)
    (saved.path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="the run began without LoRA, and cannot go on with it"):
        trainer(spec_of(base), saved.path)


def test_the_model_without_its_adapter_is_the_reference(base: Path) -> None:
    spec = spec_of(base, kl_beta=0.1)
    off, given = trainer(spec), trainer(spec, reference=Policy.load(replace(spec, lora_rank=0), base))
    for step in range(3):
        first, second = (t.step(random_rows(step), f"k-{step}").metrics for t in (off, given))
        assert first["kl_reference"] == pytest.approx(second["kl_reference"], abs=1e-7)
    assert first["kl_reference"] > 1e-5
    assert all(torch.equal(a, b) for a, b in zip(off.updater.parameters, given.updater.parameters, strict=True))


def test_mistakes(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"learner.lora_targets: .*no_such_proj"):
        trainer(spec_of(base, lora_targets=["no_such_proj"]))
    with pytest.raises(UserError, match=r"lora_targets: lm_head is the output head, which stays as it is; leave it out"):
        trainer(spec_of(base, lora_targets=["q_proj", "lm_head"]))
    with pytest.raises(UserError, match=r"model.embed_tokens is a Embedding; only linear layers can be targets"):
        trainer(spec_of(base, lora_targets=["embed_tokens"]))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"learner.lora_rank needs peft, which is not installed; pip install peft, or set lora_rank = 0"):
        trainer(spec_of(base))


def test_pefts_own_config_as_a_trl_script_gives_it() -> None:
    learner, notes = from_peft(LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    assert (learner, notes) == ({"lora_rank": 16, "lora_alpha": 32.0, "lora_targets": ["q_proj", "v_proj"]}, [])
    for asked, words in (({"use_rslora": True}, "use_rslora = True"), ({"modules_to_save": ["lm_head"]}, "modules_to_save")):
        with pytest.raises(UserError, match=words):
            from_peft(LoraConfig(target_modules="all-linear", **asked))
