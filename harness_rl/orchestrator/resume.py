"""From a run folder back to a running state: what is done, what is still good, what has to be done again.

The weights of the newest checkpoint decide. Every group ends up in one of three places: covered by that checkpoint, scored and waiting to
be trained (again), or given up, and then its task is played anew. So no group is lost, and none is trained twice along the surviving line.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness_rl.errors import Cause
from harness_rl.learner.rows import parse_version
from harness_rl.orchestrator.batches import Group
from harness_rl.orchestrator.journal import GroupEntry, GroupState, Journal
from harness_rl.orchestrator.rollout import Rollout
from harness_rl.sessions.base import HarnessRolloutOutcome
from harness_rl.sessions.outcome import read_outcome

log = logging.getLogger(__name__)


@dataclass
class Restored:
    """Where a run goes on. Of a fresh run: everything zero or empty."""

    step: int = 0
    """Optimizer steps in the weights."""
    line: dict[str, int] = field(default_factory=dict)
    """Earlier lineages of the surviving line, with the last step of each whose weights were proven."""
    groups: list[Group] = field(default_factory=list)
    """Scored, not yet trained into the weights."""
    again: list[int] = field(default_factory=list)
    """Positions in the task order whose groups were given up."""
    next_group: int = 0
    next_position: int = 0


def restore(journal: Journal, rollouts_dir: Path, step: int, max_staleness: int) -> Restored:
    """Bring the journal back to the weights after `step`, and read from the run folder what can still be used. Idempotent."""
    line = surviving_line([tuple(entry) for entry in journal.meta("lineages") or []], step, journal.meta("proven") or {})
    journal.take_back(step)
    groups = []
    for entry in journal.groups(GroupState.SCORED):
        group = _read_group(journal, rollouts_dir, entry)
        if group is None or not _trainable(group, line, step, max_staleness):
            journal.move_groups([entry.group_id], GroupState.DROPPED, reason=Cause.ABANDONED)
        else:
            groups.append(group)
    next_group, next_position = journal.next_places()
    return Restored(step, line, groups, journal.positions_given_up(), next_group, next_position)


def surviving_line(lineages: Sequence[tuple[Any, ...]], step: int, proven: dict[str, int]) -> dict[str, int]:
    """lineage -> its last step on the way to the weights after `step`; without the steps that were not proven.

    `lineages` are (name, the step it started from) in order of their start. One that started from a later step than a later one did was
    taken back whole.
    """
    line: dict[str, int] = {}
    end = step
    for name, start in reversed(lineages):
        if start <= end:
            line[str(name)] = min(end, proven.get(str(name), start - 1))
            end = start
    return line


def _read_group(journal: Journal, rollouts_dir: Path, entry: GroupEntry) -> Group | None:
    """None when a scored rollout's trace or record is no longer whole."""
    rollouts = []
    for found in journal.rollouts(entry.group_id):
        outcome: HarnessRolloutOutcome | None = None
        if found.reward is not None:
            try:
                outcome = read_outcome(rollouts_dir / found.rollout_id)
            except (OSError, ValueError) as error:
                log.warning("group %s is played again: rollout %s cannot be read: %s", entry.group_id, found.rollout_id, error)
                return None
        rollouts.append(
            Rollout(found.rollout_id, entry.group_id, found.member, found.attempt + 1, found.reward, outcome, found.causes, found.seconds)
        )
    return Group(entry.group_id, entry.task, rollouts)


def _trainable(group: Group, line: dict[str, int], step: int, max_staleness: int) -> bool:
    """Whether the next update may use every sampled token: of the surviving line, proven, and not too old."""
    if not group.usable:
        return False
    for rollout in group.rollouts:
        for turn in rollout.outcome.trace.turns if rollout.outcome else []:
            for version, _, _ in turn.metadata.get("weight_versions") or []:
                lineage, sampled_at = parse_version(version)
                if sampled_at > line.get(lineage, -1) or step - sampled_at > max_staleness:
                    return False
    return True
