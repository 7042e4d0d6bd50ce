"""One step's metrics line from its batch, the learner's figures and the weight update. Pure; every name says what it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

from harness_rl.metrics import Metric, mean, std
from harness_rl.orchestrator.batches import Batch
from harness_rl.orchestrator.learner_process import SyncReport
from harness_rl.orchestrator.staleness import stale_metrics, used_rollouts
from harness_rl.sessions.base import HarnessRolloutOutcome

_LOGGED = "log/"


def step_metrics(batch: Batch, learner: dict[str, Any], sync: SyncReport | None) -> dict[str, float]:
    """`reward` and `reward_std` are over *all* scored rollouts of the step, before any filtering; `reward_trained` over the trained
    groups."""
    rollouts = [rollout for group in batch.considered for rollout in group.rollouts]
    scored = [reward for group in batch.considered for reward in group.rewards]
    trained = [reward for group in batch.groups for reward in group.rewards]
    line: dict[str, float] = {
        Metric.REWARD: mean(scored),
        Metric.REWARD_STD: std(scored),
        Metric.REWARD_TRAINED: mean(trained),
        Metric.SCORED: len(scored),
        "rollout/unscored": len(rollouts) - len(scored),
        "rollout/retries": sum(rollout.attempts - 1 for rollout in rollouts),
        "rollout/duration_mean_s": mean(rollout.seconds for rollout in rollouts),
        "rollout/groups_considered": len(batch.considered),
        "rollout/groups_trained": len(batch.groups),
        "rollout/groups_zero_variance": sum(group.drop_reason == "zero_variance" for group in batch.considered),
        "rollout/groups_unscorable": sum(group.drop_reason == "unscorable" for group in batch.considered),
        "rollout/groups_outcome_tied": sum(group.usable and group.outcome_tied for group in batch.considered),
        "rollout/short_step": float(batch.short),
        "rows": len(batch.rows),
    }
    for cause, count in Counter(cause for rollout in rollouts for cause in rollout.causes).items():
        line[f"rollout/failed/{cause}"] = count
    outcomes = [rollout.outcome for rollout in rollouts if rollout.outcome is not None]
    line["rollout/turns_mean"] = mean(outcome.turns for outcome in outcomes)
    line["rollout/timed_out"] = sum(outcome.timed_out for outcome in outcomes)
    line["tools/call_frequency"] = mean(outcome.tool_call_count for outcome in outcomes)
    calls = sum(outcome.tool_call_count for outcome in outcomes)
    line["tools/failure_frequency"] = sum(outcome.tool_failure_count for outcome in outcomes) / calls if calls else 0.0
    line |= _of_sessions(outcomes)
    for reason, count in _calls(batch).items():
        line[f"calls/{reason}"] = count
    line["tokens/sampled"] = sum(len(turn.completion_token_ids) for outcome in outcomes for turn in outcome.trace.turns)
    line |= {name: value for name, value in _logged(outcomes).items() if name not in line}
    line |= stale_metrics(used_rollouts(batch))
    if sync is not None:
        line |= {f"perf/sync_{name}_s": float(seconds) for name, seconds in sync.seconds.items()}
        line |= {f"sync/{name}": float(count) for name, count in sync.counts.items()}
        line |= {f"sync/proof_{name}": float(sync.proof[name]) for name in ("tokens", "mean_abs", "max_abs", "bound") if name in sync.proof}
    return line | {learner_name(name): float(value) for name, value in learner.items() if isinstance(value, int | float)}


def _of_sessions(outcomes: list[HarnessRolloutOutcome]) -> dict[str, float]:
    """What sessions measured under names of this vocabulary (`family/name`): the mean over the rollouts that have it; of each reward
    function its spread too."""
    line: dict[str, float] = {}
    for name, values in _by_name(outcomes).items():
        if name.startswith("rewards/"):
            line |= {f"{name}/mean": mean(values), f"{name}/std": std(values)}
        elif "/" in name and not name.startswith(_LOGGED):
            line[name] = mean(values)
    return line


def _logged(outcomes: list[HarnessRolloutOutcome]) -> dict[str, float]:
    """What reward functions logged, under the plain names that they gave."""
    return {name.removeprefix(_LOGGED): mean(values) for name, values in _by_name(outcomes).items() if name.startswith(_LOGGED)}


def _by_name(outcomes: list[HarnessRolloutOutcome]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.metrics.items():
            found.setdefault(name, []).append(value)
    return found


def learner_name(name: str) -> str:
    """The learner counts in its own words; a metrics line uses one vocabulary for both processes."""
    family, _, rest = name.partition("/")
    match family:
        case "seconds":
            return f"perf/{rest}_s"
        case "staleness":
            return f"sample/staleness_{rest}"
        case "tokens_per_second":
            return "perf/learner_tok_s"
        case _:
            return name


def _calls(batch: Batch) -> Counter[str]:
    """Captured calls of the step's scored rollouts by what became of them: `trained`, the reason for which the capture keeps them only, or
    the reason for which their whole group was dropped."""
    calls: Counter[str] = Counter()
    for group in batch.considered:
        for rollout in group.rollouts:
            for turn in rollout.outcome.trace.turns if rollout.outcome else []:
                kept = None if any(turn.loss_mask) else str(turn.metadata.get("mask_reason") or "empty")
                calls[kept or group.drop_reason or "trained"] += 1
    return calls
