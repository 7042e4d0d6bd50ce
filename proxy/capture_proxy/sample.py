"""The engine's answers as checked arrays.

Invariant: a `Sample` without a `problem` holds one finite logprob <= 0 for each id, reported for that very id; anything else keeps the ids
(when they are ids) as context, has no logprobs at all, and says what was wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from capture_proxy.codec import Logps
from capture_proxy.gate import Adapter
from capture_proxy.ids import MAX_ID, Ids

LOGPROB_FLOOR = -9999.0
"""What vLLM writes in place of NaN and minus infinity; never the logprob of a token that was sampled."""
_TOKEN_PREFIX = "token_id:"


class BadSample(Exception):
    """The answer lacks the very fields that make it an answer."""


class UnnamedIds(Exception):
    """Logprobs come with texts in place of ids."""


@dataclass(frozen=True)
class Parsed:
    """Sampled ids as the engine's own parsers read them."""

    content: str | None
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]
    """(name, argument string) of each tool call."""


@dataclass(frozen=True)
class Sample:
    """One sampled completion."""

    ids: Ids
    """int32 [C]; empty when the engine reported no usable ids."""
    logps: Logps
    """float32 [C], or empty when there is a problem."""
    finish_reason: str
    stop_reason: int | str | None
    versions: tuple[tuple[str, int, int], ...] | None
    """(weight version, start, end) spans that cover the ids, or None when the engine did not say or they do not."""
    problem: str | None
    cached_tokens: int = 0
    parts: tuple[tuple[int, int | None], ...] = ()
    """(first id, seed) of each further request that it took, because the engine ended the one before (`resumption`)."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that sampled it, in order; none: the engine's own model did."""
    read: Parsed | None = None
    """What the server's own parsers make of it, where they were asked in the same request (`onecall`)."""

    @property
    def ended_by_token(self) -> bool:
        """The last id is an end-of-turn id that the model sampled."""
        return self.finish_reason == "stop" and len(self.ids) > 0 and not isinstance(self.stop_reason, str)


def generate_sample(answer: dict[str, Any], prompt_len: int, read: bool = False) -> Sample:
    """A `/inference/v1/generate` answer; `read`: in the one-call form. Raises `BadSample`, and `UnnamedIds` where ids cannot be told."""
    choice = _choice(answer)
    entries = (choice.get("logprobs") or {}).get("content")
    if read:
        tokens = _column(entries, "token")
        named = [_named_id(token) for token in tokens]
        if any(isinstance(token, str) and i is None for token, i in zip(tokens, named, strict=True)):
            raise UnnamedIds("its logprobs name texts and not ids: start vLLM with --return-tokens-as-token-ids")
        sample = _with_message(_sample(choice, answer, entries, named), choice.get("message"))
    else:
        sample = _sample(choice, answer, entries, _column(entries, "token_id"))
    counted = _get(answer.get("usage"), "prompt_tokens")
    if counted is not None and counted != prompt_len and sample.problem is None:
        return _with_problem(sample, f"the engine counted {counted} prompt tokens, {prompt_len} were sent")
    return sample


def _with_message(sample: Sample, message: Any) -> Sample:
    """With the server's message; a chat's word for an answer with calls is not why sampling ended."""
    finish = "stop" if sample.finish_reason == "tool_calls" else sample.finish_reason
    return replace(sample, finish_reason=finish, read=parsed_message(message) if isinstance(message, dict) else None)


def parsed_message(message: dict[str, Any]) -> Parsed:
    """An assistant message of the chat route's kind."""
    calls = tuple((str(call["function"]["name"]), str(call["function"]["arguments"])) for call in message.get("tool_calls") or ())
    return Parsed(message.get("content"), message.get("reasoning") or message.get("reasoning_content"), calls)


def chat_sample(answer: dict[str, Any]) -> tuple[Ids, Sample]:
    """Prompt ids and sample of a chat answer with `return_token_ids` and `return_tokens_as_token_ids`."""
    choice = _choice(answer)
    entries = (choice.get("logprobs") or {}).get("content")
    named = [_named_id(token) for token in _column(entries, "token")]
    prompt = _ids(answer.get("prompt_token_ids"))
    sample = _sample(choice, answer, entries, named)
    if prompt is None and sample.problem is None:
        sample = _with_problem(sample, "the server does not report prompt token ids (it needs return_token_ids, vLLM 0.11 or newer)")
    return np.empty(0, np.int32) if prompt is None else prompt, sample


