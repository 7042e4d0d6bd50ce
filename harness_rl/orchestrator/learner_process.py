"""The learner as children of the control process, and control's half of what they say to each other (DESIGN 4.9).

A learner of several processes (`learner.processes`) is one: only its rank 0 talks, and when any of them dies the whole has. Control never
lets the engine sample for training between a weight update and its proof: new agent calls are held from `sync_begin` to `sync_done`, or,
where policies are adapters, go on under the one before.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import capture_proxy
import harness_rl
from harness_rl.errors import HarnessRLError, InvariantError, LearnerError, LearnerGone
from harness_rl.learner.link import TOKEN_ENV, LearnerLink, LinkError, Message, NoCredit
from harness_rl.learner.rows import Row
from harness_rl.learner.spec import LearnerSpec
from harness_rl.orchestrator.turns import Turns
from harness_rl.processes import Child, spawn
from harness_rl.sandboxes.scratch import scratch_dir

log = logging.getLogger(__name__)


@dataclass
class SyncReport:
    """What a finished weight update proved, and what it cost."""

    version: str
    proof: dict[str, Any]
    seconds: dict[str, float]
    counts: dict[str, float] = field(default_factory=dict)
    """Calls that ran at the stop, those of them that were ended, tokens that are read again."""
    adapter: str | None = None
    """The name under which the engines have these weights; None: they are their own model's."""


@dataclass
class SyncHooks:
    """What control does around a weight update."""

    hold: Callable[[str], Awaitable[None]]
    """New agent calls wait from here on; gets the version to come."""
    release: Callable[[SyncReport], Awaitable[list[str]]]
    """The weights are proven; the calls go on. Returns the adapters that can still be asked for."""
    failed: Callable[[str], Awaitable[None]]
    """The update could not be made, with the reason: returns if it will be asked for again (`resync`), else raises."""


