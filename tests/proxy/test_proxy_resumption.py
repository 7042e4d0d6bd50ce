"""Calls that an update of the weights ends on the way: what the engine is asked next, and what the trace then says."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
from fake_engine import END, FakeEngine, Said, logprob_of
from hypothesis import given
from hypothesis import strategies as st
from proxy_helpers import Agent, Serve, Served, until

from capture_proxy.resumption import Partial, joined_sample
from capture_proxy.sample import Sample
from capture_proxy.upstream import Retry


async def aborted_by_a_sync(served: Served, engine: FakeEngine, agent: Agent, first: str, then: str, **fields: Any) -> dict[str, Any]:
    """One call that is aborted after `first`, and ends with `then` under the next weights."""
    engine.version = "k-0"
    engine.say(first, finish="abort", delay_s=0.05)
    engine.say(then)
    call = asyncio.create_task(agent.ask(tools=(), **fields))
    await until(lambda: engine.active == 1)
    await served.admin.hold("weights k-1", 5.0)
    await until(lambda: engine.active == 0)
    await asyncio.sleep(0.05)
    assert len(engine.bodies("/generate")) == 1  # nothing goes to the engine while its weights change
    engine.version = "k-1"
    await served.admin.release("k-1")
    return await call


async def test_e13_an_aborted_call_goes_on_under_the_new_weights_with_a_span_for_each(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent(sampling={"temperature": 1.0, "seed": 3})
    choice = await aborted_by_a_sync(served, engine, agent, "alpha beta", " gamma")
    assert choice["message"]["content"] == "alpha beta gamma" and choice["finish_reason"] == "stop"
    one, two = engine.bodies("/generate")
    alpha, gamma = engine.tokenizer.encode("alpha beta"), [*engine.tokenizer.encode(" gamma"), END]
    assert two["token_ids"] == one["token_ids"] + alpha
    assert two["sampling_params"]["max_tokens"] == one["sampling_params"]["max_tokens"] - len(alpha)
    assert two["sampling_params"]["seed"] != one["sampling_params"]["seed"]
    (turn,) = (await served.admin.trace(created.session_id)).turns
    assert turn.prompt_token_ids.tolist() == one["token_ids"] and turn.completion_token_ids.tolist() == alpha + gamma
    reported = [logprob_of(token, n) for part in (alpha, gamma) for n, token in enumerate(part)]
    np.testing.assert_allclose(turn.per_token_logps, reported)
    assert turn.metadata["weight_versions"] == [["k-0", 0, len(alpha)], ["k-1", len(alpha), len(alpha) + len(gamma)]]
    assert turn.metadata["parts"] == [[len(alpha), two["sampling_params"]["seed"]]]
    assert turn.metadata["mask_reason"] is None and sum(turn.loss_mask) == len(alpha) + len(gamma)


async def test_c74_a_continuation_has_what_is_left_of_the_budget(served: Served, engine: FakeEngine) -> None:
    agent, _ = await served.agent()
    choice = await aborted_by_a_sync(served, engine, agent, "a b", " c d", max_tokens=5)
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == "a b c"
    assert [body["sampling_params"]["max_tokens"] for body in engine.bodies("/generate")] == [5, 2]
    engine.say(" x y", finish="abort")  # four ids of four
    agent.messages.append({"role": "user", "content": "more"})
    assert (await agent.ask(tools=(), max_tokens=4))["finish_reason"] == "length"
    assert len(engine.bodies("/generate")) == 3


async def test_a_grammar_begins_again_because_it_would_in_the_engine(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    answer = '{"answer": 1}'
    choice = await aborted_by_a_sync(served, engine, agent, '{"ans', answer, response_format={"type": "json_object"})
    assert choice["message"]["content"] == answer
    one, two = engine.bodies("/generate")
    assert one == two
    (turn,) = (await served.admin.trace(created.session_id)).turns
    assert turn.metadata["weight_versions"] == [["k-1", 0, len(turn.completion_token_ids)]] and turn.metadata["parts"] == []


async def test_a_stop_text_over_the_seam_ends_the_answer(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()
    choice = await aborted_by_a_sync(served, engine, agent, "well HA", "LT and more", stop=["HALT"])
    assert choice["message"]["content"] == "well " and choice["finish_reason"] == "stop"
    (turn,) = (await served.admin.trace(created.session_id)).turns
    assert engine.tokenizer.decode(turn.completion_token_ids.tolist()) == "well HALT"
    assert turn.metadata["weight_versions"] == [["k-0", 0, 3], ["k-1", 3, 4]] and turn.metadata["stop_reason"] == "HALT"
    assert len(turn.per_token_logps) == 4


async def test_updates_may_abort_a_call_as_often_as_they_come(serve: Serve, engine: FakeEngine) -> None:
    served = await serve(engine.url, retry=Retry(total_s=1.0, base_s=0.01, server_errors=2))
    agent, created = await served.agent()
    for number in range(5):
        engine.say(f"{number} ", finish="abort", delay_s=0.05)
    engine.say("end")
    call = asyncio.create_task(agent.ask(tools=()))
    for number in range(5):
        await until(lambda: engine.active == 1)
        await served.admin.hold(f"weights k-{number}", 5.0)
        await until(lambda: engine.active == 0)
        engine.version = f"k-{number}"
        await served.admin.release(engine.version)
    assert (await call)["message"]["content"] == "0 1 2 3 4 end"
    (turn,) = (await served.admin.trace(created.session_id)).turns
    assert [len(part) for part in (turn.metadata["parts"], turn.metadata["weight_versions"])] == [5, 6]
    assert all(a[2] == b[1] for a, b in pairwise(turn.metadata["weight_versions"]))


async def test_aborts_that_nothing_explains_are_bounded(serve: Serve, engine: FakeEngine) -> None:
    served = await serve(engine.url, retry=Retry(total_s=1.0, base_s=0.01, server_errors=2))
    agent, _ = await served.agent()
    for _ in range(2):
        engine.say("x", finish="abort")
    status, body = await agent.post({"model": "m", "messages": agent.messages})
    assert status == 502 or status == 503, body
    assert "aborted the same call 2 times" in body["error"]["message"]


async def test_chat_capture_begins_again(serve: Serve, engine: FakeEngine) -> None:
    served = await serve(engine.url, capture="chat")
    agent, created = await served.agent()
    engine.say("alpha", finish="abort")
    engine.say("whole answer")
    assert (await agent.ask(tools=()))["message"]["content"] == "whole answer"
    (turn,) = (await served.admin.trace(created.session_id)).turns
    assert engine.tokenizer.decode(turn.completion_token_ids.tolist()[:-1]) == "whole answer"


async def test_sessions_keep_to_blocks_of_the_weights_they_began_under(serve: Serve, engine: FakeEngine) -> None:
    served = await serve(engine.url, salt_prefix_cache=True)
    engine.version = "k-3"
    await served.admin.release("k-3")
    agent, created = await served.agent()
    await agent.ask()
    engine.version = "k-4"
    await served.admin.release("k-4")
    await agent.ask({"role": "user", "content": "go on"})
    other, _ = await served.agent()
    await other.ask()
    assert [body["cache_salt"] for body in engine.bodies("/generate")] == ["k-3", "k-3", "k-4"]
    assert [turn.metadata["cache_salt"] for turn in (await served.admin.trace(created.session_id)).turns] == ["k-3", "k-3"]


async def test_without_the_setting_blocks_are_shared_by_all(served: Served, engine: FakeEngine) -> None:
    engine.version = "k-3"
    await served.admin.release("k-3")
    agent, _ = await served.agent()
    await agent.ask()
    assert all("cache_salt" not in body for body in engine.bodies("/generate"))


class Sampler(FakeEngine):
    """Samples a token that there was never before every few milliseconds, and knows under which version it was."""

    def __init__(self) -> None:
        super().__init__(version="k-0")
        self.version_of: dict[int, str] = {}
        self.pauses, self.paused = 0, False

    def pause(self) -> None:
        """As vLLM's abort mode: what runs ends with what it has, what comes is queued."""
        self.pauses, self.paused = self.pauses + 1, True

    async def _sample(self, prompt: list[int], params: dict[str, Any]) -> tuple[list[int], Said]:
        while self.paused:
            await asyncio.sleep(0.001)
        ids, pauses = [], self.pauses
        for _ in range(params["max_tokens"]):
            await asyncio.sleep(0.003)
            if self.pauses != pauses:
                return ids, Said("", "abort")
            token = self.tokenizer.id_of(f"w{len(self.version_of)}")
            self.version_of[token] = self.version
            ids.append(token)
        return ids, Said("", "length")

    def _choice(self, ids: list[int], said: Said, entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
        borders = [n for n in range(len(ids)) if n == 0 or self.version_of[ids[n]] != self.version_of[ids[n - 1]]]
        spans = [{"version": self.version_of[ids[a]], "start": a, "end": b} for a, b in pairwise([*borders, len(ids)])]
        return super()._choice(ids, said, entries, name) | {"weight_versions": spans}


async def test_e14_calls_spread_over_updates_all_end_and_none_is_of_other_weights_than_it_claims(serve: Serve) -> None:
    async with Sampler() as engine:
        served = await serve(engine.url)
        agents = [await served.agent() for _ in range(60)]

        async def ask(number: int) -> dict[str, Any]:
            await asyncio.sleep(number * 0.01)
            return await agents[number][0].ask(tools=(), max_tokens=20)

        calls = [asyncio.create_task(ask(number)) for number in range(60)]
        for step in range(1, 6):
            await asyncio.sleep(0.1)
            await served.admin.hold(f"weights k-{step}", 10.0)
            engine.pause()
            await asyncio.sleep(0.02)
            engine.version, engine.paused = f"k-{step}", False
            await served.admin.release(engine.version)
        choices = await asyncio.gather(*calls)
        assert {choice["finish_reason"] for choice in choices} == {"length"}  # no agent sees an abort
        crossed = 0
        for _, created in agents:
            (turn,) = (await served.admin.trace(created.session_id)).turns
            ids = turn.completion_token_ids.tolist()
            assert len(ids) == 20 and turn.metadata["mask_reason"] is None
            claimed = [version for version, start, end in turn.metadata["weight_versions"] for _ in range(start, end)]
            assert claimed == [engine.version_of[token] for token in ids]
            crossed += len(turn.metadata["weight_versions"]) > 1
        assert crossed >= 5


def sample(tokens: list[int], versions: list[str], finish: str) -> Sample:
    spans: list[tuple[str, int, int]] = []
    for at, version in enumerate(versions):
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1], at + 1)
        else:
            spans.append((version, at, at + 1))
    logps = np.array([-token / 7 for token in tokens], np.float32)
    return Sample(np.array(tokens, np.int32), logps, finish, None, tuple(spans), None)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 2)), min_size=1, max_size=20), st.sets(st.integers(1, 19)))
def test_parts_of_any_cut_join_to_the_whole(tokens: list[tuple[int, int]], cuts: set[int]) -> None:
    ids, versions = [token for token, _ in tokens], [f"k-{step}" for _, step in sorted(tokens, key=lambda pair: pair[1])]
    borders = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    call = Partial()
    for start, end in pairwise(borders):
        finish = "stop" if end == len(ids) else "abort"
        whole = call.add(sample(ids[start:end], versions[start:end], finish), True)
    expected = sample(ids, versions, "stop")
    assert whole.ids.tolist() == ids and whole.logps.tolist() == expected.logps.tolist() and whole.versions == expected.versions


def test_what_does_not_hold_up_is_not_gone_on_from() -> None:
    bad = Sample(np.array([1, 2], np.int32), np.empty(0, np.float32), "abort", None, None, "no logprobs")
    call = Partial()
    call.add(bad, True)
    assert not len(call.ids) and call.params({"max_tokens": 5, "seed": 1}) == {"max_tokens": 5, "seed": 1}
    good = sample([1, 2], ["k-0", "k-0"], "abort")
    joined = joined_sample(good, bad)
    assert joined.problem == "no logprobs" and not len(joined.logps) and joined.versions is None
