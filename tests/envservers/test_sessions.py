"""Rules 18 and 19, over real WebSockets: one session for each instance, reopened in `reset`, and a lost one is never scored."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from environments.bench import PLAY, Bench, call
from envservers.apps import LedgerAction, LedgerClient

from harness_rl import GRPOConfig, GRPOTrainer
from harness_rl.errors import Cause, UserError
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.openenv_servers import openenv_server

EARN = call("earn", amount=1)
ROUNDS = 3


class Ledger:
    """As the seed tells it: a new client in each `reset`, the old one closed before. Its reward is what the server says it has earned."""

    url = ""
    pause_s = 0.0

    def __init__(self) -> None:
        self.client: Any = None
        self.earned = 0

    def reset(self, **columns: Any) -> str:
        if self.client is not None:
            with contextlib.suppress(Exception):
                self.client.close()
        self.client = LedgerClient(base_url=type(self).url)
        self.client.reset()
        self.earned = 0
        return "You have 0."

    def earn(self, amount: int) -> str:
        """Earn.

        Args:
            amount: How much.
        """
        time.sleep(type(self).pause_s)
        self.earned = self.client.step(LedgerAction(amount=amount)).observation.total
        return f"You have {self.earned}."

    def get_reward(self) -> float:
        return float(self.earned)


class Stubborn(Ledger):
    """It makes a new client when the old one fails, and plays on."""

    def earn(self, amount: int) -> str:
        """Earn.

        Args:
            amount: How much.
        """
        try:
            return super().earn(amount)
        except Exception:  # noqa: BLE001 - what the test is about
            self.client = LedgerClient(base_url=type(self).url)
            return super().earn(amount)


class Kept(Ledger):
    """One client for all games, made before the first."""

    def reset(self, **columns: Any) -> str:
        if self.client is None:
            self.client = LedgerClient(base_url=type(self).url)
        self.client.reset()
        self.earned = 0
        return "You have 0."


class Lazy(Ledger):
    """It connects when it is first called, in the middle of the game."""

    def reset(self, **columns: Any) -> str:
        self.client, self.earned = LedgerClient(base_url=type(self).url), 0
        return "You have 0."


class Loop(Ledger):
    """The same in asynchronous code, on the trainer's own loop."""

    async def reset(self, **columns: Any) -> str:  # type: ignore[override]
        if self.client is not None:
            await self.client.close()
        self.client = LedgerClient(base_url=type(self).url)
        await self.client.reset()
        self.earned = 0
        return "You have 0."

    async def earn(self, amount: int) -> str:  # type: ignore[override]
        """Earn.

        Args:
            amount: How much.
        """
        await asyncio.sleep(type(self).pause_s)
        self.earned = (await self.client.step(LedgerAction(amount=amount))).observation.total
        return f"You have {self.earned}."


@pytest.fixture(autouse=True)
def at_once() -> None:
    for kind in (Ledger, Stubborn, Kept, Lazy, Loop):
        kind.pause_s = 0.0


def playing(bench: Bench) -> None:
    """The policy earns 1 in each of three rounds, and stops."""
    bench.engine.asides = {f"You have {ROUNDS}.": "done"} | {f"You have {earned}.": EARN for earned in reversed(range(ROUNDS))}


async def ended(bench: Bench, factory: Any, count: int, within_s: float = 30) -> tuple[list[float], list[RolloutFailure]]:
    """The rewards of the episodes that have one, and the failures of the others."""
    ends = await asyncio.gather(*(bench.play(factory, within_s=within_s) for _ in range(count)), return_exceptions=True)
    failures = [end for end in ends if isinstance(end, BaseException)]
    assert all(isinstance(failure, RolloutFailure) for failure in failures), failures
    return [end.verify().env_reward for end in ends if not isinstance(end, BaseException)], failures  # type: ignore[misc]


def recorded(bench: Bench) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((bench.folder / "rollouts").glob("*/outcome.json"))]


@pytest.mark.parametrize("kind", [Ledger, Kept, Lazy, Loop])
async def test_rule_18_each_instance_has_a_session_of_its_own_and_gives_it_back(bench: Bench, server: str, kind):
    kind.url = server
    playing(bench)
    factory = bench.factory(kind)
    for _ in range(2):
        rewards, failures = await ended(bench, factory, 4)
        assert (rewards, failures) == ([float(ROUNDS)] * 4, [])
    open_clients = [client for instance in factory.kinds[""]._idle for client, _ in instance.watch._open.values()]
    assert len(factory.kinds[""]._idle) == 4 and 4 <= len(open_clients) <= 8
    await factory.close()
    assert all(client._ws is None for client in open_clients)


@pytest.mark.parametrize("kind", [Ledger, Stubborn, Kept, Loop])
async def test_rule_19_a_websocket_that_is_closed_again_and_again_costs_its_games_and_no_wrong_row(bench: Bench, closing, kind):
    kind.url, seconds = closing
    playing(bench)
    factory = bench.factory(kind)
    rewards: list[float] = []
    failures: list[RolloutFailure] = []
    for share in (0.0, 0.4):  # of the interval, that each of the three rounds takes
        kind.pause_s = share * seconds
        found, lost = await ended(bench, factory, 3, within_s=30 + 2 * seconds)
        rewards, failures = rewards + found, failures + lost
    await factory.close()
    assert len(failures) >= 3 and set(rewards) == {float(ROUNDS)}
    assert {failure.cause for failure in failures} == {Cause.ENVIRONMENT_LOST}
    assert all(record["env_reward"] in (None, float(ROUNDS)) for record in recorded(bench))


