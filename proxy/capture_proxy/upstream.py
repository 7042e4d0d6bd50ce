"""One request to an engine's server, repeated within bounds while the server is unreachable or overloaded.

Invariant: nothing is sent while the gate is held, every wait ends, redirects are never followed, and what is not a JSON object with status
200 is a named error. A cancelled request closes its connection, which makes the engine stop sampling.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from capture_proxy import fastjson
from capture_proxy.bigjson import off_loop
from capture_proxy.codec import Ids
from capture_proxy.gate import Gate, HeldTooLong
from capture_proxy.http1 import HttpClient, NoAnswer

CONTROL_TIMEOUT_S = 60.0
"""Deadline of one render, derender, tokenize or probe request."""
CONNECT_TIMEOUT_S = 5.0
MAX_BACKOFF_S = 3.0


class EngineError(Exception):
    """The engine answered something we cannot use, or refused."""


class EngineUnavailable(EngineError):
    """No answer within the allowed time and retries; another engine may do."""


class EngineUnsynced(EngineUnavailable):
    """It has other weights than the policy's until control has synced it."""


class PolicyHeld(EngineUnavailable):
    """The gate stayed closed too long; no engine will do."""


class EngineRefused(EngineError):
    """The engine says that the request itself is wrong (4xx)."""

    def __init__(self, message: str, status: int, context_full: bool) -> None:
        super().__init__(message)
        self.status = status
        self.context_full = context_full
        """The prompt alone does not fit the model's window."""


@dataclass(frozen=True)
class Retry:
    """How long an unreachable or overloaded engine is asked again."""

    total_s: float = 60.0
    base_s: float = 0.2
    server_errors: int = 3
    """Tries for an answer 500/502/504; connection errors and 503 are tried until `total_s` is over."""


class Upstream:
    """The server at `url`, as much of it as HTTP shows."""

    def __init__(self, url: str, retry: Retry, gate: Gate) -> None:
        self.url = url
        self.retry = retry
        self.retries = 0
        """Requests that were sent again."""
        self._gate = gate
        self._http = HttpClient(url, CONNECT_TIMEOUT_S)

    async def alive(self) -> bool:
        """One quick look at `/health`."""
        try:
            status, _ = await self._http.request("GET", "/health", None, CONNECT_TIMEOUT_S)
        except (NoAnswer, TimeoutError):
            return False
        return status == 200

    def close(self) -> None:
        """Closes the idle connections."""
        self._http.close()

    def backoff(self, attempt: int) -> float:
        """Seconds before the next try."""
        return min(self.retry.base_s * 2**attempt, MAX_BACKOFF_S)

    async def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
        ids: str | None = None,
        known: Ids | None = None,
    ) -> dict[str, Any]:
        """One request, repeated within the retry bounds while the engine is unreachable or overloaded.

        `ids` names the answer's long list of ids, and `known` are ids that it probably starts with.

        Each try waits for the gate: an engine that was started again answers before it has the policy's weights.
        """
        raw = None if body is None else await off_loop(_text_size(body), fastjson.dumps, body)
        deadline = time.monotonic() + self.retry.total_s
        attempt = errors = 0
        while True:
            try:
                held = time.monotonic()
                await self._gate.wait()
                deadline += time.monotonic() - held  # an update is not the server's failure
                status, answer = await self._http.request(method, path, raw, timeout_s)
            except HeldTooLong as error:
                raise PolicyHeld(f"engine {self.url}{path}: {error}") from error
            except TimeoutError as error:
                raise EngineUnavailable(f"engine {self.url}{path}: no answer within {timeout_s:g} s") from error
            except NoAnswer as error:
                status, answer = None, str(error).encode()
            if status == 200:
                return _json_object(answer, self.url + path, ids, known)
            if status is not None and 300 <= status < 400:
                raise EngineError(f"engine {self.url}{path} answered a redirect ({status}), which is never followed")
            if status is not None and status < 500:
                raise EngineRefused(
                    f"engine {self.url}{path} answered {status}: {_error_text(answer)}", status, _context_full(status, answer)
                )
            errors += status not in (None, 503)
            if errors >= self.retry.server_errors or time.monotonic() + self.backoff(attempt) > deadline:
                raise EngineUnavailable(f"engine {self.url}{path} failed ({status or 'no answer'}): {_error_text(answer)}")
            self.retries += 1
            await asyncio.sleep(self.backoff(attempt))
            attempt += 1


def _text_size(body: dict[str, Any]) -> int:
    """About how long a chat request is."""
    contents = [message.get("content") for message in body.get("messages", ())]
    parts = (part for content in contents if type(content) is list for part in content)
    images = sum(len(part["image_url"]["url"]) for part in parts if part["type"] == "image_url")
    return images + sum(len(content) for content in contents if type(content) is str)


def _json_object(raw: bytes, where: str, ids: str | None = None, known: Ids | None = None) -> dict[str, Any]:
    """The JSON object in an engine's 200 answer; its member `ids` as an array, where it is a list of ids."""
    try:
        answer = fastjson.loads(raw) if ids is None else fastjson.loads_with_ids(raw, ids, known)
    except ValueError as error:
        raise EngineError(f"engine {where} answered 200 with something that is not JSON") from error
    if not isinstance(answer, dict):
        raise EngineError(f"engine {where} answered 200 with a JSON {type(answer).__name__}, not an object")
    return answer


def _error_text(answer: bytes) -> str:
    try:
        return str(fastjson.loads(answer)["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")


def _context_full(status: int, answer: bytes) -> bool:
    """vLLM's wording for a prompt that does not fit even without output; a too large max_tokens alone says it otherwise."""
    text = _error_text(answer)
    return status == 400 and ("maximum context length" in text or "exceeds model's maximum" in text) and "max_tokens" not in text
