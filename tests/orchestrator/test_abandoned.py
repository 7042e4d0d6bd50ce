"""Sessions of a control process that died are closed and counted before the next one starts a proxy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from capture_proxy import delta
from capture_proxy.graph import Turn
from capture_proxy.records import trace_from_log
from capture_proxy.session import RunningCall, Session
from capture_proxy.spec import SessionSpec
from capture_proxy.store import SUFFIX, Store, read_log
from harness_rl.errors import HarnessRLError
from harness_rl.orchestrator.abandoned import close_dead_sessions
from harness_rl.orchestrator.accounts import settle
from harness_rl.orchestrator.journal import Journal, RolloutState
from harness_rl.sessions.outcome import OUTCOME_FILE, TRACE_FILE

TURNS = 2


def a_turn(session: Session, call: RunningCall) -> Turn:
    prompt, completion = np.array([10, 10 + call.seq], np.int32), np.array([20, 21], np.int32)
    base, keep, before = session.graph.place(None, prompt)
    request = delta.encode(before, {"model": "m", "messages": [{"role": "user", "content": str(call.seq)}]})
    return Turn(
        node_id=call.key,
        seq=call.seq,
        parent=None,
        base=base,
        keep=keep,
        prompt_len=len(prompt),
        total=np.concatenate([prompt, completion]),
        logps=np.array([-0.5, -0.25], np.float32),
        reason=None,
        request=request,
        response={"choices": [{"message": {"role": "assistant", "content": "x"}}]},
        meta={"origin": "sampled", "weight_versions": [["a-0", 0, 2]], "findings": []},
        chain=b"c%d" % call.seq,
        reply_key=b"r%d" % call.seq,
        system_key=b"",
        rendered_len=len(prompt),
        rendered_hash="00",
    )


@pytest.fixture
async def run_dir(tmp_path: Path) -> Path:
    """Of a control that was killed: rollout g-0 was under way, g-1 scored and not yet forgotten, g-2 ended in order."""
    store = Store(tmp_path / "capture")
    for number in range(3):
        spec = SessionSpec(metadata={"episode_id": f"g-{number}"})
        session = Session.create(f"s{number}", f"hash-{number}", spec, store.create(f"s{number}"))
        for _ in range(TURNS):
            call = session.begin()
            await session.record(call, a_turn(session, call))
            session.deliver(call)
            session.leave(call)
        if number == 0:
            session.begin()  # in flight when all died
        if number == 2:
            await session.delete()
        else:
            session.log.close()
    await store.close()
    return tmp_path


async def test_turns_of_running_rollouts_are_kept_as_abandoned_and_their_keys_end(run_dir: Path) -> None:
    journal = Journal(run_dir / "journal.sqlite")
    for number in range(3):
        journal.open_rollout(f"g-{number}", "g", number, 0)
    journal.end_rollout("g-1", RolloutState.SCORED, reward=1.0, turns=TURNS)
    journal.end_rollout("g-2", RolloutState.SCORED, reward=1.0, turns=TURNS)
    assert journal.running() == {"g-0"}
    assert await close_dead_sessions(run_dir, journal.running()) == (2, TURNS)
    for number in range(3):
        path = run_dir / "capture" / f"s{number}{SUFFIX}"
        reasons = {turn.metadata["mask_reason"] for turn in trace_from_log(path).turns}
        assert ("abandoned" in reasons) == (number == 0)
        assert read_log(path).records[-1].header["t"] == "delete", "the next proxy knows no such key"
    record = json.loads((run_dir / "rollouts" / "g-0" / OUTCOME_FILE).read_text())
    assert (record["cause"], record["capture"]["calls_by_reason"]) == ("abandoned", {"abandoned": TURNS + 1})
    assert (run_dir / "rollouts" / "g-0" / TRACE_FILE).is_file()
    assert not (run_dir / "rollouts" / "g-1").exists(), "what was scored keeps its own record"
    journal.take_back(0)
    found = settle(journal, run_dir / "rollouts")
    assert (found.calls["abandoned"], found.tokens["abandoned"]) == (TURNS + 1, 2 * TURNS)
    assert await close_dead_sessions(run_dir, set()) == (0, 0), "nothing is left to close"
    journal.close()


async def test_a_run_without_a_store_has_nothing_to_close_and_a_broken_one_is_named(run_dir: Path) -> None:
    (run_dir / "capture" / f"s1{SUFFIX}").write_bytes(b"no log at all")
    with pytest.raises(HarnessRLError, match=r"capture: sessions of the process that died cannot be closed: .*not a capture log"):
        await close_dead_sessions(run_dir, set())
    shutil.rmtree(run_dir / "capture")
    assert await close_dead_sessions(run_dir, set()) == (0, 0)
