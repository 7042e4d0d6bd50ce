"""Rewards (rules 11 to 13), several environments in one run (14 to 16) and plain tools."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from environments.bench import PLAY, Bench, call

from harness_rl.errors import Cause, UserError
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.environment_factory import EnvironmentSessionFactory
from harness_rl.sessions.rewardfuncs import weighted_rewards


class Dice:
    """Without a reward of its own."""

    def reset(self, **columns: Any) -> str:
        self.rolled = 0
        return " Roll."

    def roll(self, sides: int) -> str:
        """Roll a die.

        Args:
            sides: How many.
        """
        self.rolled += sides
        return f"rolled {sides}"


class Cards:
    """With a reward of its own."""

    def reset(self, **columns: Any) -> None:
        self.drawn = 0

    def draw(self) -> str:
        """Draw a card."""
        self.drawn += 1
        return "an ace"

    def get_reward(self) -> float:
        return 0.25 * self.drawn


async def test_rule_11_a_reward_function_sees_all_of_the_episode(bench: Bench):
    seen: list[dict[str, Any]] = []

    def reward(prompts, completions, completion_ids, environments, **columns):
        seen.append({"prompts": prompts, "completions": completions, "ids": completion_ids, "environments": environments, **columns})
        return [float(environments[0].rolled)]

    state = object()
    bench.engine.say(call("roll", sides=6))
    bench.engine.say("done")
    factory = bench.factory(Dice, reward_funcs=reward, rows=[{"prompt": PLAY, "level": 3}], trainer_state=state)
    session = await bench.play(factory)
    assert session.verify().env_reward == 6.0
    [found] = seen
    assert found["prompts"] == [[{"role": "user", "content": "Play. Roll."}]]
    [[first, result, last]] = found["completions"]
    assert first["tool_calls"][0]["function"] == {"name": "roll", "arguments": {"sides": 6}}
    assert (result["role"], result["content"], last["content"]) == ("tool", "rolled 6", "done")
    assert isinstance(found["environments"][0], Dice) and len(found["environments"]) == 1
    assert (found["level"], found["trainer_state"]) == ([3], state)
    turns = session.fetch_training_trace().turns
    everything = [*turns[-1].prompt_token_ids.tolist(), *turns[-1].completion_token_ids.tolist()]
    assert found["ids"] == [everything[len(turns[0].prompt_token_ids) :]]
    assert "rolled 6" in bench.engine.tokenizer.decode(found["ids"][0])  # tool tokens included


async def test_rule_11_completion_ids_are_those_of_the_last_branch(bench: Bench):
    bench.engine.never_show_think = True  # what the first answer thought is gone from the second prompt: a branch
    bench.engine.say("<think>hm</think>" + call("roll", sides=2))
    bench.engine.say("done")
    found: list[list[int]] = []

    def reward(completion_ids, **_):
        found.extend(completion_ids)
        return [1.0]

    session = await bench.play(bench.factory(Dice, reward_funcs=reward))
    first, last = session.fetch_training_trace().turns
    assert last.metadata["parent"] is None
    assert found == [last.completion_token_ids.tolist()]
    assert first.metadata["mask_reason"] is None  # it still trains, in a row of its own


async def test_rule_11_a_text_prompt_has_text_completions(bench: Bench):
    seen: list[Any] = []

    def reward(prompts, completions, **_):
        seen.extend([prompts[0], completions[0]])
        return [1.0]

    bench.engine.say("Hello there.")
    await bench.play(bench.factory(reward_funcs=reward, rows=[{"prompt": "Say hello."}]))
    assert seen == ["Say hello.", "Hello there."]


@pytest.mark.parametrize(
    "reward",
    [
        lambda completions: [1.0],
        lambda completions, **kwargs: [1.0],
        lambda *, environments, level: [float(level[0] == 2 and environments[0].rolled == 0)],
        lambda **kwargs: [True],
        lambda **kwargs: (1,),
    ],
)
async def test_rule_11_a_function_gets_what_it_names(bench: Bench, reward):
    session = await bench.play(bench.factory(Dice, reward_funcs=reward, rows=[{"prompt": PLAY, "level": 2}]))
    assert session.verify().env_reward == 1.0


async def test_rule_12_parts_are_weighted_summed_and_named_and_none_is_not_zero(bench: Bench):
    def half(**_: Any) -> list[float]:
        return [0.5]

    async def nothing(**_: Any) -> list[None]:
        await asyncio.sleep(0)
        return [None]

    def not_a_number(**_: Any) -> list[float]:
        return [math.nan]

    async def two(**_: Any) -> list[float]:
        return [2.0]

    bench.engine.say(call("draw"))
    factory = bench.factory(Cards, reward_funcs=[half, nothing, not_a_number, two], reward_weights=[1.0, 5.0, 5.0, -0.25])
    session = await bench.play(factory)
    assert session.verify().env_reward == 0.5 - 0.25 * 2.0 + 0.25
    parts = {name: value for name, value in session.outcome().metrics.items() if name.startswith("rewards/")}
    assert parts == {"rewards/half": 0.5, "rewards/two": 2.0, "rewards/Cards": 0.25}


async def test_rule_12_without_any_part_there_is_no_reward_and_no_retry(bench: Bench):
    session = await bench.play(bench.factory(Dice, reward_funcs=lambda **_: [None]))
    with pytest.raises(RolloutFailure, match="no reward function applies to it") as caught:
        session.verify()
    assert (caught.value.cause, caught.value.cause.retryable) == (Cause.REWARD_NONE, False)
    assert session.outcome().env_reward is None
    assert json.loads((bench.folder / "rollouts" / "e0" / "outcome.json").read_text())["cause"] == "reward_none"


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda **_: 1.0, "returned 1.0; return a list with a number or None per completion"),
        (lambda **_: [1.0, 2.0], "returned 2 rewards for 1 completion"),
        (lambda **_: [], "returned 0 rewards for 1 completion"),
        (lambda **_: [math.inf], "gave inf; give a finite number, or None"),
        (lambda **_: ["1"], "gave '1'; give a finite number"),
        (lambda **_: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda level, **_: [1.0], "raised TypeError: .*level"),
    ],
)
async def test_rule_12_anything_else_is_a_named_failure_not_a_zero(bench: Bench, reward, words):
    session = await bench.play(bench.factory(Dice, reward_funcs=reward))
    with pytest.raises(RolloutFailure, match=words) as caught:
        session.verify()
    assert (caught.value.cause, caught.value.cause.retryable) == (Cause.REWARD_FUNCTION, False)


async def test_rule_12_an_environments_reward_is_judged_the_same_way(bench: Bench):
    class Odd(Cards):
        def get_reward(self) -> Any:
            return "a lot"

    session = await bench.play(bench.factory(Odd))
    with pytest.raises(RolloutFailure, match=r"Odd\.get_reward gave 'a lot'"):
        session.verify()


async def test_metrics_and_extra_columns_of_reward_functions_are_kept(bench: Bench):
    def reward(log_metric, log_extra, **_):
        log_metric("moves", 2)
        log_metric("moves", 4)
        log_extra("board", ["x.o"])
        return [1.0]

    session = await bench.play(bench.factory(Dice, reward_funcs=reward))
    assert session.outcome().metrics["log/moves"] == 3.0
    assert json.loads((bench.folder / "rollouts" / "e0" / "outcome.json").read_text())["extra"] == {"board": ["x.o"]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no reward: give reward_funcs, or an environment with a method get_reward"),
        ({"reward_funcs": "OpenAssistant/reward-model"}, "is not a function; reward models are not loaded here: serve it"),
        ({"reward_funcs": [math.sqrt, math.sqrt]}, "two functions are called sqrt"),
        ({"reward_funcs": math.sqrt, "reward_weights": [1.0, 2.0]}, "2 weights for 1 reward functions"),
        ({"reward_funcs": math.sqrt, "rows": [{"prompt": PLAY, "completions": 1}]}, "a column is called 'completions'"),
        ({"reward_funcs": math.sqrt, "rows": []}, "it has no rows"),
        ({"reward_funcs": math.sqrt, "rows": [{"prompt": 3}]}, "row 0: its prompt is 3; write a text, or a list of messages"),
        ({"reward_funcs": math.sqrt, "rows": [{"prompt": [{"content": "x"}]}]}, "row 0: its prompt is"),
    ],
)
def test_what_can_be_known_wrong_is_refused_before_anything_starts(options, words):
    with pytest.raises(UserError, match=words):
        EnvironmentSessionFactory(Dice, **{"rows": [{"prompt": PLAY}], **options})


def test_a_reward_function_may_not_hide_an_environments_reward():
    def reward(**_: Any) -> list[float]:
        return [1.0]

    reward.__name__ = "Cards"
    with pytest.raises(UserError, match="Cards is also an environment's class"):
        EnvironmentSessionFactory(Cards, rows=[{"prompt": PLAY}], reward_funcs=reward)


def test_partial_functions_are_named_by_what_they_were_made_of():
    import functools

    assert [reward.name for reward in weighted_rewards([functools.partial(math.pow, 2.0), math.sqrt])] == ["pow", "sqrt"]


async def test_rule_14_a_meta_environment_routes_on_a_column(bench: Bench):
    class Meta:
        """Pattern A: both games' tools are shown; the wrong one raises."""

        def reset(self, game: str, **columns: Any) -> None:
            self.game = {"dice": Dice, "cards": Cards}[game]()
            self.game.reset()

        def roll(self, sides: int) -> str:
            """Roll a die.

            Args:
                sides: How many.
            """
            if not isinstance(self.game, Dice):
                raise ValueError("This is a game of cards.")
            return self.game.roll(sides)

        def draw(self) -> str:
            """Draw a card."""
            if not isinstance(self.game, Cards):
                raise ValueError("This is a game of dice.")
            return self.game.draw()

    def dice(environments: list[Meta], **_: Any) -> list[float | None]:
        return [env.game.rolled / 6 if isinstance(env.game, Dice) else None for env in environments]

    def cards(environments: list[Meta], **_: Any) -> list[float | None]:
        return [float(env.game.drawn) if isinstance(env.game, Cards) else None for env in environments]

    rows = [{"prompt": PLAY, "game": "dice"}, {"prompt": PLAY, "game": "cards"}]
    factory = bench.factory(Meta, reward_funcs=[dice, cards], rows=rows)
    for row, parts in zip(rows, [{"rewards/dice": 1.0}, {"rewards/cards": 0.0}], strict=True):
        bench.engine.say(call("roll", sides=6))
        bench.engine.say("done")
        session = await bench.play(factory, row)
        assert {name: value for name, value in session.verify().metrics.items() if name.startswith("rewards/")} == parts
    assert "This is a game of cards." in bench.prompts()[-1]