@dataclass
class LearnerProcess:
    child: Child
    link: LearnerLink
    hooks: SyncHooks
    link_dir: Path
    others: Sequence[Child] = ()
    """Ranks 1 and up; `child` is rank 0."""
    step: int = 0
    """Optimizer steps in the weights that it started from."""
    last_sync: SyncReport | None = None
    last_checkpoint: Message | None = None
    turns: Turns = field(default_factory=Turns)
    _inbox: asyncio.Queue[Message | Exception] = field(default_factory=asyncio.Queue)
    _serving: asyncio.Task[None] | None = None
    _watching: set[asyncio.Task[None]] = field(default_factory=set)

    async def next(self, timeout: float) -> Message:
        """The next `sync_done`, `result`, `checkpoint` or `bye`. `timeout`: how long it may say nothing while it has work.

        Raises InvariantError when a proof failed, LearnerError when the learner failed, LearnerGone when it went away or is late.
        """
        found: Message | Exception | None = None
        while found is None:
            try:
                found = await asyncio.wait_for(self._inbox.get(), max(_SOON_S, timeout - self.turns.silent_s))
            except TimeoutError:
                if self.turns.silent_s >= timeout:
                    raise LearnerGone(f"no message from the learner in {timeout:.0f} s of work (log: {self.child.log_path})") from None
        if isinstance(found, Exception):
            self._inbox.put_nowait(found)  # nothing comes after it
            raise found
        return found

    def serve(self) -> None:
        """Answer the learner from now on, whoever waits for what: a weight update is served while nobody asks for its result."""
        self._serving = asyncio.create_task(self._serve(), name="learner messages")
        self._watching = {asyncio.create_task(self._watch(child), name=f"watch {child.name}") for child in self.others}

    async def _watch(self, child: Child) -> None:
        """A rank that dies takes the learner with it: the others would wait for it."""
        await child.ended()
        if child.process.returncode:
            await asyncio.sleep(RANK_GRACE_S)  # rank 0 may have the better word
            self._inbox.put_nowait(LearnerGone(f"{_end_of(child)}; the whole learner goes with it"))

    async def _serve(self) -> None:
        try:
            while True:
                message = await self.link.receive(None)
                self.turns.hear(message.type)
                gives_out = await self._answer(message)
                if message.type != "sync_failed":  # after that it waits until an update is asked for
                    self.turns.answered()
                if gives_out:
                    self._inbox.put_nowait(message)
        except LinkError as error:
            self._inbox.put_nowait(self._gone(error))
        except HarnessRLError as error:
            self._inbox.put_nowait(error)
        except Exception as error:
            log.exception("the learner's messages could not be served")
            self._inbox.put_nowait(error)

    async def _answer(self, message: Message) -> bool:
        """Whether `next` should give it out."""
        match message.type:
            case "hello":
                return False
            case "sync_begin":
                await self.hooks.hold(message["version"])
                await self.link.send("sync_go")
                return False
            case "sync_done":
                report = SyncReport(message["version"], message["proof"], message["seconds"], message["counts"], message["adapter"])
                if not report.proof.get("ok"):
                    raise InvariantError(_proof_failure(report))
                self.last_sync = report
                asked = await self.hooks.release(report)
                await self.link.send("sync_ack", adapters_asked=asked)
            case "sync_failed":
                await self.hooks.failed(f"weights {message['version']} could not be pushed: {message['message']}")
                return False
            case "pushed":
                if message["wrong"]:
                    log.warning("checkpoint %s was not uploaded to %s: %s", message["step"], message["where"], message["wrong"])
                else:
                    log.info("checkpoint %s was uploaded to %s", message["step"], message["where"])
                return False
            case "failed":
                name = str(message["error"])
                text = f"the learner stopped: {name}: {message['message']} (log: {self.child.log_path})"
                if killed := await self._killed_rank():
                    raise LearnerGone(f"{_end_of(killed)}; rank 0 said: {name}: {message['message']}")
                raise InvariantError(text) if name in _INVARIANT_NAMES else LearnerError(text)
            case "closed":
                raise self._gone(message["reason"])
            case "checkpoint":
                self.last_checkpoint = message
        return True

    async def _killed_rank(self) -> Child | None:
        """One that a signal ended: what rank 0 says after that is no fault of its own. Waits a moment for the news."""
        watching = [asyncio.create_task(child.ended()) for child in self.others]
        if watching:
            _, late = await asyncio.wait(watching, timeout=RANK_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
            for task in late:
                task.cancel()
        return next((child for child in self.others if (child.process.returncode or 0) < 0), None)

    def _gone(self, reason: object) -> LearnerGone:
        return LearnerGone(f"the learner went away: {reason}: {self.child.last_words()} (log: {self.child.log_path})")

    async def send_batch(self, step: int, rows: Sequence[Row], timeout: float, rollouts: int | None = None) -> None:
        """Once it asks for one. Raises LearnerGone when it has work and says nothing for `timeout` seconds, or is not there."""
        while True:
            try:
                await self.link.send_batch(step, rows, max(_SOON_S, timeout - self.turns.silent_s), rollouts)
            except NoCredit as error:
                if self.turns.silent_s < timeout:
                    continue
                raise self._gone(error) from error
            except LinkError as error:
                raise self._gone(error) from error
            self.turns.given()
            return

    async def resync(self) -> None:
        """Ask for the present weights to be pushed again: the engine has lost them."""
        self.turns.ask()
        await self.link.send("resync")

    async def stop(self, *, timeout: float) -> Message:
        """Ask it to save and end, then make sure. Returns its last checkpoint message. Raises LearnerError with the learner's own cause."""
        checkpoint = self.last_checkpoint
        try:
            self.turns.ask()
            await self.link.send("stop", save=True)
            while (message := await self.next(timeout)).type != "bye":
                if message.type == "checkpoint":
                    checkpoint = message
        finally:
            await self.close()
        if checkpoint is None:
            raise LearnerError(f"the learner ended without a checkpoint (log: {self.child.log_path})")
        return checkpoint

    async def close(self) -> None:
        """Idempotent."""
        tasks = {self._serving, *self._watching} if self._serving is not None else set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(child.stop() for child in (self.child, *self.others)))
        await self.link.close()
        shutil.rmtree(self.link_dir, ignore_errors=True)


