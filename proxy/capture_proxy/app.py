"""The proxy as an HTTP server: its state, and the agent's routes.

Invariant: an agent's request is served only for the session whose key it carries, and on a handed-off listener only for that listener's
session; every other key, a sealed session and an unknown one all get the same 404, which stops every client. No engine route is reachable
from here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from aiohttp import web

from capture_proxy import bigjson, bodies, calls, dialects, fastjson, limits, recall, schemas, volatile
from capture_proxy.auth import agent_key, key_hash, new_key, same_key
from capture_proxy.calls import Context
from capture_proxy.certify import Certificates
from capture_proxy.control import ControlTokens
from capture_proxy.dialects.wire import BadRequest
from capture_proxy.engine import Engine
from capture_proxy.gate import Gate
from capture_proxy.messages import AgentCall, Reply
from capture_proxy.metrics import Metrics
from capture_proxy.pool import EnginePool, patience
from capture_proxy.reasons import Reason
from capture_proxy.refusal import CallRefused, refusal_of
from capture_proxy.routing import owner
from capture_proxy.session import RunningCall, Session
from capture_proxy.settings import Settings
from capture_proxy.spec import SessionSpec
from capture_proxy.store import Store, StoreError, read_log
from capture_proxy.stream import EventStream, reading_within
from capture_proxy.upstream import EngineError

log = logging.getLogger(__name__)

ADAPTER_WAIT_S = 300.0
"""How long a call waits for control's first word, where policies are adapters."""


class Proxy:
    """Everything that lives as long as the process: store, engines, sessions, gate, counters."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = Store(settings.store, settings.durability)
        gate = Gate()
        if settings.adapters:
            gate.hold("an adapter of the policy", ADAPTER_WAIT_S)
        control = ControlTokens(settings.tokenizer) if settings.tokenizer is not None else None
        retry = patience(settings.retry, len(settings.engines))
        engines = [Engine(url, settings.model, retry, settings.generate_timeout_s, gate) for url in settings.engines]
        pool = EnginePool(engines, gate, settings.retry.total_s, settings.worker)
        self.ctx = Context(settings, pool, gate, Metrics(), Certificates(settings.certificates or settings.store), control)
        self.sessions: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self.listeners: dict[str, list[web.AppRunner]] = {}
        """Handed-off listeners by session id."""
        self._resume()

    def create_session(self, spec: SessionSpec) -> tuple[Session, str]:
        """A new session and its key."""
        key, session_id = self._ours(new_key), self._ours(lambda: "s" + secrets.token_hex(12))
        salt = (self.ctx.gate.version or "start") if self.settings.salt_prefix_cache else None
        session = Session.create(session_id, key_hash(key), spec, self.store.create(session_id), salt)
        self._add(session)
        return session, key

    def _ours(self, make: Callable[[], str]) -> str:
        """A name that leads to this worker."""
        while owner(name := make(), self.settings.workers) != self.settings.worker:
            pass
        return name

    def session_of(self, key: str | None) -> Session | None:
        """The session with this key, sealed or not."""
        session = self._by_key.get(key_hash(key)) if key else None
        return session if session is not None and key is not None and same_key(key, session.key_hash) else None

    async def seal(self, session: Session, grace_s: float | None) -> None:
        await session.seal(self.settings.seal_grace_s if grace_s is None else grace_s)
        await self.close_listeners(session.id)

    async def delete(self, session: Session, purge: bool) -> None:
        """Forgets a session. Its log is kept unless it is purged."""
        await session.delete()
        await self.close_listeners(session.id)
        self.sessions.pop(session.id, None)
        self._by_key.pop(session.key_hash, None)
        self.ctx.pool.forget(session.id)
        if purge:
            self.store.path(session.id).unlink(missing_ok=True)

    async def close_listeners(self, session_id: str) -> None:
        for runner in self.listeners.pop(session_id, []):
            await runner.cleanup()

    async def close(self) -> None:
        """Cancels the calls in flight and closes everything; the sessions stay open in their logs."""
        tasks = [call.task for session in self.sessions.values() for call in session.running.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        for session_id in list(self.listeners):
            await self.close_listeners(session_id)
        for engine in self.ctx.pool.engines:
            engine.close()
        for session in self.sessions.values():
            session.log.close()
        await self.store.close()

    def _add(self, session: Session) -> None:
        self.sessions[session.id] = session
        self._by_key[session.key_hash] = session

    def _resume(self) -> None:
        for session_id in self.store.session_ids():
            content = read_log(self.store.path(session_id))
            session_log = self.store.reopen(session_id, content)
            session = Session.resume(content, session_log)
            if session is None:
                session_log.close()
                continue
            self._add(session)
        if self.sessions:
            log.info("resumed %d sessions from %s", len(self.sessions), self.store.root)


def server(app: web.Application, shutdown_s: float) -> web.AppRunner:
    """A runner for any of the proxy's applications. Bodies are left as they were sent: `bodies` expands them within its limits."""
    return web.AppRunner(app, handler_cancellation=True, shutdown_timeout=shutdown_s, access_log=None, auto_decompress=False)


