"""What a warm start is made from, and when an old one is still good."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from orchestrator.fakes import FakeFactory, outcome, trace

from harness_rl.config import RunConfig
from harness_rl.errors import LearnerError, LearnerGone, UserError, first_error
from harness_rl.learner.link import Message
from harness_rl.metrics import RunState
from harness_rl.orchestrator import warmup
from harness_rl.orchestrator.journal import Journal
from harness_rl.orchestrator.rollout import RolloutRunner
from harness_rl.orchestrator.warmup import (
    Check,
    Target,
    _checkpoint,
    _publish,
    _train,
    make_scripts,
    read_warm_start,
    warm_start_path,
    warm_up,
)
from harness_rl.sessions.harbor import HarborSessionFactory


@pytest.fixture
def task(tmp_path: Path) -> Path:
    folder = tmp_path / "task"
    (folder / "solution").mkdir(parents=True)
    (folder / "solution" / "solve.sh").write_text("#!/bin/bash\n# why\necho a > b.txt\n")
    (folder / "instruction.md").write_text("Write a to b.txt.")
    (folder / "task.toml").write_text("")
    return folder


def test_a_demonstration_is_the_solution_and_then_the_end_as_the_harness_knows_it(task):
    row = {"prompt": "Write a to b.txt.", "task_path": str(task)}
    mini, opencode = (HarborSessionFactory(split=task, harness=name) for name in ("mini-swe-agent", "opencode"))
    commands = [turn["tool_calls"][0]["arguments"]["command"] for turn in mini.demonstration(row)]
    assert commands == ["echo a > b.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    work, end = opencode.demonstration(row)
    assert work["tool_calls"][0]["arguments"]["command"] == "echo a > b.txt" and end == {"content": "Done."}
    (task / "solution" / "solve.sh").write_text("#!/bin/bash\n")
    with pytest.raises(UserError, match="holds no command"):
        mini.demonstration(row)


def test_a_warm_start_is_named_by_everything_it_depends_on(task, tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_RL_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    rows = [{"prompt": "Write a to b.txt.", "task_path": str(task)}]
    factory = FakeFactory(lambda task, episode: None)

    def name(**sections):
        config = RunConfig.model_validate(sections)
        return warm_start_path(config, factory, model, rows, [factory.demonstration(row) for row in rows])

    names = {"before": name()}
    assert name(learner={"learning_rate": 1.0}, run={"steps": 3}) == names["before"]
    names["warm-up"] = name(warmup={"learning_rate": 1e-4})
    names["seed"] = name(run={"seed": 1})
    (task / "solution" / "solve.sh").write_text("echo c > b.txt\n")
    names["solution"] = name()
    factory.identity = lambda: {"harness": "another"}
    names["agent"] = name()
    (model / "config.json").write_text('{"a": 1}')
    names["model"] = name()
    assert len(set(names.values())) == len(names)


async def test_demonstrations_are_made_one_at_a_time_while_the_run_goes_on():
    """One may be a whole game: it must neither stop the event loop nor need more than one session of a server."""
    running, together = 0, []

    def game(row):
        nonlocal running
        running += 1
        together.append(running)
        assert here.wait(10), "the event loop stood still"
        here.clear()
        running -= 1
        return [{"content": row["prompt"]}]

    here = threading.Event()
    factory = FakeFactory(lambda task, episode: None)
    factory.demonstration = game
    making = asyncio.create_task(make_scripts(factory, [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]))
    while not making.done():
        here.set()
        await asyncio.sleep(0.01)
    assert [script[0]["content"] for script in making.result()] == ["a", "b", "c"]
    assert together == [1, 1, 1]


async def test_demonstrations_and_measurement_together_keep_to_the_runs_bound(tmp_path):
    """A server that was checked for so many episodes gets no more, also where the learner is faster than the next demonstrations."""

    async def play(task, episode):
        await asyncio.sleep(0.05 if episode.startswith("demo") else 0.02)
        made = trace()
        made.turns[0].metadata["origin"] = "demonstration"
        return outcome(1.0, trace=made)

    async def send_batch(step, rows, timeout):
        learner.sent = step

    async def following(timeout):
        learner.last_checkpoint = {"step": learner.sent, "path": str(tmp_path)}
        return Message("result", {"metrics": {"updates": 1}})

    factory, journal = FakeFactory(play), Journal(tmp_path / "journal.sqlite")
    learner = SimpleNamespace(send_batch=send_batch, next=following, last_checkpoint=None, sent=0, step=0)
    warmup = {"demonstrations": 12, "batch": 4, "check_from": 4, "target_low": 0.9, "target_high": 1.0}
    config = RunConfig.model_validate({"rollout": {"max_concurrent_rollouts": 2}, "warmup": warmup})
    rows = factory.prompt_rows()
    shown = [(row, [{"content": "Done."}]) for row in rows]
    runner = RolloutRunner(factory, journal, None, 0)
    ended = await _train(config, runner, shown, rows, learner, RunState("t", 1), Target(0.9, 1.0))
    assert (ended.success, factory.most_open) == (1.0, 2)


@pytest.mark.parametrize(
    ("measured", "ends_at"),
    [
        ([0.0, 0.1, 0.4], 2),
        ([0.1, 0.3, 0.6], 1),  # above the range: back to the check before
        ([0.3, 0.2, 0.6], 2),  # which lay below it: nothing better is left
        ([0.1, 0.9], 1),
        ([0.5], 0),
        ([0.25, 0.3, 0.36], None),  # the lower half goes on
    ],
)
def test_a_warm_start_ends_inside_its_range_where_a_check_lay_there(tmp_path, measured, ends_at):
    target = Target(0.25, 0.5)
    checks = [Check(success, 6 * step, tmp_path / str(step)) for step, success in enumerate(measured)]
    ended = [target.see(check) for check in checks]
    assert ended[:-1] == [None] * (len(checks) - 1)
    assert ended[-1] == (None if ends_at is None else checks[ends_at])
    assert ends_at is not None or target.inside == checks[-1]


def test_a_check_above_the_range_by_less_than_its_own_error_is_at_its_edge(tmp_path):
    """19 of 36 is no evidence against a half; 24 of 36 is."""
    target = Target(0.25, 0.5)
    low, near, far = Check(0.25, 30, tmp_path), Check(19 / 36, 36, tmp_path, 0.083), Check(24 / 36, 36, tmp_path, 0.079)
    assert target.see(low) is None
    assert target.see(near) is near
    assert target.see(far) is low


async def test_the_weights_that_were_measured_are_waited_for(tmp_path):
    """On a slow disk a checkpoint comes later than the measurement ends: the one before it is another policy, and may be gone already."""
    learner = SimpleNamespace(last_checkpoint=Message("checkpoint", {"step": 1, "path": "step-1"}))

    async def following(timeout):
        learner.last_checkpoint = Message("checkpoint", {"step": learner.last_checkpoint["step"] + 1, "path": "step-2"})

    learner.next = following
    assert await _checkpoint(learner, 2, 1.0) == Path("step-2")
    assert await _checkpoint(learner, 2, 1.0) == Path("step-2")


def test_only_a_whole_warm_start_is_found(tmp_path):
    checkpoint, target = tmp_path / "step-3", tmp_path / "warm"
    checkpoint.mkdir()
    for name in ("model.safetensors", "config.json", "optimizer.pt", "COMPLETE"):
        (checkpoint / name).write_text(name)
    assert read_warm_start(target) is None
    _publish(checkpoint, target, {"success": 0.4, "demonstrations": 40})
    found = read_warm_start(target)
    assert found is not None
    assert (found.success, found.demonstrations) == (0.4, 40)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors", "warmup.json"]


class DyingLearner:
    """Trains a step for each batch and saves it; one that is to die does so once it has saved `dies_after` steps."""

    def __init__(self, work: Path, step: int, dies_after: int | None) -> None:
        self.work, self.step, self.dies_after = work, step, dies_after
        self.resync, self.close = AsyncMock(), AsyncMock()
        self.last_checkpoint = Message("checkpoint", {"step": step, "path": str(work / f"step-{step}")})
        self.trained = []

    async def send_batch(self, step, rows, timeout):
        self.trained.append(step)
        (self.work / f"step-{step}").mkdir()
        self.last_checkpoint = Message("checkpoint", {"step": step, "path": str(self.work / f"step-{step}")})

    async def next(self, timeout):
        if self.trained and self.trained[-1] == self.dies_after:
            raise LearnerGone("the learner went away: killed by SIGKILL")
        return Message("result", {"metrics": {"loss": 0.5}})


class Warming:
    """A warm start whose learners, one after another, die after the steps of `deaths`; success grows with the steps."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: list[int | None], **learner) -> None:
        section = {"demonstrations": 10, "batch": 2, "check_from": 4, "target_low": 0.35, "target_high": 0.5}
        self.config = RunConfig.model_validate({"run": {"dir": tmp_path, "name": "a"}, "warmup": section, "learner": learner})
        monkeypatch.setenv("HARNESS_RL_CACHE", str(tmp_path / "cache"))
        self.learners: list[DyingLearner] = []
        self.specs = []
        self.demonstrated = []
        self.work = tmp_path / "a" / "warmup"

        async def start(spec, **_):
            self.specs.append(spec)
            saved = max((int(path.name[5:]) for path in self.work.glob("step-*")), default=0) if spec.resume else 0
            self.learners.append(DyingLearner(self.work, saved, deaths[len(self.learners)]))
            return self.learners[-1]

        async def demonstrate(runner, shown, step, slots):
            self.demonstrated.append((step, [row["task_name"] for row, _ in shown]))
            return []

        async def measure(config, runner, rows, state, step, slots):
            return 0.1 * step, 4

        @contextlib.asynccontextmanager
        async def watched(resync):
            try:
                yield
            except BaseExceptionGroup as group:
                raise first_error(group) from None

        for name, fake in (("start_learner", start), ("_demonstrate", demonstrate), ("_measure", measure)):
            monkeypatch.setattr(warmup, name, fake)
        self.services = SimpleNamespace(
            engine_urls=[], engine_dtype="float32", model="policy", learner_threads=1, learner_env={}, torch_python=lambda path: path,
            watched=watched, excuse_failed_sync=None, hold=AsyncMock(), release=AsyncMock(), renew_engine=AsyncMock(),
        )  # fmt: skip
        self.state, self.journal = RunState("a", 1), Journal(tmp_path / "journal.sqlite")

    async def run(self):
        factory = FakeFactory(lambda task, episode: None)
        rows = [{"prompt": f"p{n}", "task_name": f"t{n}"} for n in range(10)]
        scripts = [[] for _ in rows]
        return await warm_up(self.config, self.services, factory, rows, self.journal, self.state, Path("no-model"), scripts)


