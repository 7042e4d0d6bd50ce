"""Scripts as a user of TRL and OpenEnv writes them (`seed/`), with imports and URLs changed and nothing else: they play and are scored.

They are read as text, so that what is changed is what `CHANGED` says. Training is replaced by episodes through the real loop and proxy.
"""

from __future__ import annotations

import asyncio
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from environments.bench import Bench, call
from envs.textarena_env.words import SECRETS
from envservers.apps import LedgerClient

from harness_rl import AsyncGRPOTrainer, GRPOTrainer
from harness_rl.errors import Cause
from harness_rl.sessions.base import RolloutFailure

SEED = Path(__file__).parent / "seed"
CHANGED = {
    "from trl import": "from harness_rl import",
    "from echo_env": "from envs.echo_env",
    "from openspiel_env": "from envs.openspiel_env",
    "from textarena_env": "from envs.textarena_env",
    "https://openenv-echo-env.hf.space": "{server}/echo",
    "https://openenv-wordle.hf.space": "{server}/wordle",
    "https://openenv-openspiel-env.hf.space": "{server}/openspiel",
    "https://my-env.hf.space": "{server}",
}


class Script:
    """A script of `seed/` that has run up to `trainer.train()`, in front of the test's proxy and engine."""

    def __init__(self, name: str, bench: Bench, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
        text = (SEED / f"{name}.py").read_text()
        for old, new in CHANGED.items():
            text = text.replace(old, new.format(server=server))
        assert "hf.space" not in text
        trained: list[Any] = []
        for kind in (GRPOTrainer, AsyncGRPOTrainer):
            monkeypatch.setattr(kind, "train", lambda trainer: trained.append(trainer))
        self.names: dict[str, Any] = {"__name__": "seed"}
        exec(compile(text, f"{name}.py", "exec"), self.names)
        [self.trainer] = trained
        bench.configure(max_calls=40)
        self.bench, self.factory = bench, self.trainer.factory
        self.factory.bind(bench.services())

    async def play(self, *turns: str, row: int = 0) -> Any:
        """The policy says these turns, and then stops."""
        for turn in (*turns, "Done."):
            self.bench.engine.say(turn)
        return await self.bench.play(self.factory, self.factory.prompt_rows()[row])


@pytest.fixture
def script(bench: Bench, server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda name: Script(name, bench, server, monkeypatch)


async def test_echo(script):
    echo = script("echo")
    for message, reward in (("Hello World!", 1.2), ("Hi", 0.2)):
        session = await echo.play(call("echo", message=message))
        assert session.verify().env_reward == pytest.approx(reward)
        assert session.verify().metrics["rewards/reward_func"] == pytest.approx(reward)
    assert (await echo.play()).verify().env_reward == 0.0
    assert (len(echo.factory.prompt_rows()), echo.factory.kinds[""].made) == (64, 1)
    rollout = echo.trainer.config.rollout
    assert (rollout.num_generations, rollout.chat_template_kwargs) == (8, {"enable_thinking": False})
    await echo.factory.close()


async def test_my_env(script, monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("my_client")
    module.MyClient = LedgerClient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_client", module)
    mine = script("my_env")
    session = await mine.play(call("my_tool", arg1="a", arg2=2))
    assert session.verify().env_reward == 1.0
    assert "What the model sees first" in mine.bench.prompts()[0] and "What came of it" in mine.bench.prompts()[1]
    tool = mine.bench.engine.bodies("/render")[-1]["tools"][0]["function"]
    assert (tool["name"], tool["parameters"]["required"]) == ("my_tool", ["arg1", "arg2"])
    assert tool["parameters"]["properties"] == {
        "arg1": {"type": "string", "description": "What arg1 is"},
        "arg2": {"type": "integer", "description": "What arg2 is"},
    }


@pytest.mark.parametrize("name", ["wordle", "async_wordle"])
async def test_wordle(script, name: str):
    wordle = script(name)
    session = await wordle.play(call("guess", guess="[crane]"), call("guess", guess="xx"), call("guess", guess="[water]"))
    assert session.verify().env_reward == 0.0  # the game goes on
    prompts = wordle.bench.prompts()
    assert "A secret 5-letter word" in prompts[0] and prompts[-1].count("A secret 5-letter word") == 1
    assert prompts[-1].count("C R A N E") == prompts[-1].count("You attempted an invalid move") == 1
    # All words in turn, six to a game: whatever is drawn, some game is won, and none is worth more.
    for start in range(0, len(SECRETS), 6):
        guesses = [call("guess", guess=f"[{word}]") for word in SECRETS[start : start + 6]]
        session = await wordle.play(*guesses)
        reward = session.verify().env_reward
        assert 0.0 <= reward <= 1.0
        if reward == 1.0:
            assert session.outcome().tool_failure_count == 6 - guesses_made(session)
            break
        wordle.bench.engine.script.clear()
    await wordle.factory.close()


def guesses_made(session: Any) -> int:
    """Those that the game was asked; later ones were told that it is over."""
    return sum("Game over" not in str(message["content"]) for message in session.outcome().completion if message["role"] == "tool")


async def test_wordle_keeps_its_configuration(script):
    config = script("wordle").trainer.config
    assert (config.rollout.num_generations, config.rollout.max_conversation_tokens, config.engine.url) == (4, 1024, None)
    assert config.rollout.groups_per_step == 8 * 64 // 4
    config = script("async_wordle").trainer.config
    assert (config.rollout.max_staleness, config.rollout.max_calls, config.engine.url) == (5, 7, "http://localhost:8000")
    assert (config.run.steps, config.run.name, config.rollout.groups_per_step) == (100, "Qwen3-1.7B-async-wordle-GRPO", 2)


async def test_multi_env(script):
    multi = script("multi_env")
    rows = multi.factory.prompt_rows()
    wordle, catch = 0, next(index for index, row in enumerate(rows) if row["env"] == "catch")
    wrong = await multi.play(call("move", direction="left"), call("guess", guess="[crane]"), row=wordle)
    assert wrong.outcome().tool_failure_count == 1 and "this is no tool of wordle" in multi.bench.prompts()[1]
    assert set(parts(wrong)) == {"rewards/wordle_reward"}
    rewards: set[float | None] = set()
    while len(rewards) < 2:  # the ball falls where it likes: waiting catches one in five
        session = await multi.play(*[call("stay")] * 9, row=catch)
        assert set(parts(session)) == {"rewards/catch_reward"}
        rewards.add(session.verify().env_reward)
    assert rewards == {0.0, 1.0}, "1 for a catch, 0 for a miss"
    assert (await multi.play(call("stay"), row=catch)).verify().env_reward == 0.0  # not played to its end
    await multi.factory.close()


def parts(session: Any) -> dict[str, float]:
    return {name: value for name, value in session.outcome().metrics.items() if name.startswith("rewards/")}


async def test_a_script_that_connects_again_by_itself_is_never_scored_by_another_game(bench: Bench, closing, monkeypatch):
    """The asynchronous Wordle reconnects where a step fails: what it says after that is about another word."""
    url, seconds = closing
    wordle = Script("async_wordle", bench, url, monkeypatch)
    bench.engine.say(call("guess", guess="[crane]"))
    bench.engine.say(call("guess", guess="[water]"), delay_s=1.3 * seconds)
    session = await bench.session(wordle.factory)
    with pytest.raises(RolloutFailure) as caught:
        await asyncio.wait_for(session.run(), 60 + 2 * seconds)
    await session.close()
    await wordle.factory.close()
    assert caught.value.cause is Cause.ENVIRONMENT_LOST
