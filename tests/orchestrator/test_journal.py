import shutil

import pytest

from harness_rl.errors import Cause, HarnessRLError, UserError
from harness_rl.orchestrator.journal import GroupState, Journal, RolloutState


@pytest.fixture
def journal(tmp_path):
    opened = Journal(tmp_path / "journal.sqlite")
    yield opened
    opened.close()


def test_a_group_moves_to_durable_only_under_a_checkpoint_that_covers_it(journal):
    for position, name in enumerate(["a", "b", "c"]):
        journal.open_group(name, position, "task")
    journal.move_groups(["a"], GroupState.TRAINED, step=1)
    journal.move_groups(["b"], GroupState.TRAINED, step=2)
    journal.make_durable(1, "checkpoints/step-1")
    assert journal.counts()["groups"] == {"durable": 1, "trained": 1, "running": 1}


def test_every_rollout_ends_in_one_state_and_causes_are_counted(journal):
    journal.open_group("g", 0, "task")
    for member in range(3):
        journal.open_rollout(f"g-{member}", "g", member, 0)
    journal.end_rollout("g-0", RolloutState.SCORED, reward=1.0, turns=2)
    journal.end_rollout("g-1", RolloutState.FAILED, cause=Cause.SANDBOX_START, message="no mount")
    journal.end_rollout("g-2", RolloutState.FAILED, cause=Cause.CANCELLED)
    journal.drop_running()
    counts = journal.counts()
    assert counts["rollouts"] == {"scored": 1, "failed": 2}
    assert counts["causes"] == {"sandbox_start": 1, "cancelled": 1}
    assert counts["groups"] == {"dropped": 1}


def test_what_was_written_survives_without_a_close(tmp_path):
    Journal(tmp_path / "j.sqlite").open_group("g", 0, "task")
    assert Journal(tmp_path / "j.sqlite").counts()["groups"] == {"running": 1}


@pytest.mark.parametrize("lost", [1, 100, 4096, 9000, 20000])
def test_a_torn_tail_loses_only_what_came_last(tmp_path, lost):
    names = [f"g{number}" for number in range(8)]
    journal = Journal(tmp_path / "j.sqlite")
    for position, name in enumerate(names):
        journal.open_group(name, position, "task")
    torn = tmp_path / "torn"
    torn.mkdir()
    shutil.copy(tmp_path / "j.sqlite", torn)
    tail = (tmp_path / "j.sqlite-wal").read_bytes()
    (torn / "j.sqlite-wal").write_bytes(tail[:-lost])
    found = [entry.group_id for entry in Journal(torn / "j.sqlite").groups(GroupState.RUNNING)]
    assert found == names[: len(found)] and len(found) < 8
    assert len(found) >= 8 - 1 - lost // 4096
    journal.close()


def test_f18_a_full_disk_is_named_and_what_was_written_stays(tmp_path):
    journal = Journal(tmp_path / "j.sqlite")
    journal.open_group("a", 0, "task")
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own way to say that the disk is full
    with pytest.raises(HarnessRLError, match=r"cannot be written: database or disk is full; .* --resume"):
        for position in range(1, 1000):
            journal.open_group(f"g{position}", position, "task" * 100)
    with pytest.raises(HarnessRLError, match="disk is full"):
        journal.set_meta("key", "value" * 10_000)
    journal.move_groups(["a"], GroupState.TRAINED, step=1)
    assert journal.counts()["groups"]["trained"] == 1
    journal.close()


def test_f18_a_folder_that_turned_read_only_is_named_and_what_was_written_stays(tmp_path):
    journal = Journal(tmp_path / "j.sqlite")
    journal.open_group("a", 0, "task")
    journal._db.execute("PRAGMA query_only = ON")  # SQLite's own way to say so
    with pytest.raises(HarnessRLError, match=r"cannot be written: attempt to write a readonly database; .* --resume"):
        journal.move_groups(["a"], GroupState.TRAINED, step=1)
    journal.close()
    assert Journal(tmp_path / "j.sqlite").counts()["groups"] == {"running": 1}


def test_a_file_that_is_no_journal_is_refused_in_one_line(tmp_path):
    (tmp_path / "j.sqlite").write_text("not a database, not even close to one, really not" * 100)
    with pytest.raises(UserError, match="not a journal"):
        Journal(tmp_path / "j.sqlite")
