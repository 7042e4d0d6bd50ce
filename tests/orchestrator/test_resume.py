"""A run that died goes on: every group is in the weights, or still to be trained, or played again; never two of these."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestrator.fakes import outcome, trace

from harness_rl.errors import Cause
from harness_rl.metrics import MetricsLog, read_metrics
from harness_rl.orchestrator.journal import GroupState, Journal, RolloutState
from harness_rl.orchestrator.resume import restore, surviving_line
from harness_rl.sessions.outcome import OUTCOME_FILE, TRACE_FILE, rollout_record, write_record

LAST = 10_000


class Folder:
    """A run folder as a run leaves it, group by group."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = Journal(path / "journal.sqlite")
        self.opened = 0

    def open(self, position: int) -> str:
        name = f"g{self.opened:05d}"
        self.opened += 1
        self.journal.open_group(name, position, f"t{position}")
        return name

    def play(self, group: str, version: str, rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
        for member, reward in enumerate(rewards):
            name = f"{group}-{member}"
            self.journal.open_rollout(name, group, member, 0)
            found = outcome(reward, trace=trace(version))
            write_record(self.path / "rollouts" / name, rollout_record({}, found, None), found.trace)
            self.journal.end_rollout(name, RolloutState.SCORED, reward=reward, turns=1)
        self.journal.move_groups([group], GroupState.SCORED)

    def lineages(self, *entries: tuple[str, int], proven: dict[str, int] | None = None) -> None:
        self.journal.set_meta("lineages", [list(entry) for entry in entries])
        self.journal.set_meta("proven", {name: LAST for name, _ in entries} if proven is None else proven)

    def restore(self, step: int, max_staleness: int = 1):
        return restore(self.journal, self.path / "rollouts", step, max_staleness)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.mark.parametrize(
    ("lineages", "step", "expected"),
    [
        ([], 0, {}),
        ([("a", 0)], 7, {"a": 7}),
        ([("a", 0), ("b", 4)], 6, {"b": 6, "a": 4}),  # a's steps after 4 were taken back
        ([("a", 0), ("b", 10), ("c", 5)], 8, {"c": 8, "a": 5}),  # b started from a checkpoint that no longer counts
        ([("a", 0), ("b", 0)], 3, {"b": 3, "a": 0}),
    ],
)
def test_the_surviving_line(lineages: list[tuple[str, int]], step: int, expected: dict[str, int]) -> None:
    assert surviving_line(lineages, step, {"a": LAST, "b": LAST, "c": LAST}) == expected


def test_steps_that_were_not_proven_are_not_on_the_line() -> None:
    assert surviving_line([("a", 0), ("b", 4)], 6, {"a": 2}) == {"b": 3, "a": 2}  # of b nothing at all


def test_a_fresh_run_has_nothing_to_restore(folder: Folder) -> None:
    found = folder.restore(0)
    assert (found.groups, found.again, found.next_group, found.next_position) == ([], [], 0, 0)


def test_what_was_trained_after_the_checkpoint_is_trained_again_and_what_ran_is_played_again(folder: Folder) -> None:
    done, later, scored, running = (folder.open(position) for position in range(4))
    for group, version in ((done, "a-0"), (later, "a-1"), (scored, "a-1")):
        folder.play(group, version)
    folder.journal.open_rollout(f"{running}-0", running, 0, 0)
    folder.journal.move_groups([done], GroupState.TRAINED, step=1)
    folder.journal.move_groups([later], GroupState.LEASED, step=2)
    folder.journal.end_step(1, "a-1", {})
    folder.journal.end_step(2, "a-2", {})
    folder.lineages(("a", 0))

    found = folder.restore(1)
    assert [group.group_id for group in found.groups] == [later, scored]
    assert [rollout.reward for rollout in found.groups[0].rollouts] == [0.0, 1.0]
    assert found.groups[0].rollouts[1].outcome.trace.turns[0].completion_token_ids.tolist() == [3, 4]
    assert (found.again, found.next_group, found.next_position) == ([3], 4, 4)
    counts = folder.journal.counts()
    assert counts["groups"] == {"durable": 1, "scored": 2, "dropped": 1}
    assert counts["causes"] == {Cause.ABANDONED: 1}


def test_groups_of_weights_that_were_taken_back_are_played_again(folder: Folder) -> None:
    """Sampled by a-3, but the run goes on from a-2: nobody can say how far a-3 is from any policy of the line."""
    group = folder.open(0)
    folder.play(group, "a-3")
    folder.lineages(("a", 0))
    assert (folder.restore(2).groups, folder.restore(2).again) == ([], [0])


def test_groups_that_are_too_old_or_unproven_are_played_again(folder: Folder) -> None:
    old, unproven = folder.open(0), folder.open(1)
    folder.play(old, "a-1")
    folder.play(unproven, "a-3")
    folder.lineages(("a", 0), proven={"a": 2})
    assert folder.restore(3, max_staleness=1).again == [0, 1]


@pytest.mark.parametrize("file", [TRACE_FILE, OUTCOME_FILE])
@pytest.mark.parametrize("damage", ["torn", "gone", "flipped"])
def test_a_rollout_that_is_no_longer_whole_is_played_again(folder: Folder, file: str, damage: str) -> None:
    group = folder.open(0)
    folder.play(group, "a-0")
    folder.lineages(("a", 0))
    path = folder.path / "rollouts" / f"{group}-1" / file
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    assert folder.restore(0).again == [0]


def test_a_second_death_forgets_nothing(folder: Folder) -> None:
    """Positions that were to be played again and had not begun are still to be played again."""
    for position in range(3):
        folder.open(position)
    folder.lineages(("a", 0))
    assert folder.restore(0).again == [0, 1, 2]
    folder.play(folder.open(0), "b-0")
    folder.open(1)
    folder.lineages(("a", 0), ("b", 0))
    found = folder.restore(0)
    assert ([group.group_id for group in found.groups], found.again, found.next_position) == (["g00003"], [1, 2], 3)


@given(
    states=st.lists(st.sampled_from(["running", "scored", "leased", "trained", "flat"]), max_size=12),
    checkpoint=st.integers(0, 4),
    deaths=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_g03_no_position_is_lost_played_or_trained_twice(states: list[str], checkpoint: int, deaths: int) -> None:
    with TemporaryDirectory() as path:
        folder = Folder(Path(path))
        for position, state in enumerate(states):
            group = folder.open(position)
            if state == "running":
                continue
            folder.play(group, f"a-{position % 3}")
            if state == "flat":
                folder.journal.move_groups([group], GroupState.DROPPED, reason="zero_variance")
            elif state != "scored":
                folder.journal.move_groups([group], GroupState(state), step=position % 5 + 1)
        folder.lineages(("a", 0))
        for _ in range(deaths):
            found = folder.restore(checkpoint)
        ready = {int(group.task[1:]) for group in found.groups}
        durable = {entry.position for entry in folder.journal.groups(GroupState.DURABLE)}
        flat = {position for position, state in enumerate(states) if state == "flat"}
        places = [ready, durable, flat, set(found.again)]
        assert set().union(*places) == set(range(len(states)))
        assert sum(map(len, places)) == len(states)


def test_a_torn_line_of_metrics_is_dropped_and_the_file_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        log.write({"step": step, "reward": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert [line["step"] for line in log.take_back(2)] == [1, 2]
    log.write({"step": 3, "reward": 0.75})
    assert [line["reward"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0.5, 0.5, 0.75]
