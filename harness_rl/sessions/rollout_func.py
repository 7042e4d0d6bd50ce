"""TRL's `rollout_func(prompts, trainer)`: the user's own loop, held to what the proxy captured.

Invariant: ids that such a function returns are trained only where they are, position by position, a conversation that the proxy captured in
this rollout: sampled where the mask says so, with the logprobs that the engine gave. Anything else is kept as `unproven` and not trained,
unless `trust_rollout_func` says that it comes from a server which the user vouches for; both are counted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_proxy.reasons import Reason
from capture_proxy.trace import TrainingTrace, TrainingTurn, hash_ids, hash_sample

LOGPROB_TOLERANCE = 1e-4
"""A function may have carried the engine's numbers through other types; no more than that."""
REQUIRED = ("prompt_ids", "completion_ids", "logprobs")

RolloutFunc = Callable[[list[Any], Any], Any]


class BadRollout(ValueError):
    """What a rollout function returned has no such form; the message names the key and the fix."""


@dataclass(frozen=True)
class Returned:
    """One sample as a rollout function gave it."""

    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """[C]; where the mask is 0 they mean nothing."""
    mask: NDArray[np.uint8]
    """[C]: 1 = sampled by the model."""
    extra: dict[str, Any]
    """Further keys, for reward functions."""


def read_returned(result: Any) -> list[Returned]:
    """The one sample of a function that was given one prompt: a dict, or a TrainingTrace, of which each turn that trains is one. Raises
    BadRollout."""
    if isinstance(result, TrainingTrace):
        trained = [turn for turn in result.turns if turn.completion_mask.any()]
        if not trained:
            raise BadRollout("its TrainingTrace has no turn that trains")
        return [Returned(t.prompt_token_ids, t.completion_token_ids, t.per_token_logps, t.completion_mask, {}) for t in trained]
    if not isinstance(result, Mapping):
        raise BadRollout(f"it returned a {type(result).__name__}; return a dict with {', '.join(REQUIRED)}, or a TrainingTrace")
    missing = [key for key in REQUIRED if key not in result]
    if missing:
        raise BadRollout(f"its dict lacks {', '.join(missing)}")
    prompt, completion = (_ids(result, key) for key in ("prompt_ids", "completion_ids"))
    given = _one(result, "env_mask") if result.get("env_mask") is not None else [1] * len(completion)
    mask = np.asarray(given)
    if len(mask) != len(completion) or not np.isin(mask, (0, 1)).all():
        raise BadRollout(f"env_mask: {len(mask)} values for {len(completion)} completion_ids; give 1 for sampled tokens, 0 for others")
    logprobs = _logprobs(result, len(completion))
    if not len(prompt) or not mask.any():
        raise BadRollout("prompt_ids are empty, or env_mask has no 1: nothing was sampled")
    extra = {key: _column(value) for key, value in result.items() if key not in (*REQUIRED, "env_mask", "logprob_token_ids")}
    return [Returned(prompt, completion, logprobs, mask.astype(np.uint8), extra)]


def _one(result: Mapping[str, Any], key: str) -> Any:
    """The one entry of a list with an entry for each prompt."""
    values = result[key]
    if not hasattr(values, "__len__") or len(values) != 1:
        count = len(values) if hasattr(values, "__len__") else "no"
        raise BadRollout(f"{key}: {count} entries for 1 prompt; return a list with one list for each prompt")
    return values[0]


def _column(values: Any) -> Any:
    """Per sample where it is a list, the same for all where it is not (as in TRL)."""
    return values[0] if isinstance(values, list) and values else values


def _ids(result: Mapping[str, Any], key: str) -> NDArray[np.int32]:
    values = list(_one(result, key))
    if any(isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0 for value in values):
        raise BadRollout(f"{key}: token ids are whole numbers from 0 on")
    return np.asarray(values, dtype=np.int32)


def _logprobs(result: Mapping[str, Any], count: int) -> NDArray[np.float32]:
    """One for each completion token; TRL's form with the sampled token's first of several is taken too."""
    values = [value[0] if isinstance(value, list | tuple) and value else value for value in _one(result, "logprobs")]
    if len(values) != count:
        raise BadRollout(f"logprobs: {len(values)} values for {count} completion_ids")
    try:
        return np.asarray([math.nan if value is None else float(value) for value in values], dtype=np.float32)
    except (TypeError, ValueError):
        raise BadRollout("logprobs: they are numbers") from None


def proven(trace: TrainingTrace, returned: list[Returned]) -> TrainingTrace | None:
    """The captured trace with exactly the returned tokens trained; None where one of them is not a conversation of it."""
    wanted: dict[str, NDArray[np.uint8]] = {}
    for sample in returned:
        found = _found(trace, sample)
        if found is None:
            return None
        for node_id, mask in found.items():
            wanted[node_id] = wanted[node_id] | mask if node_id in wanted else mask
    return TrainingTrace(turns=[_masked(turn, wanted.get(turn.node_id), Reason.DISCARDED) for turn in trace.turns])