def sampled_by(sample: Sample, adapter: Adapter | None) -> Sample:
    """The sample with the version of the adapter that it was asked of, in place of the version of the engine's own model.

    None of it is known where that model's weights changed on the way: the adapter is a difference to them.
    """
    if adapter is None:
        return sample
    steady = sample.versions is None or len(sample.versions) <= 1
    return replace(sample, versions=((adapter.version, 0, len(sample.ids)),) if steady else None, adapters=(adapter.name,))


def rendered_ids(answer: dict[str, Any]) -> Ids:
    """The ids of a render answer. Raises `BadSample` when it holds none."""
    ids = _ids(answer.get("token_ids"))
    if ids is None or not len(ids):
        raise BadSample("its render holds no token ids")
    return ids


def tokenized_ids(answer: dict[str, Any]) -> Ids:
    """The ids of a `/tokenize` answer. Raises `BadSample` when it holds none."""
    ids = _ids(answer.get("tokens"))
    if ids is None:
        raise BadSample("its tokenize answer holds no token ids")
    return ids


def prompt_scores(answer: dict[str, Any], ids: Ids, start: int) -> Logps:
    """Logprobs of `ids[start:]` from an answer's `prompt_logprobs`. Raises `BadSample` when one is missing or not a logprob."""
    entries = answer.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(ids):
        raise BadSample("prompt_logprobs are missing or do not cover the prompt")
    values = [_get(_get(entries[i], str(ids[i])), "logprob") for i in range(start, len(ids))]
    if problem := _logprob_problem(values):
        raise BadSample(f"prompt_logprobs: {problem}")
    return np.array(values, dtype=np.float32)


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadSample("its answer does not hold exactly one choice")
    return choices[0]


def _sample(choice: dict[str, Any], answer: dict[str, Any], entries: Any, named: list[Any]) -> Sample:
    ids = _ids(choice.get("token_ids"))
    values = _column(entries, "logprob")
    problem: str | None = None
    if ids is None:
        problem = "the engine reported no usable token ids"
    elif not isinstance(entries, list):
        problem = "the engine reported no logprobs"
    elif len(entries) != len(ids):
        problem = f"{len(entries)} logprobs for {len(ids)} ids"
    elif named != ids.tolist():
        problem = "logprobs are reported for other ids than the sampled ones"
    else:
        problem = _logprob_problem(values)
    if ids is None:
        ids = np.empty(0, np.int32)
    logps = np.array(values if problem is None else [], dtype=np.float32)
    details = _get(answer.get("usage"), "prompt_tokens_details")
    return Sample(
        ids=ids,
        logps=logps,
        finish_reason=str(choice.get("finish_reason") or "stop"),
        stop_reason=choice.get("stop_reason"),
        versions=_versions(choice.get("weight_versions"), len(ids)),
        problem=problem,
        cached_tokens=_get(details, "cached_tokens") or 0,
    )


def _with_problem(sample: Sample, problem: str) -> Sample:
    return replace(sample, logps=np.empty(0, np.float32), problem=problem)


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _column(entries: Any, key: str) -> list[Any]:
    """The value of `key` in each entry, None where it is missing; empty where there are no entries."""
    if not isinstance(entries, list):
        return []
    try:
        return [entry[key] for entry in entries]
    except (KeyError, TypeError, IndexError):
        return [_get(entry, key) for entry in entries]


def _ids(value: Any) -> Ids | None:
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        return None
    if value and not 0 <= min(value) <= max(value) <= MAX_ID:
        return None
    return np.array(value, dtype=np.int32)


def _named_id(token: Any) -> int | None:
    if isinstance(token, str) and token.startswith(_TOKEN_PREFIX) and token[len(_TOKEN_PREFIX) :].isdigit():
        return int(token[len(_TOKEN_PREFIX) :])
    return None


def _logprob_problem(values: list[Any]) -> str | None:
    for i, value in enumerate(values):
        if type(value) not in (float, int):
            return f"logprob {i} is {value!r}, not a number"
        if not LOGPROB_FLOOR < value <= 0:  # neither NaN nor infinity is
            return f"logprob {i} is {value!r}, which no sampled token has"
    return None


def _versions(value: Any, length: int) -> tuple[tuple[str, int, int], ...] | None:
    if not isinstance(value, list):
        return None
    spans: list[tuple[str, int, int]] = []
    at = 0
    for item in value:
        version, start, end = _get(item, "version"), _get(item, "start"), _get(item, "end")
        if version is None or start != at or type(end) is not int or end < at:
            return None
        at = end
        spans.append((str(version), start, end))
    return tuple(spans) if at == length else None
