"""OpenEnv clients inside an episode: a game is played on one server session, and one whose session was lost has no score.

Invariant: between an environment's `reset` and its reward, a client talks on the connection on which that game began. OpenEnv up to 0.11
connects again without a word, and the next `step` plays a game that nobody has reset; later releases raise `SessionLostError`, which a
script may swallow. So the client class itself is watched: a second connection in one episode, a broken one, or a server that has no session
to give ends the rollout with a named cause, also where the environment's code catches the exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any

from harness_rl.errors import Cause, UserError
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.ownthread import OwnThread

logger = logging.getLogger(__name__)

CLIENT_MODULE = "openenv.core.env_client"
CLOSE_S = 30.0
"""How long one client may take to close: a close handshake, or `docker stop`."""
_WATCHED = "_watched_by_harness_rl"
_REFUSAL = re.compile(r"\(code: (CAPACITY_REACHED|FACTORY_ERROR|SESSION_ERROR)\)")
_BROKEN = ("ConnectionError", "ConnectionClosed", "TimeoutError", "OSError", "SessionLostError")
"""Of a client's exceptions, by class name (the server's own errors are RuntimeErrors): the session is gone."""
_current: ContextVar[SessionWatch | None] = ContextVar("session_watch", default=None)
_installing = threading.Lock()

Method = Callable[..., Coroutine[Any, Any, Any]]


class SessionWatch:
    """The OpenEnv sessions of one environment instance, over its episodes."""

    def __init__(self) -> None:
        self.failure: RolloutFailure | None = None
        """Why this episode cannot be scored."""
        self._playing = False
        self._used: dict[int, Any] = {}
        """Client by id: those that talked to their server in this episode."""
        self._anew: set[int] = set()
        """Ids of used clients that have connected again and not reset the game since."""
        self._open: dict[int, tuple[Any, asyncio.AbstractEventLoop]] = {}
        """Clients that were not closed, and the loop that they live on."""
        self._older: set[int] = set()
        """Ids of those among them that no game has used since the last `begin`."""
        self.made_for: set[str] = set()
        """Servers that the environment has made clients for, whether these have talked to them or not."""
        self._given_up = False

    def begin(self) -> None:
        """Another episode: its `reset` may connect as it likes."""
        self.failure, self._playing = None, False
        self._used, self._anew = {}, set()
        self._older = set(self._open)

    def play(self) -> None:
        """`reset` has returned."""
        self._playing = True

    @property
    def urls(self) -> set[str]:
        """Of the servers that this episode talked to."""
        return {_url(client) for client in self._used.values()}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """What runs in this block, also in threads and tasks that it starts, belongs to this watch. Raises UserError."""
        watch_clients()
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def check(self) -> None:
        """Raises the episode's RolloutFailure, if it has one: whatever the environment's code made of it."""
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        """Close what is open, for good, so that the servers' places are free again. Bounded; never raises for a server that is gone."""
        self._given_up = True
        await self._close(list(self._open))

    async def _close(self, ids: list[int]) -> None:
        for client, loop in [self._open.pop(key) for key in ids if key in self._open]:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await _close(client, loop)
            except Exception as error:  # noqa: BLE001 - the client is given up; what it says about that is for the log
                logger.info("closing %s: %s: %s", _url(client), type(error).__name__, error)

    # -- what the watched client class reports --------------------------------------------------------------------------------------------

    def made(self, client: Any) -> None:
        if client.base_url is not None:  # else it starts a server of its own
            self.made_for.add(client.base_url)

    async def connecting(self, client: Any) -> None:
        """It may be about to connect: a new client takes the place of those that earlier games left open. Raises RolloutFailure."""
        if self._given_up:
            self._fail(Cause.ENVIRONMENT_LOST, f"the environment was given up, and its client may not connect to {_url(client)} again")
        if id(client) not in self._open:
            await self._close([key for key in self._older if key in self._open and _url(self._open[key][0]) == _url(client)])

    def connected(self, client: Any) -> None:
        """It has a new connection. Raises RolloutFailure."""
        self._open[id(client)] = (client, asyncio.get_running_loop())
        url = _url(client)
        if self._playing and url in self.urls:
            self._fail(
                Cause.ENVIRONMENT_LOST,
                f"a second connection to {url} within one episode: the session of its game was lost, and the new one has not begun it "
                "(if it was meant, open every client in reset())",
            )
        if id(client) in self._used:
            self._anew.add(id(client))

    def answered(self, client: Any, kind: str) -> None:
        """The server answered a message of this kind. Raises RolloutFailure."""
        if kind == "reset":
            self._anew.discard(id(client))
        elif id(client) in self._anew:
            self._fail(Cause.ENVIRONMENT_LOST, f"the session at {_url(client)} was lost, and a new one was played on without a reset")
        self._used[id(client)] = client
        self._older.discard(id(client))
        self._open.setdefault(id(client), (client, asyncio.get_running_loop()))

    def raised(self, client: Any, error: Exception) -> None:
        """A message was not answered. Raises RolloutFailure, or nothing where it is the environment's own affair."""
        words = " ".join(str(error).split())[:300]
        refusal = _REFUSAL.search(words)
        if refusal is not None:
            remedy = f"; {REMEDY}" if refusal[1] == "CAPACITY_REACHED" else ""
            self._fail(Cause.ENVIRONMENT, f"{_url(client)} gave no session: {words}{remedy}", error, keep=self._playing)
        elif self._playing and {kind.__name__ for kind in type(error).__mro__} & set(_BROKEN):
            self._fail(Cause.ENVIRONMENT_LOST, f"the session at {_url(client)} broke: {type(error).__name__}: {words}", error)

    def closed(self, client: Any) -> None:
        self._open.pop(id(client), None)

    def _fail(self, cause: Cause, words: str, error: Exception | None = None, *, keep: bool = True) -> None:
        """Raise, and with `keep` remember it: an episode's first failure is its failure."""
        failure = RolloutFailure(cause, words)
        if keep:
            self.failure = failure = self.failure or failure
        raise failure from error