def _found(trace: TrainingTrace, sample: Returned) -> dict[str, NDArray[np.uint8]] | None:
    """The completion mask of each captured turn that the sample is made of."""
    ids = np.concatenate([sample.prompt_ids, sample.completion_ids])
    by_id = {turn.node_id: turn for turn in trace.turns}
    for last in trace.turns:
        if not np.array_equal(ids, np.concatenate([last.prompt_token_ids, last.completion_token_ids])):
            continue
        masks = {turn.node_id: _mask_of(turn, sample) for turn in _chain(last, by_id, len(sample.prompt_ids))}
        found = {node_id: mask for node_id, mask in masks.items() if mask is not None}
        if len(found) == len(masks) and sum(int(mask.sum()) for mask in found.values()) == int(sample.mask.sum()):
            return found
    return None


def _chain(last: TrainingTurn, by_id: Mapping[str, TrainingTurn], first: int) -> list[TrainingTurn]:
    """The turns of the conversation that ends with `last`, back to where the returned completion begins."""
    chain = [last]
    while (parent := by_id.get(str(chain[-1].metadata.get("parent")))) is not None and len(parent.prompt_token_ids) >= first:
        chain.append(parent)
    return chain


def _mask_of(turn: TrainingTurn, returned: Returned) -> NDArray[np.uint8] | None:
    """The part of the returned mask that is this turn's, if the engine's logprobs are there; None where they are not."""
    start = len(turn.prompt_token_ids) - len(returned.prompt_ids)
    part = slice(start, start + len(turn.completion_token_ids))
    mask = returned.mask[part] & turn.completion_mask
    if not np.array_equal(mask, returned.mask[part]):
        return None
    told, given = returned.logprobs[part][mask == 1], turn.per_token_logps[mask == 1]
    return mask if np.allclose(told, given, rtol=0.0, atol=LOGPROB_TOLERANCE) else None  # NaN is not close to anything


def unproven(trace: TrainingTrace) -> TrainingTrace:
    """The captured trace with nothing trained."""
    return TrainingTrace(turns=[_masked(turn, None, Reason.UNPROVEN) for turn in trace.turns])


def _masked(turn: TrainingTurn, mask: NDArray[np.uint8] | None, reason: Reason) -> TrainingTurn:
    """The turn with this completion mask (None: nothing is trained), and the hash that goes with it."""
    completion = np.zeros(len(turn.completion_token_ids), dtype=np.uint8) if mask is None else mask
    if np.array_equal(completion, turn.completion_mask):
        return turn
    metadata = {**turn.metadata, "sample_hash": hash_sample(turn.completion_token_ids, turn.per_token_logps, completion)}
    if not completion.any():
        metadata["mask_reason"] = turn.metadata.get("mask_reason") or reason.value
    whole = np.concatenate([np.zeros(len(turn.prompt_token_ids), dtype=np.uint8), completion])
    return turn.model_copy(update={"loss_mask": whole, "metadata": metadata})


def trusted(returned: list[Returned], version: str | None, temperature: float) -> TrainingTrace:
    """A trace of what the user vouches for; with nothing trained where `version` is unknown. Raises BadRollout for a missing logprob."""
    return TrainingTrace(turns=[_trusted(index, sample, version, temperature) for index, sample in enumerate(returned)])


def _trusted(index: int, sample: Returned, version: str | None, temperature: float) -> TrainingTurn:
    told = sample.logprobs[sample.mask == 1]
    if not np.isfinite(told).all() or (told > 0).any():
        raise BadRollout("logprobs: every sampled token needs a finite one, not above 0")
    logps = np.where(sample.mask == 1, sample.logprobs, np.float32(0.0)).astype(np.float32)
    mask = sample.mask if version is not None else np.zeros_like(sample.mask)
    ids = sample.completion_ids
    return TrainingTurn(
        node_id=f"rollout_func-{index}",
        prompt_token_ids=sample.prompt_ids,
        completion_token_ids=ids,
        per_token_logps=logps,
        loss_mask=np.concatenate([np.zeros(len(sample.prompt_ids), dtype=np.uint8), mask]),
        request={},
        response={},
        metadata={
            "parent": None,
            "branch": index,
            "role": "agent",
            "origin": "sampled",
            "mask_reason": None if version is not None else Reason.UNPROVEN.value,
            "sampling": {"temperature": temperature},
            "weight_versions": [] if version is None else [[version, 0, len(ids)]],
            "capture": "trusted",
            "prompt_hash": hash_ids(sample.prompt_ids),
            "completion_hash": hash_ids(ids),
            "sample_hash": hash_sample(ids, logps, mask),
        },
    )


class RolloutFacade:
    """What a rollout function gets as `trainer`: the trainer's own attributes, and `generate` through this rollout's capture session."""

    def __init__(self, trainer: Any, loop: asyncio.AbstractEventLoop, generate: Callable[[Any, Any], Any]) -> None:
        self._trainer = trainer
        self._loop = loop
        self._generate = generate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def generate(self, prompts: list[Any], tools: list[Any] | None = None) -> list[dict[str, Any]]:
        """One answer for each prompt (a list of messages; a text is one user message), asked one after the other.

        Each is `{"prompt_ids", "completion_ids", "logprobs", "text", "message", "finish_reason"}`. For a conversation, append `message` and
        what the environment says to the messages and ask again: sampled ids are kept. Raises BudgetSpent where the rollout may say no more.
        """
        return [asyncio.run_coroutine_threadsafe(self._generate(prompt, tools), self._loop).result() for prompt in prompts]


class BudgetSpent(RuntimeError):
    """The rollout's budget (tokens, calls, time) leaves nothing to sample."""
