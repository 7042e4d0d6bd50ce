"""Training rows: what a rollout's trace becomes, and the checks that keep token truth (invariant 1) up to the loss.

A row is one chain of turns in which each turn's prompt begins with everything before it, token by token. By construction a sampled token
is *owned* by exactly one row (by the span of its turn); wherever else it appears it is context. Each span carries the hashes that the
proxy took when the engine answered; `verify_row` recomputes them from the row, `verify_packed` from what the loss will really consume.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from capture_proxy.trace import hash_ids, hash_sample
from harness_rl.errors import InvariantError


class RowState(StrEnum):
    """Where a row ended in its step; every row ends in exactly one."""

    TRAINED = "trained"
    STALE = "stale"
    """Every token that could be trained was older than `max_staleness`."""
    OVERSIZE = "oversize"
    """Longer than a micro-batch; dropped whole, never cut."""
    ZERO_ADVANTAGE = "zero_advantage"
    """Its gradient is zero, so it was not forwarded."""
    REJECTED = "rejected"
    """It broke invariant 1, or its step was skipped; the reason goes with it."""


class RowMismatch(InvariantError):
    """A row is not what the engine was given and sampled."""

    def __init__(self, row: str, turn: str, check: str) -> None:
        super().__init__(f"row {row}, turn {turn}: {check}")
        self.row, self.turn, self.check = row, turn, check


Version = tuple[str, int, int]
"""(policy version, start, end): half-open, in row positions."""


@dataclass(frozen=True)
class TurnSpan:
    """One turn whose sampled tokens this row owns."""

    node_id: str
    start: int
    """First sampled token; the turn's prompt is `ids[:start]`."""
    end: int
    prompt_hash: str
    completion_hash: str
    sample_hash: str
    versions: list[Version]


@dataclass(eq=False)
class Row:
    row_id: str
    rollout_id: str
    group_id: str
    ids: NDArray[np.int32]
    """[L]"""
    logprobs: NDArray[np.float32]
    """[L] the engine's logprob of each sampled token; NaN where the token is context."""
    mask: NDArray[np.uint8]
    """[L] the captured loss mask: 1 = this token may be trained."""
    stale: NDArray[np.uint8]
    """[L] 1 = masked because its policy version is too old; it stays context."""
    advantage: float
    temperature: float
    """Of the sampling; one per row."""
    spans: list[TurnSpan] = field(default_factory=list)
    forked: bool = False
    """Its first turn continues an earlier one whose tokens it does not begin with: the conversation was rendered anew."""
    left_out: bool = False
    """Its rollout was down-sampled: it has left its group's baseline, has advantage 0 and counts in no normalisation."""
    token_advantages: NDArray[np.float32] | None = None
    """[L] where credit differs within the row; read at trained tokens, in place of `advantage`."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained(self) -> NDArray[np.bool_]:
        """[L] the tokens that enter the loss: captured mask and not stale."""
        return (self.mask == 1) & (self.stale == 0)

    @property
    def credit(self) -> NDArray[np.float32]:
        """[L] the advantage of each token."""
        if self.token_advantages is not None:
            return self.token_advantages
        return np.full(len(self), self.advantage, dtype=np.float32)

    @property
    def without_credit(self) -> bool:
        """Every advantage that would be trained is 0."""
        return not self.credit[self.trained].any()


class TurnLike(Protocol):
    """What is used of a `capture_proxy.trace` turn."""

    node_id: str
    prompt_token_ids: Any
    completion_token_ids: Any
    per_token_logps: Any
    loss_mask: Any
    metadata: Any


class TraceLike(Protocol):
    @property
    def turns(self) -> Sequence[Any]: ...


@dataclass(eq=False)
class _Chain:
    """A row while it grows: the newest turn's whole ids, and the turns it owns so far."""

    tail: NDArray[np.int32]
    forked: bool = False
    owned: list[tuple[TurnLike, int]] = field(default_factory=list)
    temperature: float | None = None