REMEDY = (
    "start the server with more sessions: SUPPORTS_CONCURRENT_SESSIONS = True in its environment, max_concurrent_envs=N in create_app() "
    "(MAX_CONCURRENT_ENVS=N for a duplicated Space or an image), N a little above rollout.max_concurrent_rollouts"
)
"""For a server that is full."""


def watch_clients() -> None:
    """Have OpenEnv's client class report to the watch of the episode that calls it, where a script has imported it; once.

    Raises UserError for a release whose clients neither say that a session was lost nor can be watched.
    """
    module = sys.modules.get(CLIENT_MODULE)
    kind = getattr(module, "EnvClient", None)
    if kind is None or _WATCHED in vars(kind):
        return
    with _installing:
        if _WATCHED in vars(kind):
            return
        methods: dict[str, Callable[[Any], Any]] = {
            "__init__": _making,
            "_connect_async": _connecting,
            "_send_and_receive": _sending,
            "_close_async": _closing,
        }
        missing = [name for name in methods if not callable(getattr(kind, name, None))]
        if missing and not hasattr(module, "SessionLostError"):
            raise UserError(
                f"OpenEnv's client has no {missing[0]} and no SessionLostError: lost sessions cannot be told; use openenv 0.7 to 0.10"
            )
        for name, wrap in methods.items():
            if name not in missing:
                setattr(kind, name, wrap(getattr(kind, name)))
        setattr(kind, _WATCHED, True)


def _making(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def make(client: Any, *args: Any, **kwargs: Any) -> None:
        original(client, *args, **kwargs)
        watch = _current.get()
        if watch is not None:
            watch.made(client)

    return make


def _connecting(original: Method) -> Method:
    @functools.wraps(original)
    async def connect(client: Any) -> Any:
        watch = _current.get()
        if watch is None:
            return await original(client)
        await watch.connecting(client)
        before = client._ws
        result = await original(client)
        if client._ws is not before:
            watch.connected(client)
        return result

    return connect


def _sending(original: Method) -> Method:
    @functools.wraps(original)
    async def send(client: Any, message: dict[str, Any]) -> Any:
        watch = _current.get()
        if watch is None:
            return await original(client, message)
        try:
            answer = await original(client, message)
        except RolloutFailure:
            raise
        except Exception as error:
            watch.raised(client, error)
            raise
        watch.answered(client, str(message.get("type")))
        return answer

    return send


def _closing(original: Method) -> Method:
    @functools.wraps(original)
    async def close(client: Any) -> Any:
        watch = _current.get()
        if watch is not None:
            watch.closed(client)
        return await original(client)

    return close


async def _close(client: Any, loop: asyncio.AbstractEventLoop) -> None:
    if loop is asyncio.get_running_loop():
        await client.close()
    elif not loop.is_closed():  # it lives on the loop of a thread of its own
        thread = OwnThread("closing an OpenEnv client")
        try:
            await thread.call(lambda: client.sync().close())
        finally:
            thread.close()


def _url(client: Any) -> str:
    return str(getattr(client, "base_url", None) or type(client).__name__)
