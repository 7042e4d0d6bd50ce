"""Control's half of the talk with the learner: weight updates are served whoever waits for what, its end is told to all who ask."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness_rl.errors import EngineError, InvariantError, LearnerError, LearnerGone
from harness_rl.learner.link import Message, NoCredit
from harness_rl.orchestrator import learner_process
from harness_rl.orchestrator.learner_process import LearnerProcess, SyncHooks, start_learner

PROOF = {"ok": True, "mean_abs": 1e-6, "max_abs": 1e-5, "tokens": 512, "bound": 1e-4}


class FakeLink:
    def __init__(self) -> None:
        self.coming: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[str] = []

    async def receive(self, timeout: float | None) -> Message:
        return await self.coming.get()

    async def send(self, type_: str, **fields: object) -> None:
        self.sent.append(type_)
        self.fields = fields

    async def close(self) -> None:
        pass

    async def send_batch(self, step: int, rows: object, timeout: float, rollouts: int | None) -> None:
        self.sent.append(f"batch {step}")


class FakeChild:
    log_path = Path("learner.log")

    def last_words(self) -> str:
        return "killed"

    async def stop(self) -> None:
        pass


@pytest.fixture
async def learner(tmp_path):
    done: list[str] = []

    async def hold(version: str) -> None:
        done.append(f"hold {version}")

    async def release(report) -> list[str]:
        done.append(f"release {report.version}")
        return [report.adapter, "policy@a-0"] if report.adapter else []

    async def failed(reason: str) -> None:
        done.append(reason)
        if "out of memory" in reason:
            raise EngineError(reason)

    process = LearnerProcess(FakeChild(), FakeLink(), SyncHooks(hold, release, failed), tmp_path / "link")
    process.serve()
    yield SimpleNamespace(process=process, link=process.link, done=done)
    await process.close()


def sync(version: str, **proof: object) -> list[Message]:
    done = {"version": version, "proof": PROOF | proof, "seconds": {}, "counts": {}, "adapter": None}
    return [Message("sync_begin", {"version": version}), Message("sync_done", done)]


async def test_a_weight_update_is_served_while_nobody_asks_for_a_message(learner):
    for message in sync("a-1"):
        learner.link.coming.put_nowait(message)
    await asyncio.sleep(0.02)
    assert learner.done == ["hold a-1", "release a-1"]
    assert learner.link.sent == ["sync_go", "sync_ack"]
    assert (await learner.process.next(1)).type == "sync_done"


async def test_the_learner_is_told_which_adapters_can_still_be_asked_for(learner):
    begin, end = sync("a-1")
    learner.link.coming.put_nowait(begin)
    learner.link.coming.put_nowait(Message("sync_done", end.fields | {"adapter": "policy@a-1"}))
    assert (await learner.process.next(1)).type == "sync_done"
    assert learner.process.last_sync.adapter == "policy@a-1"
    assert learner.link.fields == {"adapters_asked": ["policy@a-1", "policy@a-0"]}


async def test_an_update_that_failed_is_asked_for_again_or_ends_the_run(learner):
    begin, end = sync("a-1")
    learner.link.coming.put_nowait(begin)
    learner.link.coming.put_nowait(Message("sync_failed", {"version": "a-1", "message": "connection refused"}))
    learner.link.coming.put_nowait(end)
    assert (await learner.process.next(1)).type == "sync_done"
    assert learner.done == ["hold a-1", "weights a-1 could not be pushed: connection refused", "release a-1"]
    learner.link.coming.put_nowait(Message("sync_failed", {"version": "a-2", "message": "out of memory"}))
    with pytest.raises(EngineError, match="a-2 could not be pushed: out of memory"):
        await learner.process.next(1)


async def test_messages_come_in_order_and_the_failure_after_them_is_told_every_time(learner):
    for message in (Message("hello"), Message("result", {"step": 1}), Message("failed", {"error": "InvariantError", "message": "a row"})):
        learner.link.coming.put_nowait(message)
    assert (await learner.process.next(1))["step"] == 1
    for _ in range(2):
        with pytest.raises(InvariantError, match="a row"):
            await learner.process.next(1)


async def test_weights_that_are_not_proven_are_never_released(learner):
    for message in sync("a-2", ok=False, mean_abs=0.5):
        learner.link.coming.put_nowait(message)
    with pytest.raises(InvariantError, match="a-2 are not proven"):
        await learner.process.next(1)
    assert learner.done == ["hold a-2"]
    assert learner.link.sent == ["sync_go"]


async def test_a_fault_of_ours_is_raised_not_waited_for(learner):
    async def hold(version: str) -> None:
        raise ZeroDivisionError

    learner.process.hooks.hold = hold
    learner.link.coming.put_nowait(Message("sync_begin", {"version": "a-1"}))
    with pytest.raises(ZeroDivisionError):
        await learner.process.next(5)


async def test_a_learner_that_is_late_or_gone_is_named(learner):
    await learner.process.resync()
    with pytest.raises(LearnerError, match="no message"):
        await learner.process.next(0.01)
    learner.link.coming.put_nowait(Message("closed", {"reason": "end of file"}))
    with pytest.raises(LearnerError, match=r"went away: end of file: killed \(log: learner.log\)"):
        await learner.process.next(1)


async def test_a_learner_that_waits_for_us_is_not_late(learner):
    """Control may collect a batch, or evaluate the starting weights, for longer than a step may take."""
    allowed = asyncio.Event()

    async def hold(version: str) -> None:
        await allowed.wait()

    learner.process.hooks.hold = hold
    waiting = asyncio.create_task(learner.process.next(0.05))
    await asyncio.sleep(0.2)
    assert not waiting.done()  # it has nothing to do
    await learner.process.send_batch(1, [], 0.05)
    begin, end = sync("a-1")
    learner.link.coming.put_nowait(begin)
    await asyncio.sleep(0.2)
    assert not waiting.done()  # it asked for something, and we have not answered
    allowed.set()
    learner.link.coming.put_nowait(end)
    assert (await waiting).type == "sync_done"
    learner.link.coming.put_nowait(Message("result", {"step": 1}))
    assert (await learner.process.next(0.05)).type == "result"
    waiting = asyncio.create_task(learner.process.next(0.05))
    await asyncio.sleep(0.2)
    assert not waiting.done()  # idle again
    await learner.process.send_batch(2, [], 0.05)
    with pytest.raises(LearnerGone, match="no message from the learner in 0 s of work"):
        await waiting


async def test_a_batch_waits_for_a_learner_that_has_its_own_reason_to_wait(learner):
    """No credit comes while its first update waits for an evaluation; from one that has work and is silent it is a death."""
    learner.link.refusals = 3

    async def send_batch(step: int, rows: object, timeout: float, rollouts: int | None) -> None:
        learner.link.refusals -= 1
        if learner.link.refusals >= 0:
            await asyncio.sleep(timeout)
            raise NoCredit("the learner asked for no batch")

    learner.link.send_batch = send_batch
    await asyncio.wait_for(learner.process.send_batch(1, [], 0.02), 2)
    assert (learner.link.refusals, learner.process.turns.batches) == (-1, 1)
    learner.link.refusals = 99
    with pytest.raises(LearnerGone, match="asked for no batch"):
        await asyncio.wait_for(learner.process.send_batch(2, [], 0.02), 2)


@pytest.mark.parametrize(("ends", "error"), [("kill -9 $$", LearnerGone), ("echo no such model >&2; exit 1", LearnerError)])
async def test_a_learner_that_is_killed_while_it_starts_can_be_started_again(tmp_path: Path, ends: str, error: type[Exception]) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{ends}\n")
    python.chmod(0o755)
    spec = SimpleNamespace(to_json=lambda: "{}", lineage="a", resume=False, processes=1, engines=[])
    hooks = SyncHooks(*[None] * 3)
    with pytest.raises(LearnerError, match=r"the learner did not start: the learner ended: (killed by SIGKILL|no such model)") as caught:
        await start_learner(spec, python=python, env={}, hooks=hooks, run_dir=tmp_path, timeout=20.0)
    assert type(caught.value) is error


async def test_ranks_know_their_place_whatever_control_was_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $RANK of $WORLD_SIZE on $LOCAL_RANK >&2\nif [ $RANK = 0 ]; then sleep 1; fi\nexit 1\n")
    python.chmod(0o755)
    for processes in (1, 2):
        spec = SimpleNamespace(to_json=lambda: "{}", lineage="a", resume=False, processes=processes, engines=[])
        words = "0 of 1 on 0" if processes == 1 else "the learner-rank1 ended: 1 of 2 on 1"
        with pytest.raises(LearnerError, match=words):
            await start_learner(spec, python=python, env={}, hooks=SyncHooks(*[None] * 3), run_dir=tmp_path, timeout=20.0)


class Rank(FakeChild):
    """Of a learner of several processes; `ends` with a code, or never."""

    name, log_path = "learner-rank1", Path("learner-rank1.log")

    def __init__(self, ends: int | None) -> None:
        self.process = SimpleNamespace(returncode=ends)

    async def ended(self) -> None:
        if self.process.returncode is None:
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("ends", "error", "words"),
    [
        (-9, LearnerGone, r"the learner-rank1 ended: killed \(log: learner-rank1.log\); rank 0 said: RuntimeError: connection closed"),
        (None, LearnerError, r"the learner stopped: RuntimeError: connection closed"),
        (1, LearnerError, r"the learner stopped: RuntimeError: connection closed"),
    ],
)
async def test_what_rank_0_says_of_a_rank_that_was_killed_is_no_end_of_the_run(
    learner, monkeypatch: pytest.MonkeyPatch, ends: int | None, error: type[Exception], words: str
) -> None:
    monkeypatch.setattr(learner_process, "RANK_GRACE_S", 0.05)
    learner.process.others = [Rank(ends)]
    learner.link.coming.put_nowait(Message("failed", {"error": "RuntimeError", "message": "connection closed"}))
    with pytest.raises(LearnerError, match=words) as caught:
        await learner.process.next(5)
    assert type(caught.value) is error


@pytest.mark.parametrize("ends", [-9, 1])
async def test_a_rank_that_ends_while_all_is_quiet_takes_the_learner_with_it(learner, monkeypatch: pytest.MonkeyPatch, ends: int) -> None:
    monkeypatch.setattr(learner_process, "RANK_GRACE_S", 0.05)
    other = LearnerProcess(FakeChild(), FakeLink(), learner.process.hooks, Path("none"), [Rank(ends)])
    other.serve()
    with pytest.raises(LearnerGone, match=r"the learner-rank1 ended: .*the whole learner goes with it"):
        await other.next(5)
    await other.close()