def build_rows(
    trace: TraceLike,
    rollout_id: str,
    group_id: str,
    *,
    origins: frozenset[str] = frozenset({"sampled"}),
    counts: Counter[str] | None = None,
) -> list[Row]:
    """The rows of one rollout, advantage 0, nothing stale.

    A turn continues its `metadata.parent`'s row when the parent's prompt and completion are a prefix of its prompt, the parent is still
    the end of that row and the temperature is the same; else it opens a row whose whole prompt is context. Turns of another origin, or
    with an all-zero mask, are context only. Rows without a trainable token are dropped; `counts` (when given) gets `rows`,
    `rows_without_trained_tokens`, `forks` (turns whose parent could not be continued) and `tokens`.

    Raises ValueError without `rollout_id`, RowMismatch when a trainable turn lacks its hashes, versions or sampling temperature.
    """
    if not rollout_id:
        raise ValueError("build_rows: rollout_id is empty; every row must name its rollout")
    counts = Counter() if counts is None else counts
    chains: list[_Chain] = []
    open_ends: dict[str, _Chain] = {}
    for turn in trace.turns:
        prompt = np.asarray(turn.prompt_token_ids, dtype=np.int32)
        trains = bool(np.any(turn.loss_mask)) and turn.metadata.get("origin", "sampled") in origins
        temperature = _temperature(rollout_id, turn) if trains else None
        parent = turn.metadata.get("parent")
        chain = open_ends.get(parent) if parent is not None else None
        if chain is not None and _continues(chain, prompt, temperature):
            del open_ends[parent]
        else:
            counts["forks"] += parent is not None
            chain = _Chain(tail=prompt, forked=parent is not None)
            chains.append(chain)
        chain.tail = np.concatenate([prompt, np.asarray(turn.completion_token_ids, dtype=np.int32)])
        if trains:
            chain.owned.append((turn, len(prompt)))
            chain.temperature = temperature
        open_ends[turn.node_id] = chain
    rows = [_finish(chain, rollout_id, group_id) for chain in chains if chain.owned]
    counts["rows"] += len(rows)
    counts["rows_without_trained_tokens"] += len(chains) - len(rows)
    counts["tokens"] += sum(len(row) for row in rows)
    return rows


def _continues(chain: _Chain, prompt: NDArray[np.int32], temperature: float | None) -> bool:
    same_policy = temperature is None or chain.temperature is None or temperature == chain.temperature
    return same_policy and len(prompt) >= len(chain.tail) and bool(np.array_equal(prompt[: len(chain.tail)], chain.tail))


def _temperature(rollout_id: str, turn: TurnLike) -> float:
    value = (turn.metadata.get("sampling") or {}).get("temperature")
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise RowMismatch(rollout_id, turn.node_id, f"metadata.sampling.temperature is {value!r}; a trained turn needs one above 0")
    return float(value)


def _finish(chain: _Chain, rollout_id: str, group_id: str) -> Row:
    last, last_start = chain.owned[-1]
    length = last_start + len(last.completion_token_ids)  # context after the last owned turn predicts nothing
    logprobs = np.full(length, np.nan, dtype=np.float32)
    mask = np.zeros(length, dtype=np.uint8)
    spans = []
    for turn, start in chain.owned:
        end = start + len(turn.completion_token_ids)
        logprobs[start:end] = np.asarray(turn.per_token_logps, dtype=np.float32)
        mask[start:end] = np.asarray(turn.loss_mask[start:], dtype=np.uint8)
        spans.append(_span(rollout_id, turn, start, end))
    assert chain.temperature is not None
    return Row(
        row_id=f"{rollout_id}/{spans[0].node_id}",
        rollout_id=rollout_id,
        group_id=group_id,
        ids=chain.tail[:length].copy(),
        logprobs=logprobs,
        mask=mask,
        stale=np.zeros(length, dtype=np.uint8),
        advantage=0.0,
        temperature=chain.temperature,
        spans=spans,
        forked=chain.forked,
    )


def _span(rollout_id: str, turn: TurnLike, start: int, end: int) -> TurnSpan:
    missing = [key for key in ("prompt_hash", "completion_hash", "sample_hash", "weight_versions") if not turn.metadata.get(key)]
    if missing:
        raise RowMismatch(rollout_id, turn.node_id, f"metadata lacks {', '.join(missing)}; it cannot be proven and is not trained")
    versions = [(str(version), start + int(a), start + int(b)) for version, a, b in turn.metadata["weight_versions"]]
    meta = turn.metadata
    return TurnSpan(turn.node_id, start, end, meta["prompt_hash"], meta["completion_hash"], meta["sample_hash"], versions)


def parse_version(version: str) -> tuple[str, int]:
    """(`lineage`, `step`) of a policy version `"<lineage>-<step>"`."""
    lineage, dash, step = version.rpartition("-")
    if not dash or not lineage or not step.isdigit():
        raise ValueError(f"policy version {version!r} is not <lineage>-<step>")
    return lineage, int(step)


