"""Request bodies: every coding that clients use, the limit on the expanded size, and bombs that cost no memory."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from backports.zstd import CompressionParameter, ZstdCompressor
from backports.zstd import compress as zstd
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_helpers import ADMIN_KEY, BASH, USER, Serve, Served
from wires import WIRES, Wire

from capture_proxy import bodies

ASK: dict[str, Any] = {"model": "m", "messages": USER, "tools": [BASH]}
MB = 1 << 20


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", bare_deflate),
    "zstd": ("zstd", zstd),
}


@pytest.mark.parametrize("name", CODINGS)
@given(data=st.binary(min_size=1) | st.integers(1, 300_000).map(lambda n: b"ab" * n))
@settings(max_examples=30, deadline=None)
def test_a_body_comes_back_from_every_coding_and_counts_as_expanded(name: str, data: bytes) -> None:
    coding, pack = CODINGS[name]
    packed = pack(data)
    assert bodies.expand(packed, coding, len(data)) == data
    for raw, limit, status, word in (
        (packed, len(data) - 1, 413, "larger than"),
        (packed[:-1], len(data), 400, "cut short"),
        (packed + b"x", len(data), 400, "after its end"),
    ):
        with pytest.raises(bodies.BodyRefused, match=word) as refused:
            bodies.expand(raw, coding, limit)
        assert refused.value.status == status


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_i14_a_bomb_is_refused_without_memory_for_it(coding: str) -> None:
    """512 MB of nothing against the real limit of 256 MB."""
    if coding == "gzip":
        packer = zlib.compressobj(1, wbits=16 + zlib.MAX_WBITS)
        bomb = b"".join([packer.compress(bytes(MB)) for _ in range(512)]) + packer.flush()
    else:
        writer = ZstdCompressor(options={CompressionParameter.window_log: 20})
        bomb = b"".join([writer.compress(bytes(MB)) for _ in range(512)]) + writer.flush()
    assert len(bomb) < 3 * MB
    tracemalloc.start()
    try:
        with pytest.raises(bodies.BodyRefused, match="larger than"):
            bodies.expand(bomb, coding, 256 * MB)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * bodies.KEPT


def test_i14_a_zstd_frame_cannot_ask_for_a_big_window() -> None:
    options = {CompressionParameter.window_log: 25, CompressionParameter.content_size_flag: 0}
    frame = zstd(random.Random(1).randbytes(MB) * 40, options=options)
    with pytest.raises(bodies.BodyRefused, match="does not expand") as refused:
        bodies.expand(frame, "zstd", 256 * MB)
    assert refused.value.status == 400


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", CODINGS)
async def test_compressed_calls_are_calls_in_every_dialect(served: Served, engine: FakeEngine, name: str, wire: type[Wire]) -> None:
    coding, pack = CODINGS[name]
    created = await served.session()
    talk = wire("You are an agent.", True)
    talk.say("List the files.")
    headers = {"Authorization": f"Bearer {created.api_key}", "Content-Encoding": coding}
    async with served.http.post(served.url + talk.path, data=pack(json.dumps(talk.body()).encode()), headers=headers) as response:
        assert response.status == 200
        assert "Content-Encoding" not in response.headers
        assert talk.read(await response.json())[0] == "ok"
    trace = await served.admin.trace(created.session_id)
    assert {key: trace.turns[0].request[key] for key in talk.body()} == talk.body()


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "gzip,zstd", "rot13"])
async def test_i14_unknown_and_nested_codings_are_415_by_name(served: Served, engine: FakeEngine, coding: str) -> None:
    created = await served.session()
    data = gzip.compress(gzip.compress(json.dumps(ASK).encode()))
    headers = {"Authorization": f"Bearer {created.api_key}", "Content-Encoding": coding}
    async with served.http.post(served.url + "/v1/chat/completions", data=data, headers=headers) as response:
        assert response.status == 415
        assert "send gzip, deflate or zstd, once" in (await response.json())["error"]["message"]
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"refused": 1}


async def test_i14_a_bomb_leaves_other_sessions_alone(engine: FakeEngine, serve: Serve) -> None:
    served = await serve(engine.url, body_limit=16 * MB)
    bomb = gzip.compress(b" " * (200 * MB), compresslevel=1)
    agent, _ = await served.agent()
    created = await served.session()
    headers = {"Authorization": f"Bearer {created.api_key}", "Content-Encoding": "gzip"}
    await agent.ask()
    async with served.http.post(served.url + "/v1/chat/completions", data=bomb, headers=headers) as response:
        await agent.ask({"role": "user", "content": "go on"})
        assert response.status == 413
    assert (await served.admin.status(created.session_id))["calls_by_reason"] == {"refused": 1}


async def test_admin_bodies_may_be_compressed_too(served: Served) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Encoding": "gzip"}
    async with served.http.post(served.url + "/sessions", data=gzip.compress(b'{"metadata": {"a": 1}}'), headers=headers) as response:
        assert response.status == 201
    async with served.http.post(served.url + "/sessions", data=b"nothing", headers=headers) as response:
        assert response.status == 400
        assert "gzip" in (await response.json())["error"]["message"]