async def close_after(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: the answer ends its connection, and says so."""
    response.headers["Connection"] = "close"
    response.force_close()


def agent_app(proxy: Proxy, only: str | None = None) -> web.Application:
    """The agent's routes. `only` restricts them to one session and leaves nothing else on the listener."""
    app = web.Application(middlewares=[json_errors])
    add_agent_routes(app, proxy, only)
    return app


def add_agent_routes(app: web.Application, proxy: Proxy, only: str | None = None) -> None:
    """Adds the agent's routes to `app`, with the key in a header or as `/s/{key}` before the path."""
    routes = AgentRoutes(proxy, only)
    for prefix in ("", "/s/{key}"):
        app.router.add_post(prefix + "/v1/chat/completions", partial(routes.call, dialects.chat))
        app.router.add_post(prefix + "/v1/responses", partial(routes.call, dialects.responses))
        app.router.add_post(prefix + "/v1/messages", partial(routes.call, dialects.anthropic))
        app.router.add_post(prefix + "/v1/messages/count_tokens", partial(routes.count, dialects.anthropic))
        app.router.add_post(prefix + "/{api:v1|v1beta}/models/{model:.+}:{verb:[A-Za-z]+}", routes.gemini)
        app.router.add_get(prefix + "/v1/models", routes.models)
        app.router.add_get(prefix + "/v1/models/{name:.+}", routes.models)


class AgentRoutes:
    """Handlers of the agent's calls."""

    def __init__(self, proxy: Proxy, only: str | None) -> None:
        self.proxy = proxy
        self.only = only

    async def models(self, request: web.Request) -> web.StreamResponse:
        """The one model, under the name that was asked for."""
        if self._session(request) is None:
            return _not_found(request)
        name = request.match_info.get("name", self.proxy.settings.model)
        card = {"id": name, "object": "model", "created": 0, "owned_by": "capture-proxy"}
        return web.json_response(card if "name" in request.match_info else {"object": "list", "data": [card]})

    async def gemini(self, request: web.Request) -> web.StreamResponse:
        """This dialect says in the path which model it asks and whether it streams."""
        model, verb = request.match_info["model"], request.match_info["verb"]
        if verb == "countTokens":
            return await self.count(dialects.gemini, request)
        if verb == "generateContent" or (verb == "streamGenerateContent" and request.query.get("alt") == "sse"):
            return await self.call(dialects.gemini, request, model=model, stream=verb == "streamGenerateContent")
        raise web.HTTPNotFound(reason="served are generateContent, streamGenerateContent with alt=sse, and countTokens")

    async def count(self, dialect: ModuleType, request: web.Request) -> web.StreamResponse:
        """How many tokens the engine makes of a request. Nothing of it is recorded."""
        session = self._session(request)
        if session is None or session.state == "sealed":
            return _not_found(request)
        try:
            limits.check_rate(session)
            body = await self._body(request, session)
            call = await _parsed(dialect, session, body, request)
            return web.json_response(dialect.counted(await calls.count(self.proxy.ctx, session, call)))
        except BadRequest as error:
            return _error(request, _refused(error))
        except CallRefused as refused:
            return _error(request, refused)
        except EngineError as error:
            return _error(request, refusal_of(error))

    async def call(self, dialect: ModuleType, request: web.Request, **fields: Any) -> web.StreamResponse:
        """One call of the agent. `fields` are what its dialect says outside the body; they are recorded with it."""
        session = self._session(request)
        if session is None or session.state == "sealed":
            if session is not None:
                session.late()
            return _not_found(request)
        try:
            running = session.begin()
        except StoreError as error:
            return _error(request, CallRefused(503, None, str(error), Reason.ENGINE_FAILED, retry_after_s=5))
        # A task, so that a seal can end it: what has not arrived by then is not sampled after it.
        running.task = arriving = asyncio.create_task(self._arrived(dialect, request, session, running, fields))
        try:
            call, body = await arriving
        except (BadRequest, CallRefused) as error:
            refused = (
                error if isinstance(error, CallRefused) else CallRefused(getattr(error, "status", 400), None, str(error), Reason.REFUSED)
            )
            session.end(running.seq, refused.reason, str(refused))
            session.leave(running)
            self.proxy.ctx.metrics.calls[refused.reason.value] += 1
            return _error(request, refused)
        except BaseException:
            session.end(running.seq, running.cancel_reason, "its client left, or a seal came, before it had all arrived")
            session.leave(running)
            if running.cancel_reason is Reason.LATE and arriving.cancelled():
                return _not_found(request)
            raise
        running.task = asyncio.create_task(calls.perform(self.proxy.ctx, session, call, body, running))
        try:
            return await self._respond(request, session, call, running, running.task)
        finally:
            try:
                if not running.delivered:
                    await self._not_delivered(session, running, running.task)
            finally:  # a listener that is closed cancels its handlers more than once
                session.leave(running)

    async def _arrived(
        self, dialect: ModuleType, request: web.Request, session: Session, running: RunningCall, fields: dict[str, Any]
    ) -> tuple[AgentCall, dict[str, Any]]:
        """The call and its body, once the client has sent it all. Raises `BadRequest`, `CallRefused`."""
        limits.check_rate(session)
        body = await self._body(request, session, running) | fields
        return await _parsed(dialect, session, body, request, running.body_bytes), body

    async def _respond(
        self, request: web.Request, session: Session, call: AgentCall, running: RunningCall, task: asyncio.Task[Reply]
    ) -> web.StreamResponse:
        """Waits for the call and writes its answer; an error before the first byte keeps its HTTP status."""
        if call.stream:
            # Only what can still be refused is awaited before the headers, and not for longer than a silence may last.
            sampling = asyncio.create_task(running.sampling.wait())
            try:
                await asyncio.wait({task, sampling}, timeout=self.proxy.settings.keepalive_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sampling.cancel()
            if not (task.done() and (task.cancelled() or task.exception() is not None)):
                return await self._stream(request, session, call, running, task)
        elif not (await asyncio.wait({task}, timeout=self.proxy.settings.plain_answer_s))[0]:
            running.cancel_reason = Reason.ENGINE_FAILED
            late = f"no answer within {self.proxy.settings.plain_answer_s:g} s; ask again, or ask for a stream"
            return _error(request, CallRefused(503, None, late, Reason.ENGINE_FAILED, retry_after_s=5))
        try:
            answer = await asyncio.shield(task)
        except CallRefused as refused:
            return _error(request, refused)
        except asyncio.CancelledError:
            if task.cancelled():
                return _not_found(request)
            raise
        body = fastjson.dumps(dialects.BY_NAME[call.dialect].reply(answer, call, running.response_id, running.created))
        response = web.Response(body=body, content_type="application/json", charset="utf-8")
        # Written here to the last byte, so that a client that has left is noticed.
        async with reading_within(request, self.proxy.settings.answer_timeout_s):
            await response.prepare(request)
            await response.write_eof()
        session.deliver(running)
        return response

    async def _stream(
        self, request: web.Request, session: Session, call: AgentCall, running: RunningCall, task: asyncio.Task[Reply]
    ) -> web.StreamResponse:
        dialect = dialects.BY_NAME[call.dialect]
        stream = EventStream(request, self.proxy.settings.keepalive_s, self.proxy.settings.answer_timeout_s)
        response_id, created = running.response_id, running.created
        await stream.start(dialect.stream_head(call, response_id, created))
        await stream.wait(task, dialect.noop(call, response_id, created))
        try:
            answer = task.result()
        except (CallRefused, asyncio.CancelledError) as error:
            await stream.abort(dialect.stream_error(str(error) or "this session is closed"))
            return stream.response
        await stream.send(dialect.stream_body(answer, call, response_id, created))
        # A client that closes from here on (some do at the terminal event) has its answer.
        session.deliver(running)
        await stream.end()
        return stream.response

    async def _not_delivered(self, session: Session, running: RunningCall, task: asyncio.Task[Reply]) -> None:
        """The agent has no answer: stop the engine's work where the client left, and do not train what it did not get."""
        try:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=5.0)
        finally:
            if task.done() and not task.cancelled():
                task.exception()  # A refusal has been answered or has no one left to read it.
            if running.node_id is not None:
                session.amend(running.node_id, Reason.ABANDONED)

    async def _body(self, request: web.Request, session: Session, running: RunningCall | None = None) -> dict[str, Any]:
        """The request's JSON object. Raises `BadRequest`, and `CallRefused` where the session may not hold it."""
        settings = self.proxy.settings
        room = limits.body_room(session, settings.body_limit)
        try:
            body, raw = await bodies.read_object(request, room, settings.body_timeout_s)
        except bodies.BodyRefused as error:
            if error.status == 413 and room < settings.body_limit:
                assert session.spec.limits.max_bytes is not None
                raise limits.full(session.spec.limits.max_bytes) from error
            raise
        if running is not None:
            running.body_bytes = len(raw)
        return body

    def _session(self, request: web.Request) -> Session | None:
        session = self.proxy.session_of(agent_key(request))
        return session if session is None or self.only in (None, session.id) else None


async def _parsed(dialect: ModuleType, session: Session, body: dict[str, Any], request: web.Request, size: int = 0) -> AgentCall:
    """The call with its role. Raises `BadRequest`, also where the dialect stumbles over a body in a way that it does not know."""
    try:
        whole = recall.expanded(body, session.graph) if dialect is dialects.responses else body
        read: AgentCall = await bigjson.off_loop(size, dialect.parse, whole, request.headers)
        call = volatile.without(read, session.spec.template.keep_volatile)
        schemas.check_references(call)
        rule = session.spec.roles.find(call, request.headers)
    except BadRequest:
        raise
    except Exception as error:
        log.exception("session %s: a %s body that its parser stumbles over", session.id, dialect.NAME)
        raise BadRequest(f"the body cannot be read ({type(error).__name__})") from error
    return call if rule is None else replace(call, role=(rule.role, rule.name))


def _refused(error: BadRequest) -> CallRefused:
    status = error.status if isinstance(error, bodies.BodyRefused) else 400
    return CallRefused(status, None, str(error), Reason.REFUSED)


def _error(request: web.Request, refused: CallRefused) -> web.Response:
    headers = {} if refused.retry_after_s is None else {"Retry-After": str(refused.retry_after_s)}
    body = dialects.of_path(request.path).error(str(refused), refused.status, refused.code)
    return web.json_response(body, status=refused.status, headers=headers)


def _not_found(request: web.Request) -> web.Response:
    """The only answer that made every measured client stop at once."""
    body = dialects.of_path(request.path).error("this session is closed or its key is unknown", 404, "model_not_found")
    return web.json_response(body, status=404)


@web.middleware
async def json_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """aiohttp's own errors (no such route, body too large), and a store that cannot be written, in the shape that agents read."""
    dialect = dialects.of_path(request.path)
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except web.HTTPException as error:
        return web.json_response(dialect.error(error.reason, error.status, None), status=error.status)
    except StoreError as error:
        return web.json_response(dialect.error(str(error), 503, None), status=503)
