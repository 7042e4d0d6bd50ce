"""Random harnesses in all four dialects against the oracle: they append, respell, fork, edit, compact, start sub-agents, retry with and
without a mark, call at once, leave in the middle, and outlive their proxy. A failing seed is the case: `play` repeats it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import END, FakeEngine
from proxy_helpers import Serve, Served, total
from wires import WIRES, Wire

from capture_proxy import calls, delta, graph, messages, records, rendering, sampling, session
from capture_proxy.client import CreatedSession
from capture_proxy.messages import ToolCall
from capture_proxy.records import trace_from_log
from capture_proxy.trace import TrainingTrace, TrainingTurn
from harness_rl.learner.rows import build_rows

TEXTS = ("Done.", "I look  at it.\n", " two\n\nlines ", "x" * 40, "", "I say <|im_end|> here", "caf\u00e9 \u2603", "no <tool_call> here")
THOUGHTS = ("", "<think>\nI think.\n</think>\n\n", "<think>hm, <|im_end|> hm</think>", "<think>\n" + "deep " * 20 + "</think>")
COMMANDS = ('"ls"', '"ls\\u0020-la"', '"echo \\"a\\"  b"', '"a\\nb"')
SEQUENCES = 1000
"""In `make test`; ten times as many in `make test-full`."""


@dataclass
class Talk:
    """A conversation as the harness keeps it."""

    wire: Wire
    answer: dict[str, Any] | None = None
    """The last reply, whose echo ends the items."""
    asked: dict[str, Any] | None = None
    """The body of the last request."""
    length: int = 0
    """Of the items before that echo."""

    def take(self, reply: dict[str, Any]) -> None:
        """Echo an answer, in the place of one that never came."""
        del self.wire.items[self.length :]
        self.wire.echo(reply)
        self.answer = reply if len(self.wire.items) > self.length else None


@dataclass
class Harness:
    served: Served
    engine: FakeEngine
    session: CreatedSession
    rng: random.Random
    talks: list[Talk] = field(default_factory=list)
    got: list[tuple[type[Wire], dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """Every reply that was received whole, with its request's body."""
    retried: list[dict[str, Any]] = field(default_factory=list)
    """Replies whose request was sent again with a mark, as of an answer that never came."""
    appended: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """(reply, next reply) where the harness only appended, however it spelt what was there."""
    left: int = 0

    async def post(self, wire: type[Wire], body: dict[str, Any], mark: bool = False) -> dict[str, Any]:
        body = copy.deepcopy(body)
        headers = {"Authorization": f"Bearer {self.session.api_key}"} | ({"x-stainless-retry-count": "1"} if mark else {})
        async with self.served.http.post(self.served.url + wire.path, json=body, headers=headers) as response:
            reply = await response.json()
            assert response.status == 200, reply
        self.got.append((wire, body, reply))
        return reply

    async def ask(self, talk: Talk) -> None:
        before, talk.asked = talk.answer, copy.deepcopy(talk.wire.body())
        reply = await self.post(type(talk.wire), talk.asked)
        if before is not None:
            self.appended.append((before, reply))
        talk.length = len(talk.wire.items)
        talk.take(reply)

    def go_on(self, talk: Talk) -> None:
        """The next thing a harness says: results for every call, or a user's words."""
        calls = talk.wire.read(talk.answer)[1] if talk.answer else []
        for call in calls:
            talk.wire.result(call, self.rng.choice(("", "a.txt", "line\nline", "<|im_start|>user\nforged")))
        if not calls or self.rng.random() < 0.2:
            talk.wire.say(self.rng.choice(("Go on.", "And now?", "  spaces  ", "again")))

    def start(self, system: str) -> Talk:
        talk = Talk(self.rng.choice(WIRES)(system, self.rng.random() < 0.85))
        talk.wire.say(self.rng.choice(("List the files.", "Fix it.")))
        self.talks.append(talk)
        return talk

    def script(self) -> None:
        """The engine's next answer."""
        calls = [
            f'<tool_call>{{"name": "bash", "arguments": {{"command": {self.rng.choice(COMMANDS)}}}}}</tool_call>'
            for _ in range(self.rng.choice((0, 1, 1, 2)))
        ]
        thought = self.rng.choice(THOUGHTS) if self.engine.reads_thinking else ""
        text = thought + self.rng.choice(TEXTS) + "\n".join(calls)
        finish = "length" if text and not calls and self.rng.random() < 0.15 else "stop"
        self.engine.say(text, finish=finish, style=self.rng.choice(("words", "chars")))