def mark_stale(row: Row, current_step: int, max_staleness: int, lineage_steps: Mapping[str, int]) -> int:
    """Set `row.stale` by each token's version; returns how many trainable tokens are now stale.

    `lineage_steps` gives, for every lineage of the surviving line, its last step on that line: `current_step` for the running lineage, the
    checkpoint's step for one that was resumed from. A token is stale when it is older than `max_staleness` steps, or when its version is
    not on that line (an unknown lineage, or a step that a crash took back): then no age can be given to it.
    """
    row.stale[:] = 0
    for span in row.spans:
        for version, start, end in span.versions:
            lineage, step = parse_version(version)
            if step > lineage_steps.get(lineage, -1) or current_step - step > max_staleness:
                row.stale[start:end] = 1
    return int(np.count_nonzero((row.mask == 1) & (row.stale == 1)))


def verify_row(row: Row) -> None:
    """Recompute the hashes of every span from the row as it stands. Raises RowMismatch."""
    length = len(row.ids)
    for name, array, dtype in (
        ("ids", row.ids, np.int32),
        ("logprobs", row.logprobs, np.float32),
        ("mask", row.mask, np.uint8),
        ("stale", row.stale, np.uint8),
    ):
        if array.dtype != dtype or array.shape != (length,):
            raise RowMismatch(row.row_id, "-", f"{name} is {array.dtype}{list(array.shape)}, expected {np.dtype(dtype)}[{length}]")
    credit = row.credit
    if credit.dtype != np.float32 or credit.shape != (length,):
        raise RowMismatch(row.row_id, "-", f"token_advantages is {credit.dtype}{list(credit.shape)}, expected float32[{length}]")
    if not row.temperature > 0 or not np.all(np.isfinite(credit[row.trained])) or not np.isfinite(row.advantage):
        raise RowMismatch(row.row_id, "-", f"temperature {row.temperature} or advantage {row.advantage} is not usable")
    covered = np.zeros(length, dtype=bool)
    before = 0
    for span in row.spans:
        if not before <= span.start < span.end <= length or span.start == 0:
            raise RowMismatch(row.row_id, span.node_id, f"span [{span.start}, {span.end}) does not fit after {before} in {length} tokens")
        _check_versions(row.row_id, span)
        _check_hashes(row.row_id, span, row.ids, row.logprobs, row.mask)
        covered[span.start : span.end] = True
        before = span.end
    if np.any((row.mask == 1) & ~covered) or np.any(row.mask > 1):
        raise RowMismatch(row.row_id, "-", "the mask trains a token that no turn of the row sampled")
    if not np.all(row.logprobs[row.mask == 1] <= 0):  # NaN fails too
        raise RowMismatch(row.row_id, "-", "a trained token has a logprob that is not a finite number <= 0")
    if not np.all(np.isfinite(row.logprobs[row.mask == 1])):
        raise RowMismatch(row.row_id, "-", "a trained token has an infinite logprob")


def _check_versions(row_id: str, span: TurnSpan) -> None:
    at = span.start
    for _, start, end in span.versions:
        if start != at or end <= start:
            raise RowMismatch(row_id, span.node_id, f"weight versions leave a gap or overlap at position {at}")
        at = end
    if at != span.end:
        raise RowMismatch(row_id, span.node_id, f"weight versions end at {at}, the turn at {span.end}")


def _check_hashes(row_id: str, span: TurnSpan, ids: NDArray[np.int32], logprobs: NDArray[np.float32], mask: NDArray[np.uint8]) -> None:
    sampled = slice(span.start, span.end)
    if hash_ids(ids[: span.start]) != span.prompt_hash:
        raise RowMismatch(row_id, span.node_id, f"the {span.start} tokens before it are not the prompt the engine was given")
    if hash_ids(ids[sampled]) != span.completion_hash:
        raise RowMismatch(row_id, span.node_id, "its tokens are not those the engine sampled")
    if hash_sample(ids[sampled], logprobs[sampled], mask[sampled]) != span.sample_hash:
        raise RowMismatch(row_id, span.node_id, "logprobs or mask are not those captured for its tokens")


@dataclass(frozen=True, eq=False)
class PackedRow:
    """What the loss will consume for one row, read back from the packed tensors by position (see `packing.Pack.view`)."""

    ids: NDArray[np.int64]
    """[L] the packed ids at the row's place."""
    positions: NDArray[np.int64]
    """[L]"""
    predicts: NDArray[np.int64]
    """[n] index in the row of the hidden state that each loss term reads: it predicts the token after it."""
    targets: NDArray[np.int64]
    """[n]"""
    behaviour: NDArray[np.float32]
    """[n] the engine's logprobs that the loss uses."""
    advantages: NDArray[np.float32]
    temperatures: NDArray[np.float32]


