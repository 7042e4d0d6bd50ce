"""Admin routes: control's side of the proxy, and what operators read.

Invariant: nothing here answers without the admin key, except a bare `/health`; a refusal is one line that says which field is wrong.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from capture_proxy import bodies
from capture_proxy.app import Proxy, add_agent_routes, json_errors
from capture_proxy.auth import bearer, same_key
from capture_proxy.records import Snapshot
from capture_proxy.session import Session
from capture_proxy.settings import Settings
from capture_proxy.spec import SessionSpec
from capture_proxy.store import StoreError
from capture_proxy.trace import MEDIA_TYPE

Model = TypeVar("Model", bound=BaseModel)


class Hold(BaseModel):
    """Body of `POST /hold`."""

    model_config = ConfigDict(extra="forbid")

    reason: str
    timeout_s: float = Field(gt=0)


class Release(BaseModel):
    """Body of `POST /release`."""

    model_config = ConfigDict(extra="forbid")

    version: str | None = None
    adapter: str | None = None
    """The name under which the engines serve this version; None: it is their own model."""

    @model_validator(mode="after")
    def _named(self) -> Release:
        if self.adapter is not None and self.version is None:
            raise ValueError("an adapter needs its version")
        return self


class Seal(BaseModel):
    """Body of `POST /sessions/{id}/seal`."""

    model_config = ConfigDict(extra="forbid")

    grace_s: float | None = Field(default=None, ge=0)


def main_app(proxy: Proxy) -> web.Application:
    """The main listener: admin routes and every session's agent routes."""
    app = web.Application(middlewares=[json_errors])
    routes = AdminRoutes(proxy)
    app.router.add_post("/sessions", routes.create)
    app.router.add_get("/sessions/{id}", routes.status)
    app.router.add_post("/sessions/{id}/seal", routes.seal)
    app.router.add_get("/sessions/{id}/trace", routes.trace)
    app.router.add_delete("/sessions/{id}", routes.delete)
    app.router.add_post("/hold", routes.hold)
    app.router.add_post("/release", routes.release)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/metrics", routes.metrics)
    add_agent_routes(app, proxy)
    return app


class AdminRoutes:
    """Handlers of the admin routes."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy

    async def create(self, request: web.Request) -> web.Response:
        self._authorise(request)
        spec = await read_model(request, SessionSpec, self.proxy.settings)
        if spec.template.control_tokens == "split" and self.proxy.ctx.control is None:
            raise web.HTTPBadRequest(
                reason="template.control_tokens: split needs the model's tokenizer: start the proxy with --tokenizer FILE"
            )
        try:
            session, key = self.proxy.create_session(spec)
        except StoreError as error:
            return _refuse(503, str(error))
        root = f"{request.scheme}://{request.host}"
        urls = {"openai": root + "/v1", "anthropic": root, "gemini": root}
        return web.json_response({"session_id": session.id, "api_key": key, "base_urls": urls}, status=201)

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(self._session(request).status())

    async def seal(self, request: web.Request) -> web.Response:
        session = self._session(request)
        await self.proxy.seal(session, (await read_model(request, Seal, self.proxy.settings)).grace_s)
        return web.json_response(session.status())

    async def trace(self, request: web.Request) -> web.Response:
        snapshot = Snapshot.of(self._session(request).graph)
        if MEDIA_TYPE in request.headers.get("Accept", ""):
            return web.Response(body=await asyncio.to_thread(lambda: snapshot.trace().to_bytes()), content_type=MEDIA_TYPE)
        return web.Response(text=await asyncio.to_thread(lambda: snapshot.trace().to_json()), content_type="application/json")

    async def delete(self, request: web.Request) -> web.Response:
        await self.proxy.delete(self._session(request), purge=request.query.get("purge") == "1")
        return web.json_response({"deleted": True})

    async def hold(self, request: web.Request) -> web.Response:
        self._authorise(request)
        hold = await read_model(request, Hold, self.proxy.settings)
        self.proxy.ctx.gate.hold(hold.reason, hold.timeout_s)
        return web.json_response({"held": True})

    async def release(self, request: web.Request) -> web.Response:
        self._authorise(request)
        gate = self.proxy.ctx.gate
        release = await read_model(request, Release, self.proxy.settings)
        if self.proxy.settings.adapters and release.adapter is None:
            raise web.HTTPBadRequest(reason="adapter: the proxy was started with --adapters and would ask the engines' own model; name one")
        asked = gate.release(release.version, release.adapter)
        return web.json_response({"held": False, "version": gate.version, "adapters_asked": asked})

    async def health(self, request: web.Request) -> web.Response:
        """Anyone learns that the proxy runs; the admin key shows more."""
        key = bearer(request)
        if key is None or not same_key(key, self.proxy.settings.admin_key_hash):
            return web.json_response({"status": "ok"})
        gate = self.proxy.ctx.gate
        return web.json_response(
            {
                "status": "ok",
                "engines": await self.proxy.ctx.pool.states(),
                "held": gate.held,
                "held_reason": gate.reason,
                "version": gate.version,
                "adapter": gate.adapter.name if gate.adapter is not None else None,
                **self._gauges(),
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        self._authorise(request)
        ctx = self.proxy.ctx
        totals = ctx.metrics.totals
        totals["engine_retries"] = sum(engine.retries for engine in ctx.pool.engines)
        totals["engine_aborts"] = sum(engine.aborts for engine in ctx.pool.engines)
        totals["engine_moves"] = ctx.pool.moves
        text = ctx.metrics.text(self._gauges(), await ctx.pool.states(), ctx.pool.load())
        return web.Response(text=text, content_type="text/plain")

    def _gauges(self) -> dict[str, float]:
        sessions = self.proxy.sessions.values()
        return {
            "sessions_open": sum(session.state == "open" for session in sessions),
            "sessions_sealed": sum(session.state == "sealed" for session in sessions),
            "calls_in_flight": sum(len(session.running) for session in sessions),
            "calls_held": self.proxy.ctx.gate.waiting,
        }

    def _authorise(self, request: web.Request) -> None:
        key = bearer(request)
        if key is None or not same_key(key, self.proxy.settings.admin_key_hash):
            raise web.HTTPUnauthorized(reason="the admin key is missing or wrong")

    def _session(self, request: web.Request) -> Session:
        self._authorise(request)
        session = self.proxy.sessions.get(request.match_info["id"])
        if session is None:
            raise web.HTTPNotFound(reason="no such session")
        return session


async def read_model(request: web.Request, model: type[Model], settings: Settings) -> Model:
    """The JSON body as `model`; an empty body counts as `{}`. Raises a 400 that names the field."""
    try:
        raw = await bodies.read(request, settings.body_limit, settings.body_timeout_s)
        return model.model_validate_json(raw or b"{}")
    except bodies.BodyRefused as error:
        raise web.HTTPBadRequest(reason=str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise web.HTTPBadRequest(reason=f"{where}: {first['msg']}".replace("\n", " ")) from error


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "server_error", "code": None}}, status=status)