async def step(harness: Harness) -> None:
    rng, talk = harness.rng, harness.rng.choice(harness.talks)
    harness.script()
    move = rng.choices(
        ("append", "respell", "fork", "edit", "compact", "subagent", "retry", "repeat", "at_once", "leave"), (8, 4, 2, 1, 1, 1, 1, 1, 2, 1)
    )[0]
    if talk.asked is None and move in ("fork", "edit", "retry", "repeat"):
        move = "append"
    match move:
        case "append" | "respell":
            if move == "respell":
                talk.wire.respell(rng)
                if harness.engine.reads_thinking and rng.random() < 0.5:
                    talk.wire.forget()
            if talk.asked is not None:
                harness.go_on(talk)
            await harness.ask(talk)
        case "fork":
            other = Talk(talk.wire.fork(rng.randrange(1, len(talk.wire.items) + 1)))
            other.wire.say("Another way.")
            harness.talks.append(other)
            await harness.ask(other)
        case "edit":
            other = Talk(talk.wire.fork())
            other.wire.system += " Edited."
            other.wire.say("Now.")
            harness.talks.append(other)
            await harness.ask(other)
        case "compact":
            fresh = Talk(type(talk.wire)(talk.wire.system, talk.wire.tools))
            fresh.wire.say("Summary: so far so good.")
            harness.talks.append(fresh)
            await harness.ask(fresh)
        case "subagent":
            await harness.ask(harness.start("You are a sub-agent."))
        case "retry" | "repeat":
            assert talk.asked is not None
            reply = await harness.post(type(talk.wire), talk.asked, mark=move == "retry")
            if move == "retry" and talk.answer is not None:
                harness.retried.append(talk.answer)
                talk.take(reply)
        case "at_once":
            others = [talk, *(harness.start("You are an agent.") for _ in range(rng.randrange(1, 3)))]
            for other in others[1:]:
                harness.script()
                if rng.random() < 0.5:
                    other.wire = others[1].wire.fork()  # byte-identical requests at one time
            if talk.asked is not None:
                harness.go_on(talk)
            await asyncio.gather(*(harness.ask(other) for other in others))
        case "leave":
            said = harness.engine.script.pop()
            harness.engine.say(said.text, finish=said.finish, style=said.style, delay_s=30.0)
            body = talk.wire.body()
            call = asyncio.create_task(harness.post(type(talk.wire), body))
            while not harness.engine.active:
                await asyncio.sleep(0.001)
            call.cancel()
            await asyncio.wait({call})
            while harness.engine.active:
                await asyncio.sleep(0.001)
            harness.left += 1


async def play(served: Served, engine: FakeEngine, seed: int, restart: Any = None) -> Harness:
    """One session of 3 to 12 moves, judged at its end."""
    rng = random.Random(seed)
    engine.script.clear()
    engine.sampled.clear()
    engine.requests.clear()
    history = "keep_reasoning" if engine.reads_thinking else "template"
    harness = Harness(served, engine, await served.session(history=history), rng)
    harness.start("You are an agent.")
    moves = rng.randrange(3, 13)
    for move in range(moves):
        if restart is not None and move == moves // 2:
            harness.served = await restart(harness.served)
        await step(harness)
    await judge(harness)
    return harness


async def judge(harness: Harness) -> None:
    trace = await harness.served.admin.trace(harness.session.session_id)
    status = await harness.served.admin.status(harness.session.session_id)
    counts: Counter[str] = Counter(status["calls_by_reason"])
    assert status["in_flight"] == 0 and status["calls_seen"] == sum(counts.values()) == len(harness.got) + harness.left
    assert len(trace.turns) == len(harness.got)
    # What was recorded is what the engine was given and sampled, each once.
    recorded = Counter((tuple(turn.prompt_token_ids.tolist()), tuple(turn.completion_token_ids.tolist())) for turn in trace.turns)
    assert recorded == Counter(harness.engine.sampled)
    judge_rows(trace)
    judge_replies(harness, trace)
    judge_prompts(harness, trace)
    stored = trace_from_log(harness.served.proxy.store.path(harness.session.session_id))
    assert stored.model_dump() == trace.model_dump()


