"""What counts as a lost session, on stand-ins for OpenEnv's client class: one that connects again in silence (up to 0.11), one that says
`SessionLostError` (from 0.12 on), and one that does neither."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest
from environments.bench import Bench, call

from harness_rl.errors import Cause, UserError
from harness_rl.sessions import openenv
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.environment_factory import EnvironmentSessionFactory


class SessionLostError(ConnectionError):
    """As OpenEnv has it from 0.12 on."""


def older_client() -> type:
    class EnvClient:
        """Connects when it has to."""

        def __init__(self, base_url: str) -> None:
            self.base_url = base_url
            self._ws: object | None = None
            self.sent: list[str] = []

        async def _connect_async(self) -> EnvClient:
            if self._ws is None:
                self._ws = object()
            return self

        async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
            await self._connect_async()
            self.sent.append(message["type"])
            if message.get("error") is not None:
                raise message["error"]
            return {}

        async def _close_async(self) -> None:
            self._ws = None

        async def close(self) -> None:
            await self._close_async()

        async def say(self, kind: str, error: Exception | None = None) -> None:
            await self._send_and_receive({"type": kind, "error": error})

        def drop(self) -> None:
            self._ws = None

    return EnvClient


def later_client() -> type:
    class EnvClient(older_client()):  # type: ignore[misc]
        """Says that its session is gone, once it had one."""

        async def _connect_async(self) -> Any:
            if self._ws is None and self.sent:
                raise SessionLostError("the session is gone; call reset()")
            return await super()._connect_async()

    return EnvClient


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(openenv.CLIENT_MODULE)
    monkeypatch.setitem(sys.modules, openenv.CLIENT_MODULE, made)
    return made


@pytest.fixture(params=["older", "later"])
def client_class(request, module: ModuleType) -> type:
    module.EnvClient = older_client() if request.param == "older" else later_client()
    if request.param == "later":
        module.SessionLostError = SessionLostError
    return module.EnvClient


def game(client_class: type, tool: Any, reset: Any = None) -> type:
    class Game:
        def __init__(self) -> None:
            self.client: Any = None

        async def reset(self, **columns: Any) -> None:
            if reset is not None:
                await reset(self)
                return
            self.client = client_class("http://games")
            await self.client.say("reset")

        async def move(self) -> str:
            """Move."""
            await tool(self)
            return "moved"

        def get_reward(self) -> float:
            return 1.0

    return Game


async def played(bench: Bench, kind: type) -> Cause | float | None:
    """The cause of the failure, or the reward."""
    bench.engine.say(call("move"))
    try:
        return (await bench.play(bench.factory(kind))).verify().env_reward
    except RolloutFailure as failure:
        return failure.cause


async def test_a_game_on_one_session_is_scored(bench: Bench, client_class: type):
    async def tool(env: Any) -> None:
        await env.client.say("step")

    assert await played(bench, game(client_class, tool)) == 1.0


async def test_rule_19_a_session_that_is_lost_is_never_scored(bench: Bench, client_class: type):
    async def tool(env: Any) -> None:
        env.client.drop()
        await env.client.say("step")

    assert await played(bench, game(client_class, tool)) is Cause.ENVIRONMENT_LOST


async def test_rule_19_also_where_the_environment_hides_it(bench: Bench, client_class: type):
    async def same_client(env: Any) -> None:
        env.client.drop()
        try:
            await env.client.say("step")
        except Exception:  # noqa: BLE001
            return

    async def another_client(env: Any) -> None:
        env.client = client_class("http://games")
        try:
            await env.client.say("step")
        except Exception:  # noqa: BLE001
            return

    async def another_game(env: Any) -> None:
        env.client = client_class("http://games")
        try:
            await env.client.say("reset")
        except Exception:  # noqa: BLE001
            return

    for tool in (same_client, another_client, another_game):
        assert await played(bench, game(client_class, tool)) is Cause.ENVIRONMENT_LOST, tool.__name__


async def test_rule_19_a_broken_connection_is_a_lost_session_and_a_servers_error_is_not(bench: Bench, client_class: type):
    class ConnectionClosedError(Exception): ...

    ConnectionClosed = type("ConnectionClosed", (Exception,), {})
    for error, wanted in (
        (ConnectionResetError("reset by peer"), Cause.ENVIRONMENT_LOST),
        (TimeoutError(), Cause.ENVIRONMENT_LOST),
        (type("ConnectionClosedOK", (ConnectionClosed,), {})("1001"), Cause.ENVIRONMENT_LOST),
        (RuntimeError("Server error: full (code: CAPACITY_REACHED)"), Cause.ENVIRONMENT),
        (RuntimeError("Server error: no factory (code: FACTORY_ERROR)"), Cause.ENVIRONMENT),
        (RuntimeError("Server error: not a word (code: EXECUTION_ERROR)"), 1.0),
        (ValueError("not a word"), 1.0),
    ):

        async def tool(env: Any, error: Exception = error) -> None:
            await env.client.say("step", error)

        assert await played(bench, game(client_class, tool)) == wanted, error


async def test_rule_19_in_reset_a_session_may_be_tried_again_as_long_as_the_game_is_begun_on_it(bench: Bench, module: ModuleType):
    module.EnvClient = client_class = older_client()

    async def again(env: Any) -> None:
        env.client = client_class("http://games")
        for _ in range(2):
            env.client.drop()
            await env.client.say("reset")

    async def played_on(env: Any) -> None:
        env.client = client_class("http://games")
        await env.client.say("reset")
        env.client.drop()
        await env.client.say("step")

    async def tool(env: Any) -> None:
        await env.client.say("step")

    assert await played(bench, game(client_class, tool, again)) == 1.0
    assert await played(bench, game(client_class, tool, played_on)) is Cause.ENVIRONMENT_LOST


async def test_environments_that_share_a_server_need_room_for_all_their_instances(module: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """An idle instance of one kind keeps its session while the other kind's games run."""
    module.EnvClient = client_class = older_client()
    asked: list[tuple[str, int, int]] = []

    async def check_room(url: str, sessions: int, kinds: int) -> None:
        asked.append((url, sessions, kinds))

    async def elsewhere(env: Any) -> None:
        env.client = client_class("http://others")
        await env.client.say("reset")

    async def tool(env: Any) -> None: ...

    monkeypatch.setattr("harness_rl.sessions.environment_factory.check_room", check_room)
    kinds = {"easy": game(client_class, tool), "hard": game(client_class, tool), "other": game(client_class, tool, elsewhere)}
    factory = EnvironmentSessionFactory(kinds, rows=[{"prompt": "Play.", "environment": name} for name in kinds])
    await factory.check_servers(8)
    assert asked == [("http://games", 16, 2), ("http://others", 8, 1)]


