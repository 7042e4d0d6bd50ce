"""TrainingTrace: what one rollout's calls gave the learner, checked to the last value.

Invariant: an object of these classes obeys every rule of the schema (OpenEnv's schema 1): ids are plain non-negative ints, there is one
finite logprob <= 0 for each completion token, the mask covers prompt + completion with exact 0/1 and is 0 on the prompt. Nothing is coerced
or padded; an error names the turn and the field. Arrays are numpy (int32 ids, float32 logprobs, uint8 mask) and read-only.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationInfo, field_validator, model_validator

from capture_proxy import codec
from capture_proxy.codec import Logps, Mask
from capture_proxy.ids import MAX_ID, Ids, PrefixHash

MEDIA_TYPE = "application/x-harness-trace"
"""`Accept` value that asks the proxy for the binary form."""


def hash_ids(ids: npt.ArrayLike) -> str:
    """blake2b-16 (hex) of the ids as little-endian int32."""
    return PrefixHash(ids).whole().hex()


def hash_sample(completion_ids: npt.ArrayLike, logps: npt.ArrayLike, completion_mask: npt.ArrayLike) -> str:
    """blake2b-16 (hex) of ids (int32), logprobs (float32) and mask (uint8), so that a shift of any one of them shows."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.ascontiguousarray(completion_ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(logps, dtype="<f4").tobytes())
    digest.update(np.ascontiguousarray(completion_mask, dtype="u1").tobytes())
    return digest.hexdigest()


def _where(info: ValidationInfo) -> str:
    return f"turn {info.data.get('node_id', '?')!r}, {info.field_name}"


def _plain_ints(value: Any, info: ValidationInfo) -> npt.NDArray[Any]:
    """A 1-d integer array from a list of plain ints or an integer array; bool and float are refused."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise ValueError(f"{_where(info)}: needs a 1-d integer array, got {value.ndim}-d {value.dtype}")
        return value
    if not isinstance(value, list | tuple):
        raise ValueError(f"{_where(info)}: needs a list of ints, got {type(value).__name__}")
    if set(map(type, value)) - {int}:
        bad = next(i for i, item in enumerate(value) if type(item) is not int)
        raise ValueError(f"{_where(info)}[{bad}]: {value[bad]!r} is a {type(value[bad]).__name__}, not a plain int")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError as error:
        raise ValueError(f"{_where(info)}: a value does not fit 64 bits") from error


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def _check_ids(value: Any, info: ValidationInfo) -> Ids:
    array = _plain_ints(value, info)
    if len(array) and (array.min() < 0 or array.max() > MAX_ID):
        bad = int(np.flatnonzero((array < 0) | (array > MAX_ID))[0])
        raise ValueError(f"{_where(info)}[{bad}]: {int(array[bad])} is not a token id (0 to {MAX_ID})")
    return _frozen(array.astype(np.int32, copy=False))


def _check_mask(value: Any, info: ValidationInfo) -> Mask:
    array = _plain_ints(value, info)
    wrong = (array != 0) & (array != 1)
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"{_where(info)}[{bad}]: {int(array[bad])} is neither 0 nor 1")
    return _frozen(array.astype(np.uint8, copy=False))


def _check_logps(value: Any, info: ValidationInfo) -> Logps:
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind != "f":
            raise ValueError(f"{_where(info)}: needs a 1-d float array, got {value.ndim}-d {value.dtype}")
        array: npt.NDArray[Any] = value
    elif isinstance(value, list | tuple):
        if set(map(type, value)) - {float, int}:
            bad = next(i for i, item in enumerate(value) if type(item) not in (float, int))
            raise ValueError(f"{_where(info)}[{bad}]: {value[bad]!r} is a {type(value[bad]).__name__}, not a number")
        try:
            array = np.array(value, dtype=np.float64)
        except OverflowError as error:
            raise ValueError(f"{_where(info)}: a value is not finite as a float") from error
    else:
        raise ValueError(f"{_where(info)}: needs a list of numbers, got {type(value).__name__}")
    with np.errstate(over="ignore"):
        single = array.astype(np.float32, copy=False)
    wrong = ~np.isfinite(single) | (array > 0)
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"{_where(info)}[{bad}]: {array[bad]} is not a finite number <= 0")
    return _frozen(single)


def _as_list(array: npt.NDArray[Any]) -> list[Any]:
    return array.tolist()


class TrainingTurn(BaseModel):
    """One call: the ids the engine was given and the ids it sampled.

    Construction takes lists of plain Python numbers (as JSON gives them) or numpy arrays.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    node_id: Annotated[str, Field(min_length=1, strict=True)]
    """Unique within the trace."""
    prompt_token_ids: Annotated[Ids, PlainValidator(_check_ids), PlainSerializer(_as_list)]
    """int32 [P], P >= 1: exactly what the engine was given."""
    completion_token_ids: Annotated[Ids, PlainValidator(_check_ids), PlainSerializer(_as_list)]
    """int32 [C]: exactly what it sampled, its end-of-turn id included; empty when the call gave nothing usable."""
    per_token_logps: Annotated[Logps, PlainValidator(_check_logps), PlainSerializer(_as_list)]
    """float32 [C]: the engine's logprob of each sampled id, in the distribution it was sampled from."""
    loss_mask: Annotated[Mask, PlainValidator(_check_mask), PlainSerializer(_as_list)]
    """uint8 [P + C]: 1 where the token is trained; 0 on all of the prompt."""
    request: dict[str, Any]
    """What the agent sent."""
    response: dict[str, Any]
    """What the agent got."""
    metadata: dict[str, Any]
    """Ours: parent, branch, role, origin, mask_reason, weight_versions, sampling, seed, hashes and more (see proxy/README.md)."""

    @model_validator(mode="after")
    def _lengths(self) -> TrainingTurn:
        prompt, completion = len(self.prompt_token_ids), len(self.completion_token_ids)
        turn = f"turn {self.node_id!r}"
        if not prompt:
            raise ValueError(f"{turn}, prompt_token_ids: is empty")
        if len(self.per_token_logps) != completion:
            raise ValueError(f"{turn}, per_token_logps: {len(self.per_token_logps)} values for {completion} completion tokens")
        if len(self.loss_mask) != prompt + completion:
            raise ValueError(f"{turn}, loss_mask: {len(self.loss_mask)} values for {prompt} + {completion} tokens")
        if self.loss_mask[:prompt].any():
            bad = int(np.flatnonzero(self.loss_mask[:prompt])[0])
            raise ValueError(f"{turn}, loss_mask[{bad}]: is 1 on a prompt token")
        return self

    @property
    def completion_mask(self) -> Mask:
        """uint8 [C]: the mask's completion part."""
        return self.loss_mask[len(self.prompt_token_ids) :]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainingTurn):
            return NotImplemented
        arrays = ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask")
        plain = ("node_id", "request", "response", "metadata")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in arrays) and all(
            getattr(self, name) == getattr(other, name) for name in plain
        )

    __hash__ = None  # type: ignore[assignment]