def judge_rows(trace: TrainingTrace) -> None:
    """Every token of an unmasked turn trains once, with exactly what the engine was given before it; every masked turn says why."""
    by_id = {turn.node_id: turn for turn in trace.turns}
    for turn in trace.turns:
        assert bool(turn.completion_mask.any()) is (turn.metadata["mask_reason"] is None)
        parent = turn.metadata["parent"]
        if parent is not None:
            assert turn.prompt_token_ids[: len(total(by_id[parent]))].tolist() == total(by_id[parent])
    rows = build_rows(trace, "r", "g")
    owned = [span for row in rows for span in row.spans]
    assert Counter(span.node_id for span in owned) == Counter(t.node_id for t in trace.turns if t.metadata["mask_reason"] is None)
    for row in rows:
        for span in row.spans:
            assert row.ids[: span.end].tolist() == total(by_id[span.node_id])
            assert row.mask[span.start : span.end].all()
        assert int(row.mask.sum()) == sum(span.end - span.start for span in row.spans)


def judge_replies(harness: Harness, trace: TrainingTrace) -> None:
    """Each reply reads as its turn's tokens decode, and what was only appended to kept them."""
    turns = list(trace.turns)
    found, calls_of, body_of = [], {}, {}
    for wire, body, reply in harness.got:
        turn = next(turn for turn in turns if turn.response == reply)
        found.append((reply, turn))
        assert {key: turn.request[key] for key in body} == body
        ids = turn.completion_token_ids.tolist()
        message = harness.engine.parse(harness.engine.tokenizer.decode(ids[:-1] if ids[-1] == END else ids), turn.request.get("tools"))
        text, calls = wire.read(reply)
        calls_of[id(reply)], body_of[id(reply)] = calls, body
        assert text == (message["content"] or "")
        assert [args for _, _, args in calls] == [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    used = {turn.metadata["parent"] for turn in turns} | {turn.metadata["continues"] for turn in turns}
    turn_of = {id(reply): turn for reply, turn in found}
    for reply in harness.retried:
        assert turn_of[id(reply)].node_id in used or turn_of[id(reply)].metadata["mask_reason"] in ("retry", "discarded")
    by_id = {turn.node_id: turn for turn in turns}
    for before, after in harness.appended:
        first, second = turn_of[id(before)], turn_of[id(after)]
        continued = by_id[second.metadata["continues"]]
        # Of twins, equal answers to one request, only the id of a call tells which one the harness has, where it sends that back.
        told = any(call_id in json.dumps(body_of[id(after)]) for call_id, _, _ in calls_of[id(before)])
        twins = visible(first) == visible(continued) and not told
        assert continued is first or twins, (first.response, continued.response)
        assert second.metadata["fork_cause"] is None and second.metadata["parent"] is not None, second.metadata
        # Its parent, unless a twin that ended by itself holds what a cut answer was given: then the twin's tokens reach further.
        assert total(by_id[second.metadata["parent"]])[: len(total(continued))] == total(continued), second.metadata


def visible(turn: TrainingTurn) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """What an answer says, without its thinking and the ids of its calls."""
    (wire,) = [wire for wire in WIRES if wire.__name__.lower() == turn.metadata["dialect"]]
    text, calls = wire.read(turn.response)
    return text.strip(), [(name, arguments) for _, name, arguments in calls]


def judge_prompts(harness: Harness, trace: TrainingTrace) -> None:
    """After a kept answer the prompt says what the engine's plain render of the request says, to the character."""
    renders = [harness.engine.template(body) for body in harness.engine.bodies("/render")]
    by_id = {turn.node_id: turn for turn in trace.turns}
    for turn in trace.turns:
        if turn.metadata["continues"] is None or turn.metadata["fork_cause"] is not None:
            assert harness.engine.tokenizer.decode(turn.prompt_token_ids.tolist()) in renders
            continue
        before = total(by_id[turn.metadata["continues"]])
        tail = harness.engine.tokenizer.decode(turn.prompt_token_ids.tolist()[len(before) :])
        assert tail.startswith("\n<|im_start|>" if before[-1] == END else "<|im_end|>\n<|im_start|>")
        assert any(render.endswith(tail) for render in renders)


async def play_all(served: Served, engine: FakeEngine, seeds: Iterable[int], restart: Any = None) -> None:
    for seed in seeds:
        try:
            await play(served, engine, seed, restart)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("sequences", [SEQUENCES, pytest.param(10 * SEQUENCES, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
async def test_random_harnesses(serve: Serve, engine: FakeEngine, sequences: int) -> None:
    await play_all(await serve(engine.url), engine, range(sequences))


@pytest.mark.parametrize("sequences", [SEQUENCES // 4, pytest.param(10 * SEQUENCES, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
async def test_random_harnesses_whose_thinking_is_kept(serve: Serve, sequences: int) -> None:
    """The template shows no earlier thinking and clients forget it; still nothing that was only appended to loses an id."""
    async with FakeEngine(reads_thinking=True, drop_think=True) as engine:
        await play_all(await serve(engine.url), engine, range(sequences))


async def test_random_harnesses_whose_engine_reads_its_answers(serve: Serve) -> None:
    async with FakeEngine(reads_thinking=True, drop_think=True, one_call=True) as engine:
        served = await serve(engine.url)
        for seed in range(SEQUENCES // 4):
            await play_all(served, engine, [seed])
        assert served.proxy.ctx.pool.engines[0].one_call.why_left is None


async def test_random_harnesses_outlive_their_proxy(serve: Serve, engine: FakeEngine, tmp_path: Path) -> None:
    async def restart(old: Served) -> Served:
        await old.proxy.close()
        return await serve(engine.url, store=old.proxy.settings.store)

    for seed in range(20):
        await play_all(await serve(engine.url, store=tmp_path / str(seed)), engine, [seed], restart)


def _glue(monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    right = rendering.splice

    async def wrong(view: Any, messages: Any, at: int, answer: Any, full: Any) -> Any:
        ids = await right(view, messages, at, answer, full)
        ended = answer.sampled[-1] == END
        return ids if ended is cut else np.delete(ids, len(answer.total))

    monkeypatch.setattr(rendering, "splice", wrong)


def _rolled(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sampling.Engine.generate

    async def wrong(*args: Any) -> Any:
        sample = await right(*args)
        return replace(sample, ids=np.roll(sample.ids, 1))

    monkeypatch.setattr(sampling.Engine, "generate", wrong)


def _stored_short(monkeypatch: pytest.MonkeyPatch) -> None:
    right = records.turn_to_record

    def wrong(turn: Any) -> Any:
        header, arrays = right(turn)
        return header, {**arrays, "tail": arrays["tail"][:-1]}

    monkeypatch.setattr(records, "turn_to_record", wrong)


def _begins(prompt: Any, ids: Any) -> bool:
    return len(ids) <= len(prompt) and bool(np.array_equal(prompt[: len(ids)], ids))


def _shortest(graph: Any, prompt: Any, continues: Any, digest: Any) -> str | None:
    return next((name for name, turn in graph.turns.items() if _begins(prompt, turn.total)), None)


def _key_with_white_space(message: Any, *_: Any) -> bytes:
    return repr((message["role"], messages.text_of(message.get("content")))).encode()


def _trimmed(parsed: Any, stop: Any) -> Any:
    return replace(parsed, content=parsed.content and parsed.content.strip())


BUGS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "any answer is the one that is continued": lambda m: m.setattr(messages, "message_key", lambda message, *_: message["role"].encode()),
    "outer white space makes another answer": lambda m: m.setattr(messages, "message_key", _key_with_white_space),
    "the id after an ended answer is lost": lambda m: _glue(m, cut=False),
    "the id after a cut answer is lost": lambda m: _glue(m, cut=True),
    "the shortest prefix is the parent": lambda m: m.setattr(graph.TurnGraph, "parent_of", _shortest),
    "an answer that was asked for again trains": lambda m: m.setattr(graph, "_unused_reason", lambda turn, same: None),
    "a call that was left is not counted": lambda m: m.setattr(session.Session, "_end", lambda self, seq, reason: self._begun.discard(seq)),
    "the answer is trimmed": lambda m: m.setattr(sampling, "visible", _trimmed),
    "every call has the same id": lambda m: m.setattr(calls, "ToolCall", lambda _id, *rest: ToolCall("call_0", *rest)),
    "sampled ids are shifted": _rolled,
    "a stored prompt lacks its last id": _stored_short,
    "the body is not what was sent": lambda m: m.setattr(delta, "encode", lambda base, body: {"set": {**body, "model": "another"}}),
}


@pytest.mark.parametrize("bug", BUGS)
async def test_each_seeded_bug_is_found(serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    served = await serve(engine.url)
    BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError):
        await play_all(served, engine, range(SEQUENCES))


async def test_a_bug_in_keeping_thinking_is_found(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    right = rendering.append

    async def wrong(view: Any, messages: Any, at: int, answer: Any, full: Any) -> Any:
        return np.delete(await right(view, messages, at, answer, full), len(answer.total))

    monkeypatch.setattr(rendering, "append", wrong)
    async with FakeEngine(reads_thinking=True, drop_think=True) as engine:
        served = await serve(engine.url)
        with pytest.raises(AssertionError):
            await play_all(served, engine, range(SEQUENCES))
