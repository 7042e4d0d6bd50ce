"""Why the learner's logprob of a token is not the engine's: every trained token has exactly one cause, and the worst rows are named.

The cause is the first that applies, so what is left as `numeric` is the floor that two implementations of one model have, and any other
cause that lies above it is at fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness_rl.learner.rows import Row, parse_version


class Cause(StrEnum):
    STALE = "stale"
    """An older policy sampled it: the policy has moved, which the corrections are for."""
    KV_MIXED = "kv_mixed"
    """The policy in training sampled it after tokens that an older one did, and updates leave the engine's keys and values as they are
    (`sync.kv = keep`): those of the earlier tokens are the older policy's."""
    TEMPLATE = "template"
    """Its row opens with a prompt that repeats an earlier turn in other tokens: the conversation was rendered anew."""
    TEMPERATURE = "temperature"
    """Sampled at another temperature than 1: an engine that reports raw logprobs shows here."""
    NUMERIC = "numeric"
    """None of these: the same policy on the same tokens, in another implementation."""


CAUSES = tuple(Cause)


def token_ages(row: Row, current: str) -> NDArray[np.int32]:
    """[L] optimizer steps between the policy that sampled each token and `current`; 0 where the token is not sampled.

    A token of another lineage (sampled before a restart) is never taken for one of the current policy: its age is at least 1.
    """
    lineage, step = parse_version(current)
    ages = np.zeros(len(row), dtype=np.int32)
    for span in row.spans:
        for version, start, end in span.versions:
            token_lineage, token_step = parse_version(version)
            ages[start:end] = step - token_step if token_lineage == lineage else max(1, step - token_step)
    return ages


def token_causes(row: Row, current: str, kv: Literal["recompute", "keep"]) -> NDArray[np.uint8]:
    """[L] index into CAUSES of each sampled token; `numeric` for the rest. `kv` is `sync.kv`."""
    rest = Cause.TEMPLATE if row.forked else Cause.TEMPERATURE if row.temperature != 1.0 else Cause.NUMERIC
    causes = np.full(len(row), CAUSES.index(rest), dtype=np.uint8)
    if kv == "keep":
        begun = row.spans[0].versions[0][0] if row.spans else current
        for span in row.spans:
            for version, start, end in span.versions:
                if version != begun:
                    causes[start:end] = CAUSES.index(Cause.KV_MIXED)
    causes[token_ages(row, current) > 0] = CAUSES.index(Cause.STALE)
    return causes


def worst_rows(
    rows: Sequence[Row],
    owner: NDArray[np.int64],
    position: NDArray[np.int64],
    learner: NDArray[np.float32],
    engine: NDArray[np.float32],
    causes: NDArray[np.uint8],
    count: int = 10,
) -> list[dict[str, Any]]:
    """The `count` rows with the largest mean |learner - engine|, worst first; term n is token `position[n]` of `rows[owner[n]]`.

    Rows are ranked by what the policy in training itself sampled, so that a moved policy does not hide a fault; rows without such tokens
    come last. For people: each entry says where to look (row, token, both logprobs) and how its tokens split by cause.
    """
    gap = np.abs(learner.astype(np.float64) - engine)
    fresh = causes != CAUSES.index(Cause.STALE)
    length = len(rows)
    tokens, fresh_tokens = np.bincount(owner, minlength=length), np.bincount(owner[fresh], minlength=length)
    mean = np.bincount(owner, gap, length) / np.maximum(tokens, 1)
    fresh_mean = np.bincount(owner[fresh], gap[fresh], length) / np.maximum(fresh_tokens, 1)
    order = sorted((int(r) for r in np.flatnonzero(tokens)), key=lambda r: (-fresh_mean[r], -mean[r], rows[r].row_id))
    found = []
    for r in order[:count]:
        mine = np.flatnonzero(owner == r)
        candidates = mine[fresh[mine]] if fresh_tokens[r] else mine
        worst = candidates[np.argmax(gap[candidates])]
        found.append(
            {
                "row_id": rows[r].row_id,
                "rollout_id": rows[r].rollout_id,
                "group_id": rows[r].group_id,
                "tokens": int(tokens[r]),
                "mean": float(mean[r]),
                "mean_fresh": float(fresh_mean[r]) if fresh_tokens[r] else None,
                "by_cause": {CAUSES[c]: int(n) for c, n in enumerate(np.bincount(causes[mine])) if n},
                "worst": {
                    "position": int(position[worst]),
                    "token": int(rows[r].ids[position[worst]]),
                    "cause": CAUSES[causes[worst]],
                    "engine": float(engine[worst]),
                    "learner": float(learner[worst]),
                },
            }
        )
    return found