class TrainingTrace(BaseModel):
    """The turns of one rollout, in the order in which their requests arrived."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    turns: list[TrainingTurn]

    @field_validator("schema_version", mode="before")
    @classmethod
    def _plain_version(cls, value: Any) -> Any:
        if type(value) is not int:
            raise ValueError(f"schema_version: {value!r} is not the plain int 1")
        return value

    @model_validator(mode="after")
    def _unique(self) -> TrainingTrace:
        seen: set[str] = set()
        for turn in self.turns:
            if turn.node_id in seen:
                raise ValueError(f"turn {turn.node_id!r}, node_id: is used twice")
            seen.add(turn.node_id)
        return self

    def to_json(self) -> str:
        """Strict JSON of the whole trace; each turn carries its full prompt, so the size is quadratic in a conversation's turns."""
        return json.dumps(self.model_dump(), allow_nan=False, ensure_ascii=True, separators=(",", ":"))

    def to_bytes(self) -> bytes:
        """The binary form: linear in the tokens, checksummed."""
        return codec.encode(
            [
                codec.PlainTurn(
                    header={"node_id": turn.node_id, "response": turn.response, "metadata": turn.metadata},
                    request=turn.request,
                    prompt=turn.prompt_token_ids,
                    completion=turn.completion_token_ids,
                    logps=turn.per_token_logps,
                    mask=turn.completion_mask,
                )
                for turn in self.turns
            ]
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> TrainingTrace:
        """Reads `to_json`'s form (or OpenEnv's). Raises `ValueError`."""
        return cls.model_validate(json.loads(text))

    @classmethod
    def from_bytes(cls, data: bytes) -> TrainingTrace:
        """Reads the binary form and applies every check to it. Raises `ValueError`."""
        turns = []
        for plain in codec.decode(data):
            mask = np.zeros(len(plain.prompt) + len(plain.completion), dtype=np.uint8)
            mask[len(plain.prompt) :] = plain.mask
            turns.append(
                TrainingTurn(
                    **plain.header,
                    request=plain.request,
                    prompt_token_ids=plain.prompt,
                    completion_token_ids=plain.completion,
                    per_token_logps=plain.logps,
                    loss_mask=mask,
                )
            )
        return cls(turns=turns)
