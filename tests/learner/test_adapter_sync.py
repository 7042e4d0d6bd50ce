"""Policies that engines know by name: what is loaded where, what proves it, and what goes when nobody can ask for it any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine, serve
from learner_helpers import VOCABULARY, tiny_llama

from harness_rl.learner import lora
from harness_rl.learner.policy import Policy
from harness_rl.learner.spec import LearnerSpec
from harness_rl.sync.adapter import AdapterSync
from harness_rl.sync.client import EngineClient, SyncFailed
from harness_rl.sync.verify import LogprobProbe, WeightProofFailed

PROMPTS = [np.random.default_rng(i).integers(0, VOCABULARY, 60).astype(np.int32) for i in range(4)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return folder


def new_engine() -> FakeEngine:
    """With the learner's base model."""
    return FakeEngine(Policy.wrap(tiny_llama(), torch.float32).model)


class Rig:
    """An adapter in training, and servers of its base model."""

    def __init__(self, base: Path, root: Path, engines: list[FakeEngine], urls: list[str]) -> None:
        self.spec = LearnerSpec(model=str(base), run_dir="-", lineage="k", lora_rank=4, lora_alpha=5.0, device="cpu")
        self.policy, self.engines, self.root = Policy.load(self.spec, base), engines, root
        self.sync = self.new_sync(urls)

    def new_sync(self, urls: list[str]) -> AdapterSync:
        probe = LogprobProbe(exact=True, bound=1e-4, first_bound=0.15, tokens=200)
        clients = [EngineClient(url, "policy", 60.0) for url in urls]
        return AdapterSync(clients, self.root, self.write, probe, self.policy.score_prompts)

    def write(self, folder: Path) -> None:
        lora.export(folder, self.policy.adapter(), self.spec)

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    @property
    def folders(self) -> set[str]:
        return {path.name for path in self.root.iterdir()}

    def train(self) -> None:
        with torch.no_grad():
            for parameter in lora.adapter(self.policy.model).values():
                parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.fixture
def rig(base: Path, tmp_path: Path) -> Iterator[Rig]:
    engine = new_engine()
    with serve(engine) as url:
        made = Rig(base, tmp_path / "adapters", [engine], [url])
        yield made
        made.sync.close()


def test_each_version_is_an_adapter_of_its_own_and_proven_under_its_name(rig: Rig) -> None:
    own = {name: value.clone() for name, value in rig.engine.model.named_parameters()}
    for step in range(3):
        report = rig.sync.sync(f"k-{step}", PROMPTS)
        assert report.proof.ok and report.proof.tokens == 4 * 59 and report.adapter == f"policy@k-{step}"
        rig.train()
    assert set(report.seconds) == {"write", "load", "probe"}
    assert list(rig.engine.adapters) == ["policy@k-0", "policy@k-1", "policy@k-2"]  # running calls keep theirs
    # Nothing is paused, drained or reset, and no weight of the model itself changes.
    calls = ["health", "v1/models", "v1/load_lora_adapter", "v1/models", "v1/models", "v1/completions"]
    assert rig.engine.calls == calls * 3
    assert all(torch.equal(value, own[name]) for name, value in rig.engine.model.named_parameters())


def test_what_nobody_can_ask_for_is_unloaded_and_its_folder_goes_a_sync_later(rig: Rig) -> None:
    for step in range(3):
        rig.sync.sync(f"k-{step}", PROMPTS)
    rig.sync.retire(["policy@k-1", "policy@k-2"])  # a long call is still under k-1
    assert set(rig.engine.adapters) == {"policy@k-1", "policy@k-2"} and rig.folders == {"policy@k-0", "policy@k-1", "policy@k-2"}
    rig.sync.retire(["policy@k-2"])
    assert set(rig.engine.adapters) == {"policy@k-2"} and rig.folders == {"policy@k-1", "policy@k-2"}
    rig.sync.retire([])  # what was proven last stays in any case
    assert set(rig.engine.adapters) == {"policy@k-2"} and rig.folders == {"policy@k-2"}


def test_a_later_learner_retires_what_an_earlier_one_left_and_nothing_of_another_run(rig: Rig) -> None:
    rig.sync.sync("k-0", PROMPTS)
    rig.engine.adapters["policy@z-9"] = "/another/run/adapters/policy@z-9", rig.engine.model
    (rig.root / ".policy@k-1.tmp").mkdir()  # it was killed while it wrote
    later = rig.new_sync([engine.url for engine in rig.sync._engines])
    later.sync("n-0", PROMPTS)
    later.retire(["policy@n-0"])
    assert set(rig.engine.adapters) == {"policy@n-0", "policy@z-9"} and rig.folders == {"policy@k-0", "policy@n-0"}


