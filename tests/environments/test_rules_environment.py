"""The environment's part of the contract that TRL's users know (rules 1 to 7), through the real loop and the real capture proxy."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from typing import Any, ClassVar

import pytest
from environments.bench import PLAY, Bench, call

from harness_rl.errors import Cause, UserError
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.environment_factory import EnvironmentSessionFactory


class Counter:
    """Counts; its reward is how far it came."""

    made = 0
    running: set[int]

    def __init__(self) -> None:
        type(self).made += 1
        self.resets: list[dict[str, Any]] = []
        self.count = 0

    def reset(self, **columns: Any) -> str | None:
        self.resets.append(columns)
        self.count = 0
        return None

    def add(self, n: int) -> str:
        """Add to the counter.

        Args:
            n: How much.
        """
        self.count += n
        return f"the counter is {self.count}"

    async def wait(self) -> str:
        """Wait a moment."""
        await asyncio.sleep(0)
        return "waited"

    def get_reward(self) -> float:
        return float(self.count)

    def _hidden(self) -> None: ...

    @property
    def expensive(self) -> int:
        raise AssertionError("nobody may read a property to look for tools")

    @classmethod
    def build(cls) -> Counter:
        return cls()


@pytest.fixture(autouse=True)
def nothing_made() -> None:
    Counter.made = 0


@pytest.mark.parametrize("factory", [Counter, lambda: Counter(), functools.partial(Counter), Counter.build])
async def test_rule_1_a_class_or_a_callable_without_arguments_makes_the_environment(bench: Bench, factory):
    bench.engine.say(call("add", n=2))
    session = await bench.play(bench.factory(factory))
    assert session.verify().env_reward == 2.0


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda size: Counter(), r"environment_factory: it cannot be made without arguments: TypeError: .*size"),
        (Counter(), "is not callable; give the class itself"),
        ({}, "the mapping is empty"),
        ({"a": 3}, r"environment 'a': 3 is not callable"),
    ],
)
def test_rule_1_anything_else_is_refused_before_anything_starts(factory, words):
    with pytest.raises(UserError, match=words):
        EnvironmentSessionFactory(factory, rows=[{"prompt": PLAY}])


async def test_rule_2_reset_gets_every_column(bench: Bench):
    class Watched(Counter):
        seen: ClassVar[list[dict[str, Any]]] = []

        def reset(self, **columns: Any) -> None:
            self.seen.append(columns)

    row = {"prompt": PLAY, "level": 3, "answer": "blue"}
    await bench.play(bench.factory(Watched, rows=[row]))
    assert Watched.seen == [row]


@pytest.mark.parametrize(
    ("prompt", "observation", "shown"),
    [
        (PLAY, None, "Play."),
        (PLAY, " The board is empty.", "Play. The board is empty."),
        (PLAY, [{"type": "text", "text": "A board."}], "Play.\nA board."),
        ([{"role": "user", "content": [{"type": "text", "text": "Play."}]}], "Go.", "Play.\nGo."),
        (None, "Guess a word.", "Guess a word."),
        ("Play.", " Now.", "Play. Now."),
    ],
)
async def test_rule_2_what_reset_returns_is_appended_to_the_last_message(bench: Bench, prompt, observation, shown):
    class Shows(Counter):
        def reset(self, **columns: Any) -> Any:
            return observation

    row = {"prompt": prompt} if prompt is not None else {"level": 1}
    given = [{**message} for message in prompt] if isinstance(prompt, list) else prompt
    await bench.play(bench.factory(Shows, rows=[row]))
    assert f"<|im_start|>user\n{shown}<|im_end|>" in bench.prompts()[0]
    assert row.get("prompt") == given  # the data set is left as it is


@pytest.mark.parametrize("observation", [7, {"board": "empty"}, object()])
async def test_rule_2_anything_else_from_reset_is_a_named_failure(bench: Bench, observation):
    class Shows(Counter):
        def reset(self, **columns: Any) -> Any:
            return observation

    with pytest.raises(RolloutFailure, match=r"Shows\.reset returned a .*; return None, a text or a list") as caught:
        await bench.play(bench.factory(Shows))
    assert caught.value.cause is Cause.ENVIRONMENT


async def test_rule_2_a_block_that_a_text_model_cannot_be_shown_is_named(bench: Bench):
    class Shows(Counter):
        def reset(self, **columns: Any) -> Any:
            return [{"type": "image", "image": "a cat"}]

    with pytest.raises(RolloutFailure, match="a part of type 'image' is not served here") as caught:
        await bench.play(bench.factory(Shows))
    assert caught.value.cause is Cause.ENVIRONMENT


def test_rule_2_reset_is_mandatory_and_must_take_the_columns():
    class NoReset:
        def get_reward(self) -> float:
            return 0.0

    class Strict(Counter):
        def reset(self, prompt: Any, level: int) -> None: ...

    with pytest.raises(UserError, match=r"NoReset has no method reset; define reset\(self, \*\*kwargs\)"):
        EnvironmentSessionFactory(NoReset, rows=[{"prompt": PLAY}])
    EnvironmentSessionFactory(Strict, rows=[{"prompt": PLAY, "level": 1}])
    with pytest.raises(UserError, match=r"train_dataset row 1: Strict\.reset: .*'answer'; it gets every column by name"):
        EnvironmentSessionFactory(Strict, rows=[{"prompt": PLAY, "level": 1}, {"prompt": PLAY, "level": 1, "answer": 2}])


async def test_rule_3_public_methods_are_tools_and_nothing_else_is(bench: Bench):
    class Child(Counter):
        def own(self) -> str:
            """Its own."""
            return "own"

    await bench.play(bench.factory(Child))
    assert bench.offered()[0] == ["add", "own", "wait"]


def test_rule_3_a_method_that_cannot_be_shown_is_named_with_the_fix():
    class Silent(Counter):
        def peek(self) -> str:
            return ""

    with pytest.raises(UserError, match=r"tool Silent\.peek has no docstring; .*or start its name with '_' to hide it"):
        EnvironmentSessionFactory(Silent, rows=[{"prompt": PLAY}])


async def test_rule_4_tools_may_be_sync_or_async_and_their_results_are_text(bench: Bench):
    bench.engine.say(call("add", n=2))
    bench.engine.say(call("wait"))
    session = await bench.play(bench.factory(Counter))
    results = [message for message in session.outcome().completion if message["role"] == "tool"]
    assert [(message["name"], message["content"]) for message in results] == [("add", "the counter is 2"), ("wait", "waited")]
    assert session.outcome().tool_calls_by_name == {"add": 1, "wait": 1}


async def test_rule_4_a_list_of_content_blocks_is_passed_through_and_anything_else_is_text(bench: Bench):
    class Shows(Counter):
        def blocks(self) -> list:
            """Show blocks."""
            return [{"type": "text", "text": "a board"}]

        def plain(self) -> list:
            """Show a list."""
            return [1, "two"]

        def odd(self) -> str:
            """Show what no wire can carry."""
            return "half \ud800 pair"

    for name in ("blocks", "plain", "odd"):
        bench.engine.say(call(name))
    session = await bench.play(bench.factory(Shows))
    results = [message["content"] for message in session.outcome().completion if message["role"] == "tool"]
    assert results == [[{"type": "text", "text": "a board"}], "[1, 'two']", "half ? pair"]
    assert "a board" in bench.prompts()[1]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (call("fails"), "Game over."),
        (call("leaves"), "SystemExit: 3"),
        (call("stops"), "StopIteration"),
        (call("afails"), "Too late."),
        (call("aleaves"), "SystemExit: 4"),
        (call("nothing_like_it"), "Tool nothing_like_it not found."),
        (call("add"), r"missing 1 required positional argument: 'n'"),
        (call("add", n=1, m=2), "unexpected keyword argument 'm'"),
        ('<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', "the arguments are not a JSON object"),
    ],
)
async def test_rule_4_what_goes_wrong_is_a_tool_result_and_counts_as_a_failure(bench: Bench, said, error):
    class Broken(Counter):
        def fails(self) -> str:
            """Fails."""
            raise ValueError("Game over.")

        def leaves(self) -> str:
            """Leaves."""
            raise SystemExit(3)

        def stops(self) -> str:
            """Stops."""
            raise StopIteration

        async def afails(self) -> str:
            """Fails."""
            raise ValueError("Too late.")

        async def aleaves(self) -> str:
            """Leaves."""
            raise SystemExit(4)

    bench.engine.say(said)
    session = await bench.play(bench.factory(Broken))
    outcome = session.outcome()
    shown = next(message["content"] for message in outcome.completion if message["role"] == "tool")
    assert shown.startswith("{'error': ") and error in shown
    assert shown in bench.prompts()[1]
    assert (outcome.tool_call_count, outcome.tool_failure_count, session.verify().env_reward) == (1, 1, 0.0)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_rule_5_the_environment_may_own_its_reward(bench: Bench, kind):
    class Owner(Counter):
        if kind == "async":

            async def get_reward(self) -> float:  # type: ignore[override]
                await asyncio.sleep(0)
                return self.count / 2

        else:

            def get_reward(self) -> float:
                return self.count / 2

    bench.engine.say(call("add", n=3))
    session = await bench.play(bench.factory(Owner))
    assert (session.verify().env_reward, session.verify().metrics["rewards/Owner"]) == (1.5, 1.5)


async def test_rule_6_instances_are_made_once_reset_often_and_never_shared(bench: Bench):
    class Shared(Counter):
        made = 0
        busy: ClassVar[set[int]] = set()

        def reset(self, **columns: Any) -> None:
            assert id(self) not in self.busy, "two episodes have one environment"
            self.busy.add(id(self))

        def get_reward(self) -> float:
            time.sleep(0.05)
            self.busy.discard(id(self))
            return 0.0

    factory = bench.factory(Shared)
    assert Shared.made == 1  # the one that was looked at is used
    await asyncio.gather(*(bench.play(factory) for _ in range(6)))
    assert Shared.made == 6
    await asyncio.gather(*(bench.play(factory) for _ in range(4)))
    await asyncio.gather(*(bench.play(factory) for _ in range(6)))
    assert Shared.made == 6


async def test_rule_6_an_instance_that_failed_is_not_used_again(bench: Bench):
    class Fragile(Counter):
        made = 0
        broken = True

        def reset(self, **columns: Any) -> None:
            if type(self).broken:
                raise OSError("the server is full")

    factory = bench.factory(Fragile)
    with pytest.raises(RolloutFailure, match=r"Fragile\.reset raised: OSError: the server is full") as caught:
        await bench.play(factory)
    assert (caught.value.cause, caught.value.cause.retryable) == (Cause.ENVIRONMENT, True)
    Fragile.broken = False
    await bench.play(factory)
    await bench.play(factory)
    assert Fragile.made == 2


@pytest.mark.parametrize("is_async", [False, True])
async def test_rule_6_an_instance_that_is_a_context_manager_is_left_once_when_it_is_given_up(bench: Bench, is_async: bool):
    left: list[int] = []

    class Plain(Counter):
        made = 0

        def reset(self, fails: bool, **columns: Any) -> None:
            if fails:
                raise OSError("the browser crashed")

    class Sync(Plain):
        def __exit__(self, *error: object) -> None:
            assert error == (None, None, None)
            left.append(id(self))

    class Async(Plain):
        async def __aexit__(self, *error: object) -> None:
            await asyncio.sleep(0)
            left.append(id(self))

    rows = [{"prompt": PLAY, "fails": True}, {"prompt": PLAY, "fails": False}]
    factory = bench.factory(Async if is_async else Sync, rows=rows)
    with pytest.raises(RolloutFailure, match="the browser crashed"):
        await bench.play(factory, rows[0])
    assert len(left) == 1
    await bench.play(factory, rows[1])
    assert len(left) == 1
    await factory.close()
    assert len(set(left)) == 2
    assert "__exit__" not in str(bench.offered()) and "__aexit__" not in str(bench.offered())


async def test_rule_6_an_instance_that_will_not_let_go_holds_nothing_up(bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr("harness_rl.sessions.environments.LEAVE_S", 0.05)

    class Clings(Counter):
        def reset(self, **columns: Any) -> None: ...

        async def __aexit__(self, *error: object) -> None:
            await asyncio.Event().wait()

    factory = bench.factory(Clings)
    await bench.play(factory)
    await asyncio.wait_for(factory.close(), 5)
    assert "leaving Clings: TimeoutError" in caplog.text


async def test_rule_6_an_instance_that_cannot_be_made_fails_its_rollout_only(bench: Bench):
    class Rare(Counter):
        made = 0

        def __init__(self) -> None:
            super().__init__()
            if type(self).made == 2:
                raise ConnectionError("no more sessions")

        def reset(self, **columns: Any) -> None:
            time.sleep(0.2)

    factory = bench.factory(Rare)
    ended = await asyncio.gather(*(bench.play(factory) for _ in range(3)), return_exceptions=True)
    failed = [end for end in ended if isinstance(end, BaseException)]
    assert [str(failure) for failure in failed] == ["environment: Rare could not be made: ConnectionError: no more sessions"]


async def test_rule_7_state_on_the_instance_is_read_before_the_next_reset(bench: Bench):
    class Stateful(Counter):
        def reset(self, **columns: Any) -> None:
            self.level = columns["level"]

        def get_reward(self) -> None:  # type: ignore[override]
            return None

    async def slow(environments: list[Stateful], level: list[int], **_: Any) -> list[float]:
        await asyncio.sleep(0.05)
        assert environments[0].level == level[0]
        return [float(environments[0].level)]

    factory = bench.factory(Stateful, reward_funcs=slow, rows=[{"prompt": PLAY, "level": level} for level in range(8)])
    sessions = await asyncio.gather(*(bench.play(factory, row) for row in factory.prompt_rows()))
    assert [session.verify().env_reward for session in sessions] == [float(level) for level in range(8)]


async def test_an_environments_synchronous_code_stays_in_one_thread(bench: Bench):
    class Bound(Counter):
        def __init__(self) -> None:
            self.threads = {threading.get_ident()}
            super().__init__()

        def reset(self, **columns: Any) -> None:
            self.threads.add(threading.get_ident())

        def add(self, n: int) -> str:
            """Add.

            Args:
                n: n
            """
            self.threads.add(threading.get_ident())
            return ""

        def get_reward(self) -> float:
            self.threads.add(threading.get_ident())
            return float(len(self.threads))

    def threads(environments: list[Bound], **_: Any) -> list[float]:
        environments[0].threads.add(threading.get_ident())
        assert threading.get_ident() != main
        return [float(len(environments[0].threads))]

    main = threading.get_ident()
    bench.engine.say(call("add", n=1))
    session = await bench.play(bench.factory(Bound, reward_funcs=threads))
    assert session.verify().metrics["rewards/Bound"] == session.verify().metrics["rewards/threads"] == 1.0


@pytest.mark.parametrize("where", ["reset", "tool", "reward"])
async def test_a_lost_session_is_never_scored(bench: Bench, where):
    class SessionLostError(ConnectionError):
        """As OpenEnv's clients raise it from 0.12 on."""

    class Remote(Counter):
        made = 0

        def reset(self, **columns: Any) -> None:
            if where == "reset":
                raise SessionLostError("closed")

        def add(self, n: int) -> str:
            """Add.

            Args:
                n: n
            """
            if where == "tool":
                raise SessionLostError("closed")
            return ""

        def get_reward(self) -> float:
            if where == "reward":
                raise SessionLostError("closed")
            return 1.0

    bench.engine.say(call("add", n=1))
    factory = bench.factory(Remote)
    session = await bench.session(factory)
    with pytest.raises(RolloutFailure, match="SessionLostError: closed") as caught:
        await session.run()
    with pytest.raises(RolloutFailure):
        session.verify()
    await session.close()
    assert (caught.value.cause, caught.value.cause.retryable) == (Cause.ENVIRONMENT_LOST, True)
    await bench.session(factory)
    assert Remote.made == 1 and not factory.kinds[""]._idle  # and its instance is given up
