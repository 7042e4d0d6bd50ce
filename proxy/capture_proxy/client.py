"""Client of the proxy's admin routes, for the process that controls the sessions.

Invariant: every call has a deadline, and a refusal of the proxy becomes a `ProxyError` that carries its status and its one-line message.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from capture_proxy.trace import MEDIA_TYPE, TrainingTrace


class ProxyError(Exception):
    """The proxy refused or could not be reached."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status, or None when no answer came."""


@dataclass(frozen=True)
class CreatedSession:
    """What `POST /sessions` answers. The key is known here and nowhere else: the proxy keeps its hash."""

    session_id: str
    api_key: str = field(repr=False)
    base_urls: dict[str, str]
    """For the proxy's main listener: `openai`, `anthropic`, `gemini`."""


class ProxyClient:
    """Admin client. Use as `async with ProxyClient(url, key) as proxy:` or call `close()` at the end."""

    def __init__(self, base_url: str, admin_key: str, timeout_s: float = 60.0, ca_file: Path | None = None) -> None:
        """`ca_file` holds the certificates that vouch for the proxy's, where the system's do not."""
        self.base_url = base_url.rstrip("/")
        self.admin_key = admin_key
        """For `handoff_listener`."""
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._ssl = ssl.create_default_context(cafile=ca_file) if ca_file is not None else True
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ProxyClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def create_session(
        self,
        *,
        metadata: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
        limits: dict[str, Any] | None = None,
        template: dict[str, Any] | None = None,
        history: str = "template",
        roles: dict[str, Any] | None = None,
        script: list[dict[str, Any]] | None = None,
    ) -> CreatedSession:
        """Opens a session. `script` makes it a demonstration: its assistant turns come from the script."""
        body: dict[str, Any] = {
            "metadata": metadata or {},
            "sampling": sampling or {},
            "limits": limits or {},
            "template": template or {},
            "history": history,
            "roles": roles or {},
        }
        if script is not None:
            body["script"] = script
        answer = await self._json("POST", "/sessions", body)
        return CreatedSession(answer["session_id"], answer["api_key"], answer["base_urls"])

    async def status(self, session_id: str) -> dict[str, Any]:
        """State, counts by reason, findings (see proxy/README.md)."""
        return await self._json("GET", f"/sessions/{session_id}")

    async def seal(self, session_id: str, grace_s: float | None = None) -> dict[str, Any]:
        """Closes the session's door; returns its final status once no call is in flight."""
        return await self._json("POST", f"/sessions/{session_id}/seal", {} if grace_s is None else {"grace_s": grace_s})

    async def trace(self, session_id: str) -> TrainingTrace:
        """The session's trace, fetched in the binary form and checked."""
        _, raw = await self._request("GET", f"/sessions/{session_id}/trace", None, {"Accept": MEDIA_TYPE})
        return TrainingTrace.from_bytes(raw)

    async def delete(self, session_id: str, purge: bool = False) -> None:
        """Forgets the session; `purge` also removes its log from the store."""
        await self._request("DELETE", f"/sessions/{session_id}" + ("?purge=1" if purge else ""), None)

    async def hold(self, reason: str, timeout_s: float) -> dict[str, Any]:
        """From now on new agent calls wait, each at most `timeout_s`."""
        return await self._json("POST", "/hold", {"reason": reason, "timeout_s": timeout_s})

    async def release(self, version: str | None = None, adapter: str | None = None) -> dict[str, Any]:
        """Held calls go on. `version` is the policy version that the engines now serve, as their own model or as `adapter`.

        `adapters_asked` of the answer: the adapters that can still be asked for, this one and those of requests under way.
        """
        return await self._json("POST", "/release", {"version": version, "adapter": adapter})

    async def health(self) -> dict[str, Any]:
        """State of the proxy and of its engines."""
        return await self._json("GET", "/health")

    async def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        _, raw = await self._request(method, path, body)
        answer: dict[str, Any] = json.loads(raw)
        return answer

    async def _request(self, method: str, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=self._timeout, connector=aiohttp.TCPConnector(ssl=self._ssl))
        try:
            async with self._http.request(
                method, self.base_url + path, json=body, headers={**self._headers, **(headers or {})}, allow_redirects=False
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ProxyError(f"capture proxy {self.base_url}: {method} {path} got no answer ({error or type(error).__name__})") from error
        if response.status >= 300:
            raise ProxyError(f"capture proxy: {method} {path} answered {response.status}: {_message(raw)}", response.status)
        return response.status, raw


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode(errors="replace")


async def handoff_listener(socket_path: str | Path, admin_key: str, session_id: str, sock: socket.socket, timeout_s: float = 10.0) -> None:
    """Gives the listening socket `sock` to the proxy, which then serves that one session's agent routes on it.

    The caller may close its own copy afterwards. Raises `ProxyError` when the proxy refuses.
    """

    def give() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
            control.settimeout(timeout_s)
            control.connect(str(socket_path))
            line = json.dumps({"admin_key": admin_key, "session_id": session_id}).encode() + b"\n"
            socket.send_fds(control, [line], [sock.fileno()])
            answer = b""
            while not answer.endswith(b"\n") and (part := control.recv(4096)):
                answer += part
            return answer

    try:
        answer = json.loads(await asyncio.to_thread(give))
    except (OSError, ValueError) as error:
        raise ProxyError(f"capture proxy: no answer to the listener hand-off on {socket_path} ({error})") from error
    if not answer.get("ok"):
        raise ProxyError(f"capture proxy: listener hand-off refused: {answer.get('error')}")
