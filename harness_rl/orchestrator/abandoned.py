"""What a dead control process left open in the capture store, closed before the next proxy would serve it again.

Invariant 5: the rollouts that ran are redone and their turns kept as `abandoned`. Their keys end with them, their calls and tokens are in
the run's accounts, and what the proxy had stored of them stays readable.
"""

from __future__ import annotations

from pathlib import Path

from capture_proxy.records import trace_from_log
from capture_proxy.session import Session
from capture_proxy.store import Store, StoreError, read_log
from harness_rl.errors import Cause, HarnessRLError
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.outcome import rollout_record, write_record


async def close_dead_sessions(run_dir: Path, running: set[str]) -> tuple[int, int]:
    """End every session of the run's store; those of the rollouts in `running` are recorded as abandoned in rollouts/.

    Only while no proxy serves the store. Returns how many sessions were open, and how many turns of theirs are abandoned. Raises
    HarnessRLError where the store cannot be read or written.
    """
    if not (run_dir / "capture").is_dir():
        return 0, 0
    sessions = turns = 0
    try:
        store = Store(run_dir / "capture")
        try:
            for session_id in store.session_ids():
                content = read_log(store.path(session_id))
                log = store.reopen(session_id, content)
                session = Session.resume(content, log)
                if session is None:  # it was deleted in order
                    log.close()
                    continue
                sessions += 1
                if session.spec.metadata.get("episode_id") in running:
                    turns += len(session.graph.turns)
                    session.abandon()
                    _record(run_dir / "rollouts", session, store.path(session_id))
                await session.delete()
        finally:
            await store.close()
    except (StoreError, OSError) as error:
        raise HarnessRLError(f"{run_dir / 'capture'}: sessions of the process that died cannot be closed: {error}; mend it") from error
    return sessions, turns


def _record(rollouts_dir: Path, session: Session, log: Path) -> None:
    about = session.spec.metadata
    failure = RolloutFailure(Cause.ABANDONED, "the control process died while the rollout was going")
    record = rollout_record(about, None, failure, status=session.status())
    write_record(rollouts_dir / about["episode_id"], record, trace_from_log(log))
