"""Client of one engine's HTTP surface: render, generate, derender, and the chat route where the token routes are missing.

Invariant: what comes back is either exactly what the engine reported, checked (one logprob per id, of that id, finite and <= 0, versions
that cover the answer), or is marked as a problem; nothing is padded or invented, and no other model answers for an adapter that was asked
for. How a request reaches the server, and how long it is tried, is `upstream`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from capture_proxy.codec import Ids, Logps
from capture_proxy.gate import Adapter, Gate
from capture_proxy.onecall import OneCall, Reading
from capture_proxy.resumption import ABORTED, Partial, cut_at_stop
from capture_proxy.sample import (
    BadSample,
    Parsed,
    Sample,
    UnnamedIds,
    chat_sample,
    generate_sample,
    parsed_message,
    prompt_scores,
    rendered_ids,
    sampled_by,
    tokenized_ids,
)
from capture_proxy.upstream import EngineError, EngineRefused, EngineUnavailable, EngineUnsynced, Retry, Upstream

T = TypeVar("T")

UNNAMED = "default"
"""What vLLM calls the weights that it started with."""


@dataclass(frozen=True)
class EngineInfo:
    """What the engine's server offers."""

    max_model_len: int | None
    token_routes: bool
    """render, generate and derender exist (`--enable-scale-out`)."""


@dataclass(frozen=True)
class Rendered:
    """A chat request as the engine tokenises it."""

    ids: Ids
    grammar: dict[str, Any] | None = None
    """Structured-output constraints that the request implies; tokens sampled under them are not trainable."""
    stop_token_ids: tuple[int, ...] = ()
    features: dict[str, Any] | None = None
    """Of the prompt's images (vLLM's MultiModalFeatures); their places count in `ids`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields that belong unchanged into a generate request with that grammar."""
    reading: Reading | None = None
    """With which the server reads the answer in the same request; None: it cannot."""