async def test_two_sessions_that_reset_has_opened_are_two_players(bench: Bench, module: ModuleType):
    module.EnvClient = client_class = older_client()

    async def reset(env: Any) -> None:
        env.client, env.other = client_class("http://games"), client_class("http://games")
        await env.client.say("reset")
        await env.other.say("reset")

    async def tool(env: Any) -> None:
        await env.client.say("step")
        await env.other.say("step")
        env.third = client_class("http://elsewhere")  # a server that it has not talked to before
        await env.third.say("step")

    assert await played(bench, game(client_class, tool, reset)) == 1.0


async def test_rule_14_a_client_that_an_earlier_game_left_open_is_closed_before_the_next_connects(bench: Bench, module: ModuleType):
    module.EnvClient = client_class = older_client()
    made: list[Any] = []

    async def reset(env: Any) -> None:
        assert all(client._ws is not None for client in made[-1:])
        env.client = client_class("http://games")
        await env.client.say("reset")
        assert all(client._ws is None for client in made)
        made.append(env.client)

    async def tool(env: Any) -> None:
        await env.client.say("step")

    factory = bench.factory(game(client_class, tool, reset))
    for _ in range(3):
        assert (await bench.play(factory)).verify().env_reward == 1.0
    assert [client._ws is None for client in made] == [True, True, False]
    await factory.close()
    assert made[-1]._ws is None


async def test_an_environment_that_was_given_up_gives_its_session_back_and_takes_no_other(bench: Bench, module: ModuleType):
    module.EnvClient = client_class = older_client()
    late: list[Any] = []
    given_up = asyncio.Event()

    async def tool(env: Any) -> None:
        async def come_back() -> None:
            await asyncio.sleep(0.1)
            try:
                await env.client.say("step")
            except RolloutFailure as failure:
                late.append(failure.cause)

        late.append(asyncio.create_task(come_back()))
        env.client.drop()
        await env.client.say("step")

    factory = bench.factory(game(client_class, tool))
    bench.engine.say(call("move"))
    session = await bench.session(factory)
    with pytest.raises(RolloutFailure):
        await session.run()
    client = session.instance.environment.client
    await session.close()
    assert client._ws is None
    given_up.set()
    await late[0]
    assert (late[1], client._ws) == (Cause.ENVIRONMENT_LOST, None)
    assert len(factory.kinds[""]._idle) == 0


def test_a_client_that_can_neither_be_watched_nor_tells_is_refused(module: ModuleType):
    class EnvClient:
        def __init__(self) -> None: ...

    class Game:
        def reset(self, **columns: Any) -> None: ...

        def get_reward(self) -> float:
            return 0.0

    module.EnvClient = EnvClient
    with pytest.raises(UserError, match=r"has no _connect_async and no SessionLostError: lost sessions cannot be told; use openenv 0\.7"):
        EnvironmentSessionFactory(Game, rows=[{"prompt": "Play."}])
    module.SessionLostError = SessionLostError
    EnvironmentSessionFactory(Game, rows=[{"prompt": "Play."}])
