"""A hand-made run folder whose tokenizer spells one letter per id, so that what is printed can be said by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from capture_proxy.trace import TrainingTrace
from harness_rl.configfile import resolve_config, to_toml
from harness_rl.metrics import Metric, RunState
from harness_rl.orchestrator.journal import Journal, RolloutState

LETTERS = {10: "p", 11: "q", 20: "A", 21: "B", 22: "C", 30: "r"}


def turn(node: str, prompt: list[int], completion: list[int], mask: list[int], **metadata: Any) -> dict[str, Any]:
    return {
        "node_id": node,
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "per_token_logps": [-0.01, -1.0, -9.0][: len(completion)],
        "loss_mask": [0] * len(prompt) + mask,
        "request": {},
        "response": {},
        "metadata": metadata,
    }


@pytest.fixture
def trace() -> TrainingTrace:
    """The design's own example (20 and 22 trained, 21 context) and a masked turn that continues it."""
    first = turn("n0", [10, 11], [20, 21, 22], [1, 0, 1], role="agent", branch=0, weight_versions=[["k-1", 0, 2], ["k-2", 2, 3]])
    second = turn("n1", [10, 11, 20, 21, 22, 30], [20], [0], parent="n0", role="agent", branch=0, mask_reason="retry", finish_reason="stop")
    return TrainingTrace.model_validate({"schema_version": 1, "turns": [first, second]})


@pytest.fixture
def run_dir(tmp_path: Path, trace: TrainingTrace) -> Path:
    """RUN with one scored rollout (`g0-0`, with a trace), one failed (`g0-1`) and a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel

    model = tmp_path / "model"
    model.mkdir()
    vocabulary = {letter: token for token, letter in LETTERS.items()}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="p"))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(model / "tokenizer.json"))
    run = tmp_path / "run"
    folder = run / "rollouts" / "g0-0"
    folder.mkdir(parents=True)
    (folder / "trace.bin").write_bytes(trace.to_bytes())
    (folder / "outcome.json").write_text(json.dumps({"env_reward": 1.0, "turns": 2, "trained_tokens": 2}))
    (run / "config.toml").write_text(to_toml(resolve_config({"model": {"name": str(model)}}, [], "test")))
    journal = Journal(run / "journal.sqlite")
    journal.open_group("g0", 0, "write-a-file")
    journal.open_rollout("g0-0", "g0", 0, 0)
    journal.end_rollout("g0-0", RolloutState.SCORED, reward=0.5, turns=2)
    journal.open_rollout("g0-1", "g0", 1, 0)
    journal.end_rollout("g0-1", RolloutState.FAILED, cause="engine")
    journal.close()
    return run


@pytest.fixture
def state() -> RunState:
    """In the middle of a run, with every field in use and long words in it."""
    state = RunState("a-run-with-quite-a-long-name", 20)
    state.phase, state.step, state.version = "training", 12, "k3f9-12"
    state.started_at -= 4000
    state.training_since = state.started_at + 200
    state.rollouts_running, state.rollouts_done, state.rollouts_failed = 6, 1840, Counter(engine=2, sandbox_start=11, verifier=1)
    state.groups_ready, state.groups_zero_variance, state.sandboxes = 2, 5, 6
    state.engine, state.learner, state.holding = "paused", "syncing", True
    state.rewards = [0.4 + 0.04 * step for step in range(12)]
    state.last = {Metric.GENERATED_TOK_S: 1412.3, Metric.STALENESS: 0.83}
    state.evals = {"before warm-up": (0.02, 0.0, 0.06), "after warm-up": (0.41, 0.31, 0.52), "step 10": (0.7, 0.6, 0.8)}
    state.messages = ["engine ready", "rollout g19-3: engine: no answer within 600 s; " + "tried again in a fresh sandbox " * 5]
    return state
