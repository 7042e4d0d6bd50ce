"""The Open Reward Standard's HTTP API: what environments a server has, their tasks, and sessions in which tools are called.

Invariant: a tool call is sent once. One whose answer was lost is asked for by its task id, so that it is not made twice; where that cannot
be had, and where the server no longer knows the session, the session is lost, and no answer is made up.
Source: openrewardstandard.io, the HTTP API; OpenReward's own servers are reached through its sessions host, with a key and a deployment.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import httpx

from harness_rl.errors import UserError

PING_S = 10.0
"""Between two signs of life: a session that gives none is taken away, on the hosted platform after two minutes."""
TIMEOUT_S = 60.0
"""For an answer, and between two signs of life from a tool that is at work."""
RESUMES = 3


class SessionLostError(Exception):
    """The session is gone: its episode has no outcome."""


class ToolError(Exception):
    """The environment did not take the call (an unknown tool, arguments that do not fit, an episode that is over): the policy's to see."""


class OpenReward:
    """`OpenReward("http://127.0.0.1:8080")`; hosted: `OpenReward("https://sessions.openreward.ai", key, "owner/name")`."""

    def __init__(self, url: str, key: str | None = None, deployment: str | None = None) -> None:
        headers = {"X-API-Key": key, "X-Deployment": deployment}
        local = "://127.0.0.1" in url or "://localhost" in url
        self._http = httpx.Client(
            base_url=url.rstrip("/"),
            headers={name: value for name, value in headers.items() if value},
            timeout=TIMEOUT_S,
            trust_env=not local,
        )

    def environments(self) -> list[str]:
        return list(self._json("GET", "/list_environments"))

    def tools(self, environment: str) -> dict[str, Any]:
        """`tools`: each with name, description and input_schema; `terminal_tool`: what takes the last message, or None."""
        return dict(self._json("GET", f"/{environment}/tools"))

    def num_tasks(self, environment: str, split: str) -> int:
        return int(self._json("POST", f"/{environment}/num_tasks", {"split": split})["num_tasks"])

    def session(self, environment: str, split: str, index: int) -> Session:
        """Opened; close it. Raises httpx.HTTPError."""
        return Session(self._http, environment, split, index)

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Raises UserError: what is asked for here is asked before a run."""
        try:
            return checked(self._http.request(method, path, json=body)).json()
        except httpx.HTTPStatusError as error:
            raise UserError(f"the Open Reward server refused {error}") from None
        except httpx.TransportError as error:
            raise UserError(
                f"the Open Reward server at {self._http.base_url} does not answer ({error}); start it, or give its URL"
            ) from None

    def close(self) -> None:
        self._http.close()


class Session:
    """One episode of one task."""

    def __init__(self, http: httpx.Client, environment: str, split: str, index: int) -> None:
        self._http, self._environment = http, environment
        events = list(self._events("/create_session", {}, {}))
        self._headers = {"X-Session-ID": next(data.strip() for event, data in events if event == "task_id")}
        self._closed = threading.Event()
        try:
            body = {"env_name": environment, "split": split, "index": index}
            checked(self._http.post("/create", json=body, headers=self._headers))
            self.tools: dict[str, Any] = self._get("task_tools")
            self.prompt: list[dict[str, Any]] = self._get("prompt")
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._ping, name="openreward ping", daemon=True).start()

    def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The tool's output: `blocks`, `reward` (None for none), `finished`. Raises ToolError, SessionLostError."""
        task: str | None = None
        found = "the stream ended early"
        body = {"name": tool, "input": arguments}
        for _ in range(1 + RESUMES):
            parts: list[str] = []
            try:
                for event, data in self._events(f"/{self._environment}/call", {**body, "task_id": task}, self._headers):
                    if event == "task_id":
                        task = data.strip()
                    elif event == "error":
                        raise SessionLostError(f"{tool} failed on the server: {data[:300]}")
                    elif event in ("chunk", "end"):
                        parts.append(data)
                        if event == "end":
                            return _output(json.loads("".join(parts)))
            except httpx.HTTPStatusError as error:
                raise SessionLostError(f"{tool}: {error}") from None
            except httpx.TransportError as error:
                found = f"{type(error).__name__}: {error}"
            if task is None:  # it may have been made, or not
                break
        raise SessionLostError(f"{tool}: its answer did not come through: {found}")

    def close(self) -> None:
        """Idempotent; a server that is gone has no session to end."""
        if self._closed.is_set():
            return
        self._closed.set()
        for path in ("/delete", "/delete_session"):
            with contextlib.suppress(httpx.HTTPError):
                self._http.post(path, headers=self._headers)

    def _get(self, what: str) -> Any:
        return checked(self._http.get(f"/{self._environment}/{what}", headers=self._headers)).json()

    def _ping(self) -> None:
        while not self._closed.wait(PING_S):
            with contextlib.suppress(httpx.HTTPError):  # a session that is gone shows at its next call
                self._http.post("/ping", headers=self._headers)

    def _events(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[tuple[str, str]]:
        with self._http.stream("POST", path, json=body, headers={**headers, "Accept": "text/event-stream"}) as response:
            if response.is_error:
                response.read()
            yield from events(checked(response).iter_lines())


def events(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Server-sent events as (name, data); those without a name, and comments, are left out."""
    name = ""
    data: list[str] = []
    for line in lines:
        if not line:
            if name:
                yield name, "\n".join(data)
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)


def _output(answer: dict[str, Any]) -> dict[str, Any]:
    if not answer["ok"]:
        raise ToolError(str(answer["error"]))
    output: dict[str, Any] = answer["output"]
    return output


def checked(response: httpx.Response) -> httpx.Response:
    """Raises httpx.HTTPStatusError that says what the server said."""
    if response.is_error:
        words = " ".join(response.text.split())[:300]
        where = f"{response.request.method} {response.request.url}"
        raise httpx.HTTPStatusError(f"{where}: {response.status_code}: {words}", request=response.request, response=response)
    return response
