"""A real run (vLLM, Harbor, sandbox, mini-swe-agent, learner, weight sync), and every trained row recomputed from the proxy's store."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from capture_proxy.records import trace_from_log
from capture_proxy.store import read_log
from harness_rl.learner.audit import AuditedRow, read_audit
from harness_rl.learner.rows import build_rows
from harness_rl.metrics import read_metrics
from harness_rl.sandboxes.reaper import audit
from harness_rl.tasks.quickstart import generate

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
[run]
dir = "{dir}"
name = "{name}"
steps = {steps}
[engine]
url = "{engine}"
[tasks]
train = "{tasks}/train"
eval = "{tasks}/heldout"
[reward]
function = "tests/e2e/rewards.py:sampled_tokens"
[rollout]
num_generations = 2
groups_per_step = 2
max_concurrent_rollouts = 4
max_staleness = 1
max_calls = 2
max_output_tokens_per_call = 24
[learner]
audit = true
[eval]
samples = 1
max_tasks = 2
"""


def harness_rl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness_rl.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    generate(folder, train=6, heldout=6)
    return folder


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, engine_url: str, tasks: Path) -> Path:
    """Three real optimizer steps."""
    folder = tmp_path_factory.mktemp("runs")
    config = folder / "config.toml"
    config.write_text(
        CONFIG.format(dir=folder, name="real", steps=3, engine=engine_url, tasks=tasks)
        + f'[harness]\nconfig = "{ROOT}/examples/configs/quickstart_agent.yaml"\n'
    )
    done = harness_rl("train", str(config))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "real"


def stored_rows(run: Path) -> dict[str, tuple]:
    """Rows rebuilt from the proxy's log alone, by id: (ids, captured mask, logprobs, spans)."""
    rows = {}
    for log in (run / "capture").glob("**/*.log"):
        metadata = read_log(log).records[0].header["spec"]["metadata"]
        for row in build_rows(trace_from_log(log), metadata["episode_id"], "-"):
            rows[row.row_id] = row
    return rows


def differences(trained: AuditedRow, stored) -> list[str]:
    """What of a row that the learner consumed is not, to the bit, what the proxy stored."""
    found = []
    if not np.array_equal(trained.ids, stored.ids):
        found.append("ids")
    places = trained.predicts + 1
    if not np.array_equal(trained.targets, stored.ids[places]):
        found.append("targets")
    stale = np.zeros(len(stored), dtype=bool)
    stale[trained.stale_positions] = True
    if not np.array_equal(places, np.flatnonzero((stored.mask == 1) & ~stale)):
        found.append("mask")
    if trained.behaviour.tobytes() != stored.logprobs[places].astype(np.float32).tobytes():
        found.append("logprobs")
    if trained.versions != [version for span in stored.spans for version in span.versions]:
        found.append("versions")
    return found


@pytest.mark.engine
@pytest.mark.root
def test_every_trained_row_equals_the_store_to_the_bit(finished_run):
    stored = stored_rows(finished_run)
    trained = [row for step in sorted((finished_run / "audit").glob("step-*.npz")) for row in read_audit(step)]
    assert len(trained) >= 6
    assert {row.row_id: differences(row, stored[row.row_id]) for row in trained} == {row.row_id: [] for row in trained}


@pytest.mark.engine
@pytest.mark.root
@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (lambda row: row.ids.__setitem__(0, row.ids[0] + 1), "ids"),
        (lambda row: row.behaviour.__setitem__(slice(None), np.roll(row.behaviour, 1)), "logprobs"),
        (lambda row: row.predicts.__setitem__(slice(None), row.predicts - 1), "mask"),
        (lambda row: row.versions.__setitem__(0, ("other-0", *row.versions[0][1:])), "versions"),
    ],
)
def test_the_comparison_sees_each_kind_of_damage(finished_run, damage, seen):
    stored = stored_rows(finished_run)
    row = next(row for row in read_audit(finished_run / "audit" / "step-1.npz") if len(row.behaviour) > 1)
    damage(row)
    assert seen in differences(row, stored[row.row_id])