def test_e18_each_version_is_a_folder_that_is_never_written_again_and_one_that_is_served_old_bytes_is_noticed(rig: Rig) -> None:
    """A server may keep what it read under a path: no path has ever two contents, and the probe follows each load."""
    found, bytes_of = [], {}
    for step in range(3):
        rig.train()
        rig.sync.sync(f"k-{step}", PROMPTS)
        found.append(np.concatenate(rig.sync._engines[0].score(PROMPTS, f"policy@k-{step}")))
        bytes_of |= {path: path.read_bytes() for path in (rig.root / f"policy@k-{step}").iterdir()}
    assert len({folder for folder, _ in rig.engine.adapters.values()}) == 3
    assert all(path.read_bytes() == content for path, content in bytes_of.items())
    gaps = [float(np.abs(a - b).mean()) for a, b in ((found[0], found[1]), (found[1], found[2]), (found[0], found[2]))]
    assert min(gaps) > 1e-3, "the probe tells each version from the others"
    rig.train()
    rig.engine.faults = {"old_bytes"}
    rig.engine.first_read = str(rig.root / "policy@k-0")
    with pytest.raises(WeightProofFailed, match="does not compute with the weights of k-3 under policy@k-3"):
        rig.sync.sync("k-3", PROMPTS)


def test_an_engine_that_was_started_again_gets_the_present_adapter_before_it_is_asked(rig: Rig) -> None:
    rig.sync.sync("k-0", PROMPTS)
    rig.engine.adapters.clear()
    rig.engine.calls.clear()
    assert rig.sync.sync("k-0", PROMPTS).proof.ok
    assert rig.engine.calls.index("v1/load_lora_adapter") < rig.engine.calls.index("v1/completions")
    rig.engine.calls.clear()
    assert rig.sync.sync("k-0", PROMPTS).proof.ok  # the others of several, which did not die
    assert "v1/load_lora_adapter" not in rig.engine.calls


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("refuse_adapter", SyncFailed, "sync step 'load': .*/v1/load_lora_adapter: HTTP 500.*greater than max_lora_rank"),
        ("forget_adapter", SyncFailed, "sync step 'load': .* has nothing as adapter policy@k-1, and not .*/adapters/policy@k-1"),
        ("wrong_adapter", WeightProofFailed, "does not compute with the weights of k-1 under policy@k-1: .*no call will ask for it"),
        ("shift_logprobs", WeightProofFailed, "does not compute with the weights of k-1 under policy@k-1"),
    ],
)
def test_what_an_engine_can_get_wrong_is_named_and_earlier_versions_go_on(
    rig: Rig, fault: str, error: type[Exception], message: str
) -> None:
    rig.sync.sync("k-0", PROMPTS)
    rig.train()
    rig.engine.faults = {fault}
    with pytest.raises(error, match=message):
        rig.sync.sync("k-1", PROMPTS)
    assert "policy@k-0" in rig.engine.adapters and not rig.engine.paused


def test_an_engine_that_takes_its_base_model_for_every_name_is_noticed(rig: Rig) -> None:
    """The first adapter changes nothing yet, so that its logprobs alone would prove nothing."""
    rig.sync.sync("k-0", PROMPTS)
    rig.engine.faults = {"base_for_all"}
    rig.engine.adapters.clear()
    client = rig.sync._engines[0]
    with pytest.raises(SyncFailed, match="was asked for adapter policy@k-0 and answered as 'policy'"):
        client.score(PROMPTS, "policy@k-0")


def test_a_name_that_another_folder_has_is_refused(rig: Rig) -> None:
    rig.engine.adapters["policy@k-0"] = "/another/run/adapters/policy@k-0", rig.engine.model
    with pytest.raises(SyncFailed, match="has /another/run/adapters/policy@k-0 as adapter policy@k-0, and not"):
        rig.sync.sync("k-0", PROMPTS)


def test_a_server_without_the_routes_is_told_how_to_be_started(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "on_load_lora_adapter", None)
    with pytest.raises(SyncFailed, match=r"HTTP 404.*start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"):
        rig.sync.sync("k-0", PROMPTS)


def test_of_two_engines_both_have_it_or_it_is_not_proven(base: Path, tmp_path: Path) -> None:
    engines = [new_engine(), new_engine()]
    with serve(engines[0]) as a, serve(engines[1]) as b:
        rig = Rig(base, tmp_path / "adapters", engines, [a, b])
        assert rig.sync.sync("k-0", PROMPTS).proof.ok and all("policy@k-0" in engine.adapters for engine in engines)
        rig.train()
        engines[1].faults = {"wrong_adapter"}
        with pytest.raises(WeightProofFailed, match=b):
            rig.sync.sync("k-1", PROMPTS)
        rig.sync.close()
