"""A reward that an untrained model earns in different amounts, so that a run trains whatever the model can do."""

from harness_rl import HarnessRolloutOutcome


def sampled_tokens(outcome: HarnessRolloutOutcome) -> float:
    return float(sum(len(turn.completion_token_ids) for turn in outcome.trace.turns))