async def test_rule_19_a_connection_that_ended_between_two_games_is_opened_again_in_reset(bench: Bench, closing):
    Kept.url, seconds = closing
    Kept.pause_s = 0.0
    playing(bench)
    factory = bench.factory(Kept)
    for _ in range(2):
        assert await ended(bench, factory, 1) == ([float(ROUNDS)], [])
        await asyncio.sleep(1.2 * seconds)
    assert factory.kinds[""].made == 1


async def test_a_server_that_is_killed_in_the_middle_of_games(bench: Bench, server: str):
    kinds, each = (Ledger, Stubborn, Loop), 3
    playing(bench)
    with openenv_server(app="envservers.apps:alone") as url:
        for kind in kinds:
            kind.url, kind.pause_s = url, 0.5
        pid = int((await asyncio.to_thread(httpx.get, f"{url}/pid")).text)
        factories = [bench.factory(kind) for kind in kinds]
        running = asyncio.gather(*(ended(bench, factory, each) for factory in factories))
        while len(bench.engine.bodies("/generate")) < 2 * each * len(kinds):  # every game is in its second round
            await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        for rewards, failures in await running:
            assert rewards == []
            assert [failure.cause for failure in failures] == [Cause.ENVIRONMENT_LOST] * each
        _, failures = await ended(bench, factories[0], 1)  # while there is no server, no game begins
        assert [failure.cause for failure in failures] == [Cause.ENVIRONMENT]
    for kind, factory in zip(kinds, factories, strict=True):  # it is started again
        kind.url, kind.pause_s = server, 0.0
        assert await ended(bench, factory, each) == ([float(ROUNDS)] * each, [])
        await factory.close()
    assert [record["env_reward"] for record in recorded(bench)].count(None) == each * len(kinds) + 1


@pytest.fixture
def small(server: str) -> str:
    """A server with one session, as OpenEnv's are if nobody says otherwise."""
    return f"{server}/small"


@pytest.mark.parametrize("kind", [Ledger, Lazy, Stubborn])
async def test_a_server_with_one_session_scores_one_game_at_a_time_and_says_what_to_change(bench: Bench, small: str, kind):
    kind.url, kind.pause_s = small, 0.2
    playing(bench)
    factory = bench.factory(kind)
    rewards, failures = await ended(bench, factory, 3)
    await factory.close()
    assert rewards == [float(ROUNDS)]
    assert {failure.cause for failure in failures} == {Cause.ENVIRONMENT}
    assert all(
        "Server at capacity: 1/1" in str(failure) and "max_concurrent_envs=N in create_app()" in str(failure) for failure in failures
    )
    kind.pause_s = 0.0
    factory = bench.factory(kind)
    assert [await ended(bench, factory, 1) for _ in range(2)] == [([float(ROUNDS)], [])] * 2
    await factory.close()


@pytest.mark.parametrize("kind", [Ledger, Kept, Lazy])
def test_rule_18_a_server_that_is_too_small_is_refused_before_anything_starts(small: str, tmp_path: Path, kind):
    kind.url, kind.pause_s = small, 0.0
    started = []

    async def run() -> Any:
        started.append(True)

    args = GRPOConfig(output_dir=tmp_path, max_steps=1, num_generations=4, per_device_train_batch_size=8)
    trainer = GRPOTrainer("m", args=args, train_dataset=[{"prompt": PLAY}], environment_factory=kind)
    wanted = (
        r"takes 1 sessions at once, and 8 episodes are to run at once \(Server at capacity.*max_concurrent_envs=8 or more.*_rollouts': 1}"
    )
    with pytest.raises(UserError, match=wanted):
        asyncio.run(trainer._with_servers(run()))
    assert started == []
    trainer.config.rollout.max_concurrent_rollouts = 1
    asyncio.run(trainer._with_servers(run()))
    assert started == [True]


def test_rule_18_a_server_that_is_not_there_is_named_before_anything_starts(tmp_path: Path):
    Ledger.url = "http://127.0.0.1:9"
    args = GRPOConfig(output_dir=tmp_path, max_steps=1, num_generations=4, per_device_train_batch_size=8)
    trainer = GRPOTrainer("m", args=args, train_dataset=[{"prompt": PLAY}], environment_factory=Ledger)

    async def run() -> Any:
        raise AssertionError

    with pytest.raises(
        UserError, match=r"Ledger\.reset failed before the run: ConnectionError: Failed to connect to ws://127\.0\.0\.1:9/ws"
    ):
        asyncio.run(trainer._with_servers(run()))


async def test_a_servers_own_error_is_the_policys_to_see(bench: Bench, server: str):
    Ledger.url, Ledger.pause_s = server, 0.0
    bench.engine.say(call("earn", amount=-1))
    bench.engine.say(call("earn", amount=2))
    session = await bench.play(bench.factory(Ledger))
    assert (session.outcome().tool_failure_count, session.verify().env_reward) == (1, 2.0)
    assert "only what is earned" in bench.prompts()[1]
