"""A real white-box run (vLLM, learner, weight sync, no sandbox and no root), and every trained row recomputed from the proxy's store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.test_real_run import ROOT, differences, stored_rows

from harness_rl.learner.audit import read_audit
from harness_rl.metrics import read_metrics

pytestmark = [pytest.mark.full, pytest.mark.engine]
STEPS = 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, engine_url: str) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("runs") / "white"
    done = subprocess.run(
        [sys.executable, "tests/e2e/white_box.py", str(folder), engine_url, str(STEPS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder, done.stdout + done.stderr


def test_every_trained_row_equals_the_store_to_the_bit(finished):
    folder, _ = finished
    stored = stored_rows(folder)
    trained = [row for step in sorted((folder / "audit").glob("step-*.npz")) for row in read_audit(step)]
    assert len(trained) >= STEPS * 4
    assert {row.row_id: differences(row, stored[row.row_id]) for row in trained} == {row.row_id: [] for row in trained}


def test_it_is_on_policy(finished):
    folder, _ = finished
    for step in range(1, STEPS + 1):
        versions = {
            version.rsplit("-", 1)[1] for row in read_audit(folder / "audit" / f"step-{step}.npz") for version, _, _ in row.versions
        }
        assert versions == {str(step - 1)}


def test_metrics_rewards_and_records_are_there(finished):
    folder, said = finished
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["reward"] == pytest.approx(line["rewards/short/mean"] + 0.5 * line["rewards/vowels/mean"], abs=1e-6)
        assert line["characters"] > 0 and line["env/reset_s"] < 60
        assert line["logprob_gap/tokens"] == 0 or line["logprob_gap/mean"] < 1e-4
        assert line["sync/proof_mean_abs"] < 1e-4
    accounts = json.loads((folder / "accounts.json").read_text())
    assert (accounts["rollouts"].get("trained", 0) > 0, accounts["unrecorded"], accounts["failures"]) == (True, 0, {})
    assert [line for line in said.splitlines() if line.startswith("callback:")] == [f"callback: step {n} of 3" for n in (1, 2, 3)]
    assert "evaluated: 0.0" in said
    assert "log_completions = True has no effect: every rollout is recorded whole" in said
    model = Path(f"{folder}-model")
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama" and not list(model.glob("optimizer*"))


def test_no_budget_was_exceeded(finished):
    folder, _ = finished
    for row in stored_rows(folder).values():
        assert len(row) - row.spans[0].start <= 40
