"""The loop's part of the contract (rules 8 to 10) and its budgets, through the real capture proxy."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import numpy as np
import pytest
from environments.bench import PLAY, Bench, a_bench, call

from capture_proxy.trace import TrainingTrace
from harness_rl.errors import Cause
from harness_rl.learner.rows import build_rows, verify_row
from harness_rl.sessions import chatclient
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.outcome import read_outcome


class Echo:
    """Repeats what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def reset(self, **columns: Any) -> None:
        self.heard = []

    def say(self, text: str) -> str:
        """Say something.

        Args:
            text: What to say.
        """
        self.heard.append(text)
        return f"you said {text}"

    def get_reward(self) -> float:
        return float(len(self.heard))


def roles(messages: list[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]


async def test_rule_8_generate_parse_execute_append_until_there_is_no_call(bench: Bench):
    bench.engine.say("Well: " + call("say", text="a"))
    bench.engine.say(call("say", text="b") + "\n" + call("say", text="c"))
    bench.engine.say("done")
    session = await bench.play(bench.factory(Echo))
    outcome = session.outcome()
    assert roles(outcome.completion) == ["user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert [message["content"] for message in outcome.completion if message["role"] == "tool"] == ["you said a", "you said b", "you said c"]
    assert (outcome.turns, outcome.tool_call_count, outcome.stop_reason, session.verify().env_reward) == (3, 3, "finished", 3.0)
    assert outcome.metrics["completions/clipped_ratio"] == outcome.metrics["tools/loop_exhausted_frac"] == 0.0


async def test_rule_8_results_keep_the_order_of_their_calls(bench: Bench):
    class Mixed(Echo):
        async def later(self, seconds: float) -> str:
            """Wait.

            Args:
                seconds: How long.
            """
            await asyncio.sleep(seconds)
            return f"waited {seconds}"

    bench.engine.say(call("later", seconds=0.05) + "\n" + call("say", text="a") + "\n" + call("later", seconds=0.01))
    session = await bench.play(bench.factory(Mixed))
    results = [message for message in session.outcome().completion if message["role"] == "tool"]
    assert [message["content"] for message in results] == ["waited 0.05", "you said a", "waited 0.01"]
    wanted = next(message for message in session.outcome().completion if message["role"] == "assistant")["tool_calls"]
    assert [message["tool_call_id"] for message in results] == [one["id"] for one in wanted]


async def test_rule_8_no_call_of_the_last_allowed_answer_is_executed(bench: Bench):
    bench.configure(max_calls=2)
    for text in "abc":
        bench.engine.say(call("say", text=text))
    session = await bench.play(bench.factory(Echo))
    outcome = session.outcome()
    assert roles(outcome.completion) == ["user", "assistant", "tool", "assistant"]
    assert (session.verify().env_reward, outcome.stop_reason, outcome.metrics["tools/loop_exhausted_frac"]) == (1.0, "limit", 1.0)


async def test_rule_8_without_a_limit_of_iterations_length_ends_it(bench: Bench):
    bench.configure(max_calls=0)
    bench.limits = {"max_conversation_tokens": 400}
    bench.engine.default_text = call("say", text="again")
    session = await bench.play(bench.factory(Echo))
    assert session.outcome().stop_reason == "limit"
    assert session.outcome().turns > 4


async def test_rule_8_the_budget_is_of_the_whole_conversation_and_an_overlong_result_is_taken_back(bench: Bench):
    class Talks(Echo):
        def say(self, text: str) -> str:
            """Say something.

            Args:
                text: What to say.
            """
            self.heard.append(text)
            return "word " * 500

    bench.limits = {"max_conversation_tokens": 200}
    bench.engine.say(call("say", text="a"))
    session = await bench.play(bench.factory(Talks))
    outcome = session.outcome()
    assert roles(outcome.completion) == ["user", "assistant"]
    assert (outcome.turns, outcome.stop_reason, outcome.metrics["completions/clipped_ratio"]) == (1, "limit", 1.0)
    assert outcome.truncated
    assert session.verify().env_reward == 1.0  # the call was made, and is paid for
    status = json.loads((bench.folder / "rollouts" / "e0" / "outcome.json").read_text())["capture"]
    assert status["calls_by_reason"] == {"trained": 1, "limit": 1}
    [row] = build_rows(outcome.trace, "r", "g")
    assert len(row) - row.spans[0].start <= 200


async def test_rule_8_sampling_stops_where_the_budget_ends(bench: Bench):
    bench.limits = {"max_conversation_tokens": 5}
    bench.engine.say("one two three four five six")
    session = await bench.play(bench.factory(Echo))
    outcome = session.outcome()
    assert len(outcome.trace.turns[0].completion_token_ids) == 5
    assert (outcome.stop_reason, outcome.metrics["completions/clipped_ratio"]) == ("limit", 1.0)


async def test_rule_8_per_turn_limits_hold_too(bench: Bench):
    bench.limits = {"max_output_tokens_per_call": 3}
    bench.engine.say("one two three four")
    session = await bench.play(bench.factory(Echo))
    assert len(session.outcome().trace.turns[0].completion_token_ids) == 3


async def test_rule_8_a_result_too_large_for_any_context_is_taken_back_like_an_overlong_one(bench: Bench):
    class Huge(Echo):
        def say(self, text: str) -> str:
            """Say something.

            Args:
                text: What to say.
            """
            return "x" * (5 << 20)

    bench.engine.say(call("say", text="a"))
    session = await bench.play(bench.factory(Huge))
    assert roles(session.outcome().completion) == ["user", "assistant"]
    assert session.outcome().metrics["completions/clipped_ratio"] == 1.0


@pytest.mark.parametrize("where", ["model", "async tool"])
async def test_the_wall_clock_ends_the_conversation_and_keeps_what_there_was(bench: Bench, where):
    class Slow(Echo):
        async def wait(self) -> str:
            """Wait."""
            await asyncio.sleep(30)
            return "waited"

    factory = bench.factory(Slow)
    await bench.play(factory)  # the proxy looks at the template before the first call
    bench.configure(agent_timeout_s=3.0)
    factory.bind(bench.services())
    bench.engine.say(call("say", text="a"))
    if where == "model":
        bench.engine.say("late", delay_s=30.0)
    else:
        bench.engine.say(call("wait"))
    session = await bench.play(factory)
    outcome = session.outcome()
    assert (outcome.timed_out, outcome.stop_reason, session.verify().env_reward) == (True, "agent_timeout", 1.0)
    assert roles(outcome.completion)[:3] == ["user", "assistant", "tool"]
    if where == "model":
        assert bench.engine.cancelled == 1


async def test_a_synchronous_tool_that_hangs_costs_its_rollout_and_its_environment_nothing_else(bench: Bench):
    class Stuck(Echo):
        made = 0

        def __init__(self) -> None:
            super().__init__()
            type(self).made += 1

        def hang(self) -> str:
            """Hang."""
            released.wait(60)
            return ""

    released = threading.Event()
    factory = bench.factory(Stuck)
    await bench.play(factory)  # the proxy looks at the template before the first call
    bench.configure(agent_timeout_s=2.0)
    factory.bind(bench.services())
    bench.engine.say(call("hang"))
    with pytest.raises(RolloutFailure, match=r"a tool call did not return within 2 s") as caught:
        await bench.play(factory)
    assert caught.value.cause is Cause.WALL_CLOCK
    bench.configure()
    factory.bind(bench.services())
    bench.engine.say(call("say", text="a"))
    assert (await bench.play(factory)).verify().env_reward == 1.0
    assert Stuck.made == 2
    released.set()


async def test_the_deadline_bounds_reset_and_rewards(bench: Bench):
    class Sleeps(Echo):
        async def reset(self, **columns: Any) -> None:  # type: ignore[override]
            await asyncio.sleep(30)

    bench.configure(deadline_s=0.3)
    with pytest.raises(RolloutFailure, match=r"not over after 0.3 s \(rollout.deadline_s\)") as caught:
        await bench.play(bench.factory(Sleeps))
    assert caught.value.cause is Cause.WALL_CLOCK


@pytest.mark.parametrize("style", ["words", "chars"])
async def test_rule_9_a_conversation_is_one_row_whatever_its_tokens_are(bench: Bench, style):
    """Here the prefix is kept by the proxy, not by the template: ids that no tokenizer would give for the text stay as sampled."""
    bench.engine.say(call("say", text="a"), style=style)
    bench.engine.say(call("say", text="b"), style=style)
    bench.engine.say("done", style=style)
    session = await bench.play(bench.factory(Echo))
    rows = build_rows(session.fetch_training_trace(), "r", "g")
    assert [len(row.spans) for row in rows] == [3]
    verify_row(rows[0])


async def test_rule_10_exactly_the_sampled_tokens_are_trained(bench: Bench):
    bench.engine.say(call("say", text="a"))
    bench.engine.say("done")
    session = await bench.play(bench.factory(Echo))
    [row] = build_rows(session.fetch_training_trace(), "r", "g")
    sampled = [list(ids) for _, ids in bench.engine.sampled]
    assert [row.ids[span.start : span.end].tolist() for span in row.spans] == sampled
    assert np.flatnonzero(row.mask).tolist() == [at for span in row.spans for at in range(span.start, span.end)]
    assert "you said a" in bench.engine.tokenizer.decode([int(i) for i in row.ids[row.mask == 0]])


async def test_the_record_is_what_any_session_leaves(bench: Bench):
    bench.engine.say(call("say", text="a"))
    session = await bench.play(bench.factory(Echo))
    folder = bench.folder / "rollouts" / "e0"
    assert TrainingTrace.from_bytes((folder / "trace.bin").read_bytes()) == session.fetch_training_trace()
    again = read_outcome(folder)
    assert (again.env_reward, again.metrics, again.completion) == (1.0, session.outcome().metrics, session.outcome().completion)
    record = json.loads((folder / "outcome.json").read_text())
    assert (record["cause"], record["environment"], record["harness"]) == (None, "Echo", "environments")


async def test_a_demonstration_is_played_by_a_script_and_says_so(bench: Bench):
    script = [{"content": None, "tool_calls": [{"name": "say", "arguments": {"text": "a"}}]}, {"content": "done"}]
    session = await bench.play(bench.factory(Echo, demonstrations=lambda row: script), script=script)
    assert {turn.metadata["origin"] for turn in session.fetch_training_trace().turns} == {"demonstration"}
    assert session.verify().env_reward == 1.0
    assert len(build_rows(session.fetch_training_trace(), "r", "g", origins=frozenset({"demonstration"}))) == 1


async def test_calls_wait_while_the_policy_is_replaced_and_engine_failures_are_the_engines(bench: Bench, monkeypatch):
    monkeypatch.setattr(chatclient, "MAX_PAUSE_S", 0.1)
    bench.engine.statuses.extend([500] * 400)
    with pytest.raises(RolloutFailure) as caught:
        await bench.play(bench.factory(Echo))
    assert caught.value.cause is Cause.ENGINE
    bench.engine.statuses.clear()
    await bench.proxy.hold("weights", 0.2)
    held = asyncio.create_task(bench.play(bench.factory(Echo)))
    await asyncio.sleep(0.4)  # longer than the proxy holds: the call is refused and made again
    await bench.proxy.release("t-1")
    assert (await asyncio.wait_for(held, 60)).outcome().turns == 1


async def test_a_prompt_that_does_not_fit_has_no_reward(bench: Bench):
    with pytest.raises(RolloutFailure, match="its prompt does not fit the model's context") as caught:
        await bench.play(bench.factory(Echo, rows=[{"prompt": "word " * 9000}]))
    assert caught.value.cause is Cause.NO_MODEL_CALL


async def test_cancelling_seals_records_and_gives_the_environment_up(bench: Bench):
    bench.engine.say("late", delay_s=30.0)
    factory = bench.factory(Echo)
    session = await bench.session(factory)
    running = asyncio.create_task(session.run())
    while not bench.engine.active:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await session.close()
    await session.close()
    record = json.loads((bench.folder / "rollouts" / "e0" / "outcome.json").read_text())
    assert (record["cause"], record["env_reward"]) == ("cancelled", None)
    assert (bench.engine.cancelled, len(factory.kinds[""]._idle)) == (1, 0)
    assert (await bench.proxy.health())["sessions_open"] == 0


async def test_a_dead_proxy_is_a_capture_failure(tmp_path):
    async with a_bench(tmp_path) as bench:
        session = await bench.session(bench.factory(Echo))
    with pytest.raises(RolloutFailure) as caught:
        await session.run()
    await session.close()
    assert caught.value.cause is Cause.CAPTURE


async def test_prompts_are_never_taken_for_a_side_call_of_a_coding_agent(bench: Bench):
    class Mute:
        """Without tools, as a title generator would be."""

        def reset(self, **columns: Any) -> None: ...

        def get_reward(self) -> float:
            return 1.0

    row = {"prompt": [{"role": "system", "content": "You are a title generator"}, *PLAY]}
    session = await bench.play(bench.factory(Mute, rows=[row]))
    assert session.fetch_training_trace().turns[0].metadata["role"] == "agent"


async def test_64_environments_with_slow_resets_and_tools_do_not_wait_for_each_other(bench: Bench):
    lock = threading.Lock()

    class Slow(Echo):
        delay = 0.0
        at_once = most_at_once = 0

        def reset(self, **columns: Any) -> None:
            super().reset()
            with lock:
                Slow.at_once += 1
                Slow.most_at_once = max(Slow.most_at_once, Slow.at_once)
            time.sleep(self.delay)
            with lock:
                Slow.at_once -= 1

        def say(self, text: str) -> str:
            """Say something.

            Args:
                text: What to say.
            """
            time.sleep(self.delay)
            return super().say(text)

        async def get_reward(self) -> float:  # type: ignore[override]
            await asyncio.sleep(self.delay)
            return float(len(self.heard))

    bench.engine.asides = {"you said": "done", "Play.": call("say", text="a")}
    factory = bench.factory(Slow)

    async def a_round() -> float:
        started = time.monotonic()
        sessions = await asyncio.gather(*(bench.play(factory) for _ in range(64)))
        assert [session.verify().env_reward for session in sessions] == [1.0] * 64
        return time.monotonic() - started

    await a_round()  # makes the instances
    model = await a_round()
    Slow.delay = 0.5
    for _ in range(5):  # a machine that does other work too gets several tries
        if await a_round() - model < 3.0:  # 1.5 s of it are one episode's own; one after the other it would be 96 s
            break
    else:
        raise AssertionError("no round ended within 3 s beyond the model's time")
    assert Slow.most_at_once > 32