def verify_packed(row: Row, packed: PackedRow) -> None:
    """Check the packed form of `row` against the hashes taken at the engine: ids by position, and each loss term at the place of the token
    it predicts. Raises RowMismatch."""
    if len(packed.ids) != len(row) or not np.array_equal(packed.positions, np.arange(len(row))):
        raise RowMismatch(row.row_id, "-", "packed length or position ids are not the row's")
    predicted = packed.predicts + 1
    if np.any(predicted < 1) or np.any(predicted >= len(row)) or not np.array_equal(predicted, np.flatnonzero(row.trained)):
        raise RowMismatch(row.row_id, "-", "the packed loss terms are not at the row's trained tokens")
    if not np.array_equal(packed.advantages, row.credit[row.trained]) or not np.all(packed.temperatures == np.float32(row.temperature)):
        raise RowMismatch(row.row_id, "-", "packed advantage or temperature is not the row's")
    ids = packed.ids.astype(np.int32)
    seen = ids.copy()
    seen[predicted] = packed.targets
    logprobs = row.logprobs.copy()
    logprobs[predicted] = packed.behaviour
    for span in row.spans:
        _check_hashes(row.row_id, span, ids, row.logprobs, row.mask)
        _check_hashes(row.row_id, span, seen, logprobs, row.mask)


_ARRAYS: tuple[tuple[str, type[np.generic]], ...] = (("ids", np.int32), ("logprobs", np.float32), ("mask", np.uint8), ("stale", np.uint8))
_CREDIT = "token_advantages"
"""End to end over the rows that have them."""


def rows_to_wire(rows: Iterable[Row]) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """(one header dict per row, the rows' arrays end to end) for `link`."""
    rows = list(rows)
    metas = [
        {
            "row_id": row.row_id,
            "rollout_id": row.rollout_id,
            "group_id": row.group_id,
            "length": len(row),
            "advantage": float(row.advantage),
            "token_advantages": row.token_advantages is not None,
            "forked": row.forked,
            "left_out": row.left_out,
            "temperature": float(row.temperature),
            "spans": [_span_to_wire(span) for span in row.spans],
        }
        for row in rows
    ]
    arrays = {
        name: np.concatenate([np.zeros(0, dtype), *(np.asarray(getattr(row, name), dtype) for row in rows)]) for name, dtype in _ARRAYS
    }
    given = [np.asarray(row.token_advantages, np.float32) for row in rows if row.token_advantages is not None]
    return metas, arrays | ({_CREDIT: np.concatenate(given)} if given else {})


def _span_to_wire(span: TurnSpan) -> list[Any]:
    versions = [list(version) for version in span.versions]
    return [span.node_id, span.start, span.end, span.prompt_hash, span.completion_hash, span.sample_hash, versions]


def rows_from_wire(metas: Sequence[Mapping[str, Any]], arrays: Mapping[str, NDArray[Any]]) -> list[Row]:
    """The inverse of `rows_to_wire`. Raises ValueError when lengths do not add up."""
    total = sum(int(meta["length"]) for meta in metas)
    for name, dtype in _ARRAYS:
        if name not in arrays or arrays[name].shape != (total,) or arrays[name].dtype != dtype:
            raise ValueError(f"rows: array {name!r} is not {np.dtype(dtype)}[{total}] as the row lengths say")
    credit = arrays.get(_CREDIT, np.zeros(0, np.float32))
    if credit.dtype != np.float32 or credit.shape != (sum(int(meta["length"]) for meta in metas if meta.get(_CREDIT)),):
        raise ValueError(f"rows: array {_CREDIT!r} is {credit.dtype}{list(credit.shape)}, not what the rows say")
    rows, at, credit_at = [], 0, 0
    for meta in metas:
        part = slice(at, at + int(meta["length"]))
        at = part.stop
        own = None
        if meta.get(_CREDIT):
            own = credit[credit_at : credit_at + int(meta["length"])].copy()
            credit_at += int(meta["length"])
        spans = [
            TurnSpan(node, int(a), int(b), prompt, completion, sample, [(str(v), int(x), int(y)) for v, x, y in versions])
            for node, a, b, prompt, completion, sample, versions in meta["spans"]
        ]
        rows.append(
            Row(
                row_id=str(meta["row_id"]),
                rollout_id=str(meta["rollout_id"]),
                group_id=str(meta["group_id"]),
                advantage=float(meta["advantage"]),
                temperature=float(meta["temperature"]),
                spans=spans,
                forked=bool(meta.get("forked")),
                left_out=bool(meta.get("left_out")),
                token_advantages=own,
                **{name: arrays[name][part].copy() for name, _ in _ARRAYS},
            )
        )
    return rows