class Engine:
    """One engine. `model` is the served model name; nothing is sent while `gate` is held."""

    def __init__(self, url: str, model: str, retry: Retry, generate_timeout_s: float, gate: Gate | None = None) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self.aborts = 0
        """Calls that the server ended on the way; each went on, or began again."""
        self.closing_token: int | None = None
        """The id that ends an assistant turn in the model's template, once it is known (`splice.closing_token`)."""
        self.turn_ends: dict[int, bool] = {}
        """Last ids of answers that were looked at: whether each ends a turn or is text (`sampling.ends_turn`)."""
        self.one_call = OneCall(self.url)
        self.generation = 0
        """Grows when what was learnt of the server no longer counts."""
        self._gate = gate or Gate()
        self._server = Upstream(self.url, retry, self._gate)
        self._generate_timeout_s = generate_timeout_s
        self._info: EngineInfo | None = None

    @property
    def retries(self) -> int:
        """Requests that were sent again."""
        return self._server.retries

    async def info(self) -> EngineInfo:
        """What the server offers; asked once, and again after `forget`."""
        if self._info is None:
            models = await self._server.ask("GET", "/v1/models")
            lengths = [card.get("max_model_len") for card in models.get("data", []) if card.get("id") == self.model]
            if not lengths:
                names = ", ".join(str(card.get("id")) for card in models.get("data", []))
                raise EngineError(f"engine {self.url} does not serve a model named {self.model!r}; it serves: {names or 'nothing'}")
            try:
                await self.render({"messages": [{"role": "user", "content": "."}]})
                token_routes = True
            except EngineRefused as error:
                if error.status not in (403, 404, 405):
                    raise
                token_routes = False
            self._info = EngineInfo(lengths[0], token_routes)
        return self._info

    def forget(self) -> None:
        """The server may have been restarted with other flags."""
        self._info = None
        self.closing_token = None
        self.turn_ends.clear()
        self.one_call = OneCall(self.url)
        self.generation += 1

    async def render(self, chat: dict[str, Any], known: Ids | None = None) -> Rendered:
        """Token ids of a chat request, as the engine's own template gives them. `known` are ids that they probably start with."""
        answer = await self._server.ask("POST", "/v1/chat/completions/render", {"model": self.model, **chat}, ids="token_ids", known=known)
        params = answer.get("sampling_params") or {}
        extra = {key: answer[key] for key in ("reasoning_ended", "reasoning_parser_kwargs") if answer.get(key) is not None}
        ids = self._checked(rendered_ids, answer)
        stops = tuple(params.get("stop_token_ids") or ())
        return Rendered(ids, params.get("structured_outputs"), stops, answer.get("features"), extra, Reading.of(answer))

    async def generate(
        self, prompt: Ids, params: dict[str, Any], extra: dict[str, Any], salt: str | None = None, reading: Reading | None = None
    ) -> Sample:
        """Samples a completion of `prompt`; `salt` names the cached blocks that it may use. With `reading` the sample also has the server's
        own message, where it came whole from one request that the server could answer so.

        What the engine aborts goes on from what it has sampled (a call with a grammar begins again: the grammar would). Aborts that no
        update of the weights explains are borne within the retry bounds.
        """
        goes_on = not params.get("structured_outputs")
        call, unexplained = Partial(), 0
        while True:
            holds = self._gate.holds
            whole = np.concatenate([prompt, call.ids]) if len(call.ids) else prompt
            body = {"token_ids": whole, "sampling_params": {**call.params(params), "logprobs": 0}, **extra}
            if salt is not None:
                body["cache_salt"] = salt
            sample = await self._sample(body, None if call.parts else reading)
            sample = call.add(sample, goes_on)
            if sample.finish_reason != ABORTED or (sample := call.exhausted(params) or sample).finish_reason != ABORTED:
                seams = [start for start, _ in call.parts]
                sample = await cut_at_stop(sample, seams, params.get("stop") or (), self.detokenize)
                return replace(sample, parts=tuple(call.parts))
            self.aborts += 1
            unexplained = await self._after_abort(holds, unexplained)

    async def _sample(self, body: dict[str, Any], reading: Reading | None) -> Sample:
        """The answer to one generate request: in the one-call form where that is to be had, else in the plain one."""
        one_call, read = self.one_call, None
        if reading is not None and one_call.take():
            refused: EngineRefused | None = None
            try:
                read = await self._sampled(_asking_to_read(body, reading), True)
            except UnnamedIds as error:
                one_call.leave(str(error))
            except EngineRefused as error:
                if error.context_full or error.status not in (400, 422):
                    raise
                refused = error
            finally:
                one_call.give_back(works=read is not None)
            if read is not None:
                return read
            plain = await self._sampled(body, False)
            if refused is not None:  # and the plain form was not
                one_call.leave(str(refused))
            return plain
        return await self._sampled(body, False)

    async def _sampled(self, body: dict[str, Any], read: bool) -> Sample:
        answer, adapter = await self._ask_policy("/inference/v1/generate", body)
        return self._of_policy(self._checked(generate_sample, answer, len(body["token_ids"]), read), adapter)

    def _of_policy(self, sample: Sample, adapter: Adapter | None) -> Sample:
        """Raises `EngineUnsynced` for what an engine sampled by the weights that it started with, where control has given it others."""
        if adapter is None and self._gate.version not in (None, UNNAMED) and any(v == UNNAMED for v, _, _ in sample.versions or ()):
            raise EngineUnsynced(
                f"engine {self.url} was started again and has its first weights, the policy is {self._gate.version}; it is asked again "
                "once it has them"
            )
        return sampled_by(sample, adapter)

    async def _after_abort(self, holds: int, unexplained: int) -> int:
        """How many aborts of a call nothing explains, this one included. Raises `EngineUnavailable` when there are too many."""
        if self._gate.holds != holds:
            return unexplained
        unexplained += 1
        if unexplained >= self._server.retry.server_errors:
            raise EngineUnavailable(f"engine {self.url} aborted the same call {unexplained} times")
        await asyncio.sleep(self._server.backoff(unexplained - 1))
        return unexplained

    async def derender(self, sampled: Ids, prompt: Ids, chat: dict[str, Any], finish_reason: str) -> Parsed:
        """Text, reasoning and tool calls of sampled ids. `chat` carries tools, tool_choice and template arguments."""
        choice = {"index": 0, "finish_reason": finish_reason, "token_ids": sampled}
        body = {
            "model": self.model,
            "generate_response": {"request_id": "derender", "choices": [choice]},
            # The tail of the prompt is enough to decode the first sampled id as the engine would.
            "prompt_token_ids": prompt[-64:],
            "chat_request": {"model": self.model, "messages": [{"role": "user", "content": "."}], **chat},
        }
        answer = await self._server.ask("POST", "/v1/chat/completions/derender", body)
        return parsed_message(answer["choices"][0]["message"])

    async def score(self, ids: Ids, start: int) -> Logps:
        """Logprobs of `ids[start:]` given what precedes each, at temperature 1 under the current weights. float32 [len(ids) - start]."""
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer, _ = await self._ask_policy("/inference/v1/generate", {"token_ids": ids, "sampling_params": params})
        return self._checked(prompt_scores, answer, ids, start)

    async def chat(self, chat: dict[str, Any], params: dict[str, Any], salt: str | None = None) -> tuple[Ids, Sample, Parsed]:
        """Chat capture: the chat route with ids and logprobs. Prompt ids are empty when the server does not report them.

        What the engine aborts begins again: this route takes no ids to go on from.
        """
        wants = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 0}
        body = {**chat, **params, **wants, **({} if salt is None else {"cache_salt": salt})}
        unexplained = 0
        while True:
            holds = self._gate.holds
            answer, adapter = await self._ask_policy("/v1/chat/completions", body, ids="prompt_token_ids")
            prompt, sample = self._checked(chat_sample, answer)
            sample = self._of_policy(sample, adapter)
            if sample.finish_reason != ABORTED:
                return prompt, sample, parsed_message(answer["choices"][0]["message"])
            self.aborts += 1
            unexplained = await self._after_abort(holds, unexplained)

    async def count(self, chat: dict[str, Any]) -> int | None:
        """Prompt length of a chat request by `/tokenize`, or None where the server has no such route."""
        fields: dict[str, Any] = {key: chat[key] for key in ("messages", "tools", "chat_template_kwargs") if key in chat}
        try:
            answer = await self._server.ask("POST", "/tokenize", {"model": self.model, **fields})
        except EngineRefused as error:
            if error.context_full:
                raise
            return None
        return int(answer["count"])

    async def tokenize(self, text: str) -> Ids:
        """The ids of a text, without any that a tokenizer adds at its ends."""
        answer = await self._server.ask("POST", "/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        return self._checked(tokenized_ids, answer)

    async def detokenize(self, ids: Ids) -> str:
        """The text of ids, control tokens included."""
        answer = await self._server.ask("POST", "/detokenize", {"model": self.model, "tokens": ids.tolist()})
        return str(answer["prompt"])

    async def version(self) -> str | None:
        """The weight version that the server says it has, or None where it does not say; an adapter has its own."""
        if self._gate.adapter is not None:
            return self._gate.adapter.version
        try:
            answer = await self._server.ask("GET", "/weight_info")
        except EngineRefused:
            return None
        value = answer.get("weight_version")
        return None if value is None else str(value)

    async def alive(self) -> bool:
        """One quick look at `/health`."""
        return await self._server.alive()

    def close(self) -> None:
        """Closes the idle connections."""
        self._server.close()

    async def _ask_policy(self, path: str, body: dict[str, Any], ids: str | None = None) -> tuple[dict[str, Any], Adapter | None]:
        """One request to the policy, and the adapter that answered it, where policies are adapters.

        Raises `EngineUnavailable` where the engine does not have the adapter (it was started again), `EngineError` where it answers as
        another model: nothing else is ever sampled in its place.
        """
        while True:
            with self._gate.asking() as adapter:
                name = self.model if adapter is None else adapter.name
                try:
                    answer = await self._server.ask("POST", path, {"model": name, **body}, self._generate_timeout_s, ids=ids)
                except EngineRefused as error:
                    if adapter is None or error.status != 404:
                        raise
                    if self._gate.adapter == adapter:
                        missing = f"engine {self.url} does not have adapter {name}; it is asked again once the learner has loaded it"
                        raise EngineUnavailable(missing) from error
                    continue  # it was started again under this request, of which nothing was sampled, and has the policy's next adapter
                if adapter is not None and answer.get("model", name) != name:
                    raise EngineError(f"engine {self.url} was asked for adapter {name} and answered as {answer['model']!r}")
                return answer, adapter

    def _checked(self, read: Callable[..., T], *args: Any) -> T:
        try:
            return read(*args)
        except BadSample as error:
            raise EngineError(f"engine {self.url}: {error}") from error


def _asking_to_read(body: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """The generate request in the one-call form."""
    return {**body, **reading.fields(), "sampling_params": {**body["sampling_params"], **reading.decoding}}