RANK_GRACE_S = 2.0
_SOON_S = 0.001
"""What is there already is taken also when time is up."""

_INVARIANT_NAMES = frozenset({"RowMismatch", "WeightProofFailed", "InvariantError"})


def _end_of(child: Child) -> str:
    return f"the {child.name} ended: {child.last_words()} (log: {child.log_path})"


def _proof_failure(report: SyncReport) -> str:
    proof = report.proof
    return (
        f"weights {report.version} are not proven: engine and learner differ by mean {proof.get('mean_abs'):.2e} "
        f"(max {proof.get('max_abs'):.2e}) over {proof.get('tokens')} tokens, bound {proof.get('bound'):.1e}; "
        "sampling stays stopped"
    )


async def start_learner(
    spec: LearnerSpec, *, python: Path, env: dict[str, str], hooks: SyncHooks, run_dir: Path, timeout: float
) -> LearnerProcess:
    """Start `python -m harness_rl.learner`, as many processes as the spec says, and wait until rank 0 has said hello."""
    token = secrets.token_hex(32)
    spec_file = run_dir / "learner.json"
    spec_file.write_text(spec.to_json())
    link_dir = scratch_dir()
    link = LearnerLink(link_dir / "link.sock", token)
    await link.start()
    # The torch environment may have no installed copy of the package; both ends must run the same code in any case.
    roots = {str(Path(package.__path__[0]).parent) for package in (harness_rl, capture_proxy)}
    paths = [*sorted(roots), *filter(None, [env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))])]
    env = {**os.environ, **env, TOKEN_ENV: token, "PYTHONPATH": os.pathsep.join(paths)}
    children = [
        await spawn(
            name,
            [str(python), "-m", "harness_rl.learner", "--config", str(spec_file), "--link", str(link.path)],
            log_path=run_dir / "logs" / f"{name}.log",
            env={**env, **of_rank},
        )
        for name, of_rank in _ranks(spec.processes).items()
    ]
    learner = LearnerProcess(children[0], link, hooks, link_dir, children[1:], turns=Turns(asked=bool(spec.engines)))
    try:
        hello = await _hello(learner, timeout)
    except BaseException:
        await learner.close()
        raise
    if hello["lineage"] != spec.lineage:
        await learner.close()
        raise LearnerError(f"a learner of lineage {hello['lineage']} answered instead of {spec.lineage}")
    learner.step = hello["step"]
    saved = run_dir / "checkpoints" / f"step-{learner.step}"
    if spec.resume and saved.is_dir():
        learner.last_checkpoint = Message("checkpoint", {"step": learner.step, "path": str(saved)})
    learner.serve()
    return learner


def _ranks(processes: int) -> dict[str, dict[str, str]]:
    """Name of each process -> what it must know of its place: torchrun's variables, also where control itself was started with some. Not
    torchrun itself, which puts its own words in place of a process's last ones, and its own exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {
        "learner" if rank == 0 else f"learner-rank{rank}": shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(processes)
    }


async def _hello(learner: LearnerProcess, timeout: float) -> Message:
    waiter = asyncio.create_task(learner.link.receive(timeout))
    deaths = {asyncio.create_task(child.ended()): child for child in (learner.child, *learner.others)}
    try:
        done, _ = await asyncio.wait({waiter, *deaths}, return_when=asyncio.FIRST_COMPLETED)
        if waiter not in done:
            ended = sorted((child for task, child in deaths.items() if task in done), key=lambda child: child.process.returncode or 0)
            words = f"the learner did not start: {_end_of(ended[0])}"
            killed = (ended[0].process.returncode or 0) < 0  # another start may come up
            raise LearnerGone(words) if killed else LearnerError(words)
        try:
            return waiter.result()
        except LinkError as error:
            raise LearnerGone(f"the learner did not start: {error} (log: {learner.child.log_path})") from error
    finally:
        for task in (waiter, *deaths):
            task.cancel()
