"""Admin routes that concern all workers: the front asks each and answers for them together.

Invariant: a hold is in force in every worker when it is answered, and in every worker that starts later, before it takes a connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from capture_proxy.admin import Hold, Release, read_model
from capture_proxy.app import close_after, json_errors
from capture_proxy.auth import bearer, same_key
from capture_proxy.settings import Settings


class WorkerDown(Exception):
    """A worker does not answer, or not as it should."""


class WorkerRefused(WorkerDown):
    """A worker says that the request itself is wrong; all would."""


class AskedWorker(Protocol):
    """What is needed of a worker here."""

    index: int
    up: asyncio.Event
    http: aiohttp.ClientSession
    restarts: int


class FrontAdmin:
    """Handlers, and what a new worker has to be told."""

    def __init__(self, settings: Settings, workers: Sequence[AskedWorker]) -> None:
        self.settings = settings
        self.workers = workers
        self._key: str | None = None
        """The admin key, once someone has shown it: workers want it too."""
        self._hold: dict[str, Any] | None = None
        self._release: dict[str, Any] | None = None
        """The last that named a version."""
        self._changing = asyncio.Lock()
        """A hold or release, and a worker that comes up, one after the other."""

    def app(self) -> web.Application:
        app = web.Application(middlewares=[json_errors])
        app.router.add_post("/hold", self.hold)
        app.router.add_post("/release", self.release)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.on_response_prepare.append(close_after)
        return app

    async def restore(self, worker: AskedWorker) -> None:
        """Brings a worker that was started again to the state of the others, and says that it is up. Raises `WorkerDown`."""
        async with self._changing:
            if self._release is not None:
                await self._ask(worker, "POST", "/release", self._release)
            if self._hold is not None:
                await self._ask(worker, "POST", "/hold", self._hold)
            worker.up.set()

    async def hold(self, request: web.Request) -> web.Response:
        self._authorise(request)
        hold = (await read_model(request, Hold, self.settings)).model_dump()
        async with self._changing:
            answers = await self._change("/hold", hold, hold, self._release)
            return web.json_response(answers[0])

    async def release(self, request: web.Request) -> web.Response:
        self._authorise(request)
        release = (await read_model(request, Release, self.settings)).model_dump()
        async with self._changing:
            answers = await self._change("/release", release, None, release if release["version"] is not None else self._release)
            asked = sorted({name for answer in answers for name in answer["adapters_asked"]})
            return web.json_response({**answers[0], "adapters_asked": asked})

    async def health(self, request: web.Request) -> web.Response:
        key = bearer(request)
        if key is None or not same_key(key, self.settings.admin_key_hash):
            return web.json_response({"status": "ok"})
        self._key = key
        answers = await self._all("GET", "/health")
        merged = dict(answers[0])
        for answer in answers[1:]:
            merged["engines"] = {url: up and answer["engines"].get(url, False) for url, up in merged["engines"].items()}
            merged["held"] = merged["held"] or answer["held"]
            for name, value in answer.items():
                if type(value) is int and name in merged:
                    merged[name] += value
        return web.json_response({**merged, "workers": len(answers), "worker_restarts": sum(worker.restarts for worker in self.workers)})

    async def metrics(self, request: web.Request) -> web.Response:
        self._authorise(request)
        texts = await self._all("GET", "/metrics")
        types: dict[str, str] = {}
        values: dict[str, float] = {}
        for text in texts:
            for line in text.splitlines():
                name, _, value = line.rpartition(" ")
                if line.startswith("#"):
                    types[line.split()[2]] = line
                elif "engine_up{" in name:
                    values[name] = min(values.get(name, 1.0), float(value))
                else:
                    values[name] = values.get(name, 0.0) + float(value)
        values["capture_proxy_worker_restarts_total"] = float(sum(worker.restarts for worker in self.workers))
        types["capture_proxy_worker_restarts_total"] = "# TYPE capture_proxy_worker_restarts_total counter"
        lines = []
        for family, head in sorted(types.items()):
            lines.append(head)
            lines += [f"{name} {value:.17g}" for name, value in sorted(values.items()) if name.partition("{")[0] == family]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    def _authorise(self, request: web.Request) -> None:
        key = bearer(request)
        if key is None or not same_key(key, self.settings.admin_key_hash):
            raise web.HTTPUnauthorized(reason="the admin key is missing or wrong")
        self._key = key

    async def _change(self, path: str, body: dict[str, Any], hold: dict[str, Any] | None, release: dict[str, Any] | None) -> list[Any]:
        """Tells all workers; from then on `hold` and `release` are in force, also where one of them is just dying, unless it is refused."""
        before = self._hold, self._release
        self._hold, self._release = hold, release
        try:
            return await self._all("POST", path, body)
        except web.HTTPBadRequest:
            self._hold, self._release = before
            raise

    async def _all(self, method: str, path: str, body: Any = None) -> list[Any]:
        """The answers of the workers that are up; one that is not is told when it is (`restore`)."""
        up = [worker for worker in self.workers if worker.up.is_set()]
        try:
            answers = await asyncio.gather(*(self._ask(worker, method, path, body) for worker in up))
        except WorkerRefused as error:
            raise web.HTTPBadRequest(reason=str(error)) from error
        except WorkerDown as error:
            raise web.HTTPServiceUnavailable(reason=str(error)) from error
        if not answers:
            raise web.HTTPServiceUnavailable(reason="no worker is up")
        return answers

    async def _ask(self, worker: AskedWorker, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self._key}"}
        try:
            async with worker.http.request(method, "http://worker" + path, json=body, headers=headers) as response:
                if response.status == 400:
                    raise WorkerRefused((await response.json())["error"]["message"])
                if response.status != 200:
                    raise WorkerDown(f"worker {worker.index} answered {path} with {response.status}")
                return await response.text() if path == "/metrics" else await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise WorkerDown(f"worker {worker.index} does not answer {path}: {error or type(error).__name__}") from error
