"""Images: opaque parts that reach the engine byte for byte, keep their places in spliced prompts, and are never trained around."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_engine import PAD, PADS, FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from proxy_helpers import USER, Serve, Served, assert_chain, assert_engine_saw_the_rows
from wires import WIRES, Anthropic, Chat, Gemini, Responses, Wire

from capture_proxy.images import moved

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
URL = f"data:image/png;base64,{PIXEL}"
SEE = {
    Chat: {"type": "image_url", "image_url": {"url": URL}},
    Anthropic: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
    Responses: {"type": "input_image", "image_url": URL},
    Gemini: {"inlineData": {"mimeType": "image/png", "data": PIXEL}},
}


def seen(engine: FakeEngine) -> list[list[str]]:
    """The images of each render that shows any, message by message in order."""
    out = []
    for body in engine.bodies("/render"):
        contents = [message["content"] for message in body["messages"] if isinstance(message.get("content"), list)]
        urls = [part["image_url"]["url"] for content in contents for part in content if part["type"] == "image_url"]
        out += [urls] if urls else []
    return out


async def post(served: Served, key: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    async with served.http.post(served.url + path, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
        return response.status, await response.text()


def say_with_image(wire: Wire) -> None:
    match wire:
        case Gemini():
            wire.items.append({"role": "user", "parts": [{"text": "What is this?"}, SEE[Gemini]]})
        case Responses():
            wire.items.append({"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, SEE[Responses]]})
        case _:
            wire.items.append({"role": "user", "content": [{"type": "text", "text": "What is this?"}, SEE[type(wire)]]})


def result_with_image(wire: Wire, call: Any) -> None:
    match wire:
        case Chat():
            wire.items.append({"role": "tool", "tool_call_id": call[0], "content": [SEE[Chat]]})
        case Anthropic():
            block = {"type": "tool_result", "tool_use_id": call[0], "content": [SEE[Anthropic]]}
            wire.items.append({"role": "user", "content": [block]})
        case Responses():
            wire.items.append({"type": "function_call_output", "call_id": call[0], "output": [SEE[Responses]]})
        case _:
            response = {"name": call[1], "response": {"output": "see below"}, "parts": [SEE[Gemini]]}
            wire.items.append({"role": "user", "parts": [{"functionResponse": response}]})


@pytest.mark.parametrize("kind", WIRES)
async def test_an_image_of_user_or_tool_reaches_the_engine_whole_and_its_turns_are_not_trained(
    served: Served, engine: FakeEngine, kind: type[Wire]
) -> None:
    created, wire = await served.session(), kind("You see.", True)
    wire.say("Take a picture.")
    engine.say('<tool_call>{"name": "bash", "arguments": {"command": "snap"}}</tool_call>')
    status, text = await post(served, created.api_key, kind.path, wire.body())
    assert status == 200, text
    reply = json.loads(text)
    wire.echo(reply)
    result_with_image(wire, kind.read(reply)[1][0])
    engine.say("A dot.", style="chars")
    status, text = await post(served, created.api_key, kind.path, wire.body())
    assert status == 200, text
    wire.echo(json.loads(text))
    say_with_image(wire)
    engine.say("Another dot.")
    status, text = await post(served, created.api_key, kind.path, wire.body())
    assert status == 200, text

    assert seen(engine)[0] == [URL] and seen(engine)[-1] == [URL, URL]
    trace = await served.admin.trace(created.session_id)
    assert_chain(trace)
    assert_engine_saw_the_rows(engine, trace)
    assert [turn.metadata["mask_reason"] for turn in trace.turns] == [None, "image", "image"]
    assert [bool(turn.completion_mask.any()) for turn in trace.turns] == [True, False, False]
    assert trace.turns[2].metadata["spliced"]
    # Each image's place in what was sent is where its ids stand there; nothing else is sent of it than what the engine gave.
    for body, images in zip(engine.bodies("/generate")[1:], (1, 2), strict=True):
        features, ids = body["features"], body["token_ids"]
        assert features["kwargs_data"] == {"image": [URL] * images}
        starts = [place["offset"] for place in features["mm_placeholders"]["image"]]
        assert [at for at, i in enumerate(ids) if i == PAD] == [at + n for at in starts for n in range(PADS)]
    assert "features" not in engine.bodies("/generate")[0]


@pytest.mark.parametrize("kind", WIRES)
async def test_an_engine_that_sees_no_images_says_so_in_the_agents_dialect(served: Served, engine: FakeEngine, kind: type[Wire]) -> None:
    engine.sees_images = False
    created, wire = await served.session(), kind("You see.", False)
    say_with_image(wire)
    status, text = await post(served, created.api_key, kind.path, wire.body())
    assert status == 400 and "At most 0 image(s)" in json.loads(text)["error"]["message"]
    assert engine.bodies("/generate") == []
    counts = await served.admin.status(created.session_id)
    assert counts["calls_by_reason"] == {"refused": 1}


async def test_another_image_is_another_conversation(served: Served, engine: FakeEngine) -> None:
    agent, created = await served.agent()

    def asked(data: str) -> list[dict[str, Any]]:
        return [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]}]

    agent.messages = asked("AAAA")
    engine.say("one two", style="chars")
    await agent.ask(tools=())
    answer = agent.messages[-1]
    agent.messages = [*asked("BBBB"), answer]
    await agent.ask({"role": "user", "content": "and now?"}, tools=())
    first, second = (await served.admin.trace(created.session_id)).turns
    assert second.metadata["parent"] is None and not second.metadata["spliced"]
    assert first.metadata["mask_reason"] == second.metadata["mask_reason"] == "image"


async def test_chat_capture_passes_images_on_and_does_not_train_them(serve: Serve, engine: FakeEngine) -> None:
    engine.token_routes = False
    served = await serve(engine.url)
    agent, created = await served.agent()
    await agent.ask({"role": "user", "content": [SEE[Chat]]}, tools=())
    assert engine.bodies("/v1/chat/completions")[-1]["messages"][-1]["content"] == [SEE[Chat]]
    (turn,) = (await served.admin.trace(created.session_id)).turns
    assert turn.metadata["mask_reason"] == "image"


PIECES = st.lists(st.one_of(st.just("image"), st.lists(st.integers(10, 20), max_size=4)), max_size=8)


def laid_out(pieces: list[Any], stretch: Callable[[list[int]], list[int]]) -> tuple[np.ndarray, list[dict[str, int]]]:
    ids: list[int] = []
    places = []
    for piece in pieces:
        if piece == "image":
            places.append({"offset": len(ids), "length": PADS})
            ids += [PAD] * PADS
        else:
            ids += stretch(piece)
    return np.array(ids, dtype=np.int32), places


@given(PIECES)
def test_images_keep_their_places_whatever_lies_between_them(pieces: list[Any]) -> None:
    rendered, before = laid_out(pieces, lambda piece: piece)
    sent, after = laid_out(pieces, lambda piece: [n for i in piece for n in (i, i + 50)])
    if before:
        found = moved({"mm_hashes": {}, "mm_placeholders": {"image": before}}, rendered, sent)
        assert found == {"mm_hashes": {}, "mm_placeholders": {"image": after}}


@given(PIECES.filter(lambda pieces: "image" in pieces), st.integers(0, 40))
def test_ids_of_an_image_that_the_answer_itself_sampled_are_not_taken_for_one(pieces: list[Any], at: int) -> None:
    rendered, before = laid_out(pieces, lambda piece: piece)
    sent = np.insert(rendered, min(at, len(rendered)), PAD).astype(np.int32)
    assert moved({"mm_placeholders": {"image": before}}, rendered, sent) is None