@pytest.mark.engine
@pytest.mark.root
def test_the_run_is_accounted_for_and_left_nothing(finished_run):
    lines = read_metrics(finished_run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert (
            line["rows/trained"] + line["rows/stale"] + line["rows/oversize"] + line["rows/zero_advantage"] + line["rows/rejected"]
            == line["rows"]
        )
        assert line["rows/rejected"] == 0
        assert line["logprob_gap/tokens"] == 0 or line["logprob_gap/mean"] < 1e-4
        assert line["sync/proof_tokens"] >= 512
        assert line["sync/proof_mean_abs"] < 1e-4
    with sqlite3.connect(finished_run / "journal.sqlite") as journal:
        states = dict(journal.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall())
        running = journal.execute("SELECT COUNT(*) FROM rollouts WHERE state = 'running'").fetchone()[0]
    assert states["durable"] == sum(line["rollout/groups_trained"] for line in lines)
    assert running == 0
    assert "running" not in states
    assert (finished_run / "reward.png").stat().st_size > 10_000
    assert json.loads((finished_run / "checkpoints" / "step-3" / "config.json").read_text())["model_type"] == "llama"
    # The run audits itself, as the process that owned the sandboxes; here is what it left to others.
    assert "leak audit" not in (finished_run / "logs" / "control.log").read_text()
    assert audit().total == 0


@pytest.mark.engine
@pytest.mark.root
def test_weights_move_and_versions_name_them(finished_run):
    lineages = {
        version.rsplit("-", 1)[0] for row in stored_rows(finished_run).values() for span in row.spans for version, _, _ in span.versions
    }
    assert len(lineages) == 1
    steps = {
        int(version.rsplit("-", 1)[1])
        for row in stored_rows(finished_run).values()
        for span in row.spans
        for version, _, _ in span.versions
    }
    assert steps <= {0, 1, 2, 3}
    assert len(steps) > 1


@pytest.mark.engine
@pytest.mark.root
@pytest.mark.full
@pytest.mark.parametrize(("mode", "kv", "every"), [("abort", "recompute", 2), ("wait", "recompute", 1), ("keep", "keep", 1)])
def test_rows_equal_the_store_whatever_an_update_does_to_running_calls(tmp_path, engine_url, tasks, mode, kv, every):
    config = tmp_path / "config.toml"
    config.write_text(
        CONFIG.format(dir=tmp_path, name="mode", steps=3, engine=engine_url, tasks=tasks)
        + f'[harness]\nconfig = "{ROOT}/examples/configs/quickstart_agent.yaml"\n'
        + f'[sync]\nmode = "{mode}"\nkv = "{kv}"\nevery = {every}\n'
    )
    done = harness_rl("train", str(config))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    stored = stored_rows(tmp_path / "mode")
    trained = [row for step in sorted((tmp_path / "mode" / "audit").glob("step-*.npz")) for row in read_audit(step)]
    assert trained and {row.row_id: differences(row, stored[row.row_id]) for row in trained} == {row.row_id: [] for row in trained}
    lines = read_metrics(tmp_path / "mode" / "metrics.jsonl")
    assert ["perf/sync_stopped_s" in line for line in lines] == [step % every == 0 for step in (1, 2, 3)]
    steps = {int(version.rpartition("-")[2]) for row in stored.values() for span in row.spans for version, _, _ in span.versions}
    assert steps <= {step for step in range(4) if step % every == 0} | {3}  # the last evaluation has the last weights


@pytest.mark.engine
@pytest.mark.root
@pytest.mark.parametrize("model_class", ["light", "litellm"])
def test_stock_mini_swe_agent_completes_rollouts_and_its_rows_pass_the_same_check(tmp_path, engine_url, tasks, model_class):
    """Its own prompts, no config of ours."""
    config = tmp_path / "config.toml"
    config.write_text(
        CONFIG.format(dir=tmp_path, name="stock", steps=1, engine=engine_url, tasks=tasks) + f'[harness]\nmodel_class = "{model_class}"\n'
    )
    done = harness_rl("eval", str(config), "--json", "--set", "rollout.max_conversation_tokens=4000")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["unscored"], result["tasks"]) == (0, 2)
    from capture_proxy.trace import TrainingTrace

    stored = stored_rows(tmp_path / "stock-eval")
    assert stored
    for folder in (tmp_path / "stock-eval" / "rollouts").iterdir():
        trace = TrainingTrace.from_bytes((folder / "trace.bin").read_bytes())
        assert "You are a helpful assistant that can interact with a computer." in json.dumps(trace.turns[0].request)
        for row in build_rows(trace, folder.name, "-"):
            kept = stored[row.row_id]
            assert np.array_equal(row.ids, kept.ids)
            assert row.logprobs.tobytes() == kept.logprobs.tobytes()
            assert np.array_equal(row.mask, kept.mask)
            assert row.spans == kept.spans