async def test_a_learner_killed_in_the_warm_start_goes_on_from_its_newest_checkpoint(tmp_path, monkeypatch):
    warming = Warming(tmp_path, monkeypatch, [2, None])
    (warming.work / "step-9").mkdir(parents=True)  # of a process that died: it is no part of this one
    found = await warming.run()
    assert (found.success, found.demonstrations) == (0.5, 10)
    assert [learner.trained for learner in warming.learners] == [[1, 2], [3, 4, 5]]
    assert [spec.resume for spec in warming.specs] == [False, True]
    assert warming.specs[0].lineage != warming.specs[1].lineage
    shown = dict(warming.demonstrated)
    assert sorted(name for step in range(1, 6) for name in shown[step]) == sorted(f"t{n}" for n in range(10))
    assert "starting it again from its newest checkpoint" in warming.state.messages[-4]
    warming.services.renew_engine.assert_not_awaited()


async def test_a_learner_that_dies_in_a_weight_update_of_the_warm_start_renews_the_engine(tmp_path, monkeypatch):
    warming = Warming(tmp_path, monkeypatch, [1, None])
    warming.state.holding = True
    await warming.run()
    warming.services.renew_engine.assert_awaited_once()


async def test_a_learner_that_dies_after_the_last_step_of_a_warm_start_has_its_weights_measured(tmp_path, monkeypatch):
    warming = Warming(tmp_path, monkeypatch, [5, None])
    found = await warming.run()
    assert (found.success, warming.learners[1].trained) == (0.5, [])


async def test_restarts_in_the_warm_start_are_bounded(tmp_path, monkeypatch):
    warming = Warming(tmp_path, monkeypatch, [1, 2, None], max_restarts=1)
    with pytest.raises(LearnerError, match=r"warm-up: the learner went away: .*; it was started 2 times \(learner\.max_restarts\)"):
        await warming.run()
    assert len(warming.learners) == 2