async def test_rule_15_a_mapping_routes_by_the_environment_column_and_shows_only_its_tools(bench: Bench):
    resets: list[dict[str, Any]] = []

    class Watched(Dice):
        def reset(self, **columns: Any) -> str:
            resets.append(columns)
            return super().reset()

    def dice(environments: list[Any], environment: list[str], **_: Any) -> list[float | None]:
        return [env.rolled / 6 if name == "dice" else None for env, name in zip(environments, environment, strict=True)]

    rows = [{"prompt": PLAY, "environment": "dice"}, {"environment": "cards", "level": 1}]
    factory = bench.factory({"dice": Watched, "cards": Cards}, reward_funcs=dice, rows=rows)
    bench.engine.say(call("roll", sides=6))
    bench.engine.say("done")
    assert (await bench.play(factory, rows[0])).verify().env_reward == 1.0
    assert resets == [{"prompt": PLAY}]  # without the column that only chooses
    bench.engine.say(call("roll", sides=6))  # the other environment's tool
    bench.engine.say(call("draw"))
    session = await bench.play(factory, rows[1])
    assert (session.verify().env_reward, session.outcome().tool_failure_count) == (0.25, 1)
    assert bench.offered()[0] == ["roll"]
    cards = [body for body in bench.engine.bodies("/render") if body["messages"][0]["content"] == ""]
    assert {tool["function"]["name"] for body in cards for tool in body["tools"]} == {"draw"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": PLAY}], r"row 0: it has no column 'environment'; with several environments each row names its own: 'dice', 'cards'"),
        ([{"prompt": PLAY, "environment": "chess"}], r"row 0: environment is 'chess'; known: 'dice', 'cards'"),
    ],
)
def test_rule_15_a_row_without_a_known_environment_is_refused(rows, words):
    with pytest.raises(UserError, match=words):
        EnvironmentSessionFactory({"dice": Dice, "cards": Cards}, rows=rows)


async def test_rule_15_a_column_called_environment_is_like_any_other_where_there_is_one(bench: Bench):
    class Free(Cards):
        def reset(self, **columns: Any) -> None:
            super().reset()
            assert columns["environment"] == "production"

    await bench.play(bench.factory(Free, rows=[{"prompt": PLAY, "environment": "production"}]))


async def test_plain_tools_need_no_environment(bench: Bench):
    def double(n: int) -> int:
        """Double a number.

        Args:
            n: The number.
        """
        return 2 * n

    async def halve(n: float) -> float:
        """Halve a number.

        Args:
            n: The number.
        """
        return n / 2

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(sum(message["role"] == "tool" for message in completions[0]))]

    bench.engine.say(call("double", n=4) + call("halve", n=3.0))
    bench.engine.say("done")
    session = await bench.play(bench.factory(tools=[double, halve], reward_funcs=reward))
    results = [message["content"] for message in session.outcome().completion if message["role"] == "tool"]
    assert (results, session.verify().env_reward) == (["8", "1.5"], 2.0)


async def test_plain_tools_stand_beside_an_environments_own(bench: Bench):
    def double(n: int) -> int:
        """Double a number.

        Args:
            n: The number.
        """
        return 2 * n

    bench.engine.say(call("double", n=4) + call("draw"))
    session = await bench.play(bench.factory(Cards, tools=[double]))
    assert session.outcome().tool_calls_by_name == {"double": 1, "draw": 1}
    double.__name__ = "draw"
    with pytest.raises(UserError, match=r"Cards\.draw and the tool draw have one name"):
        bench.factory(Cards, tools=[double])


def test_without_an_environment_a_row_needs_a_prompt():
    with pytest.raises(UserError, match="row 0: it has no prompt"):
        EnvironmentSessionFactory(rows=[{"level": 1}], reward_funcs=math.sqrt)
