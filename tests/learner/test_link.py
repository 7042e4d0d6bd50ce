from __future__ import annotations

import asyncio
import math
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from learner_helpers import random_rows

from harness_rl.learner import link as link_module
from harness_rl.learner.link import DTYPES, ControlLink, LearnerLink, LinkError, Message, decode_array, decode_header, encode
from harness_rl.learner.rows import rows_from_wire

names = st.text(max_size=12).filter(lambda text: text not in ("type", "arrays"))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
arrays = st.sampled_from(DTYPES).flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))


@given(st.text(), st.dictionaries(names, values, max_size=4), st.dictionaries(st.text(max_size=8), arrays, max_size=3))
@settings(max_examples=150, deadline=None)
def test_codec_round_trip(type_: str, fields: dict[str, Any], given_arrays: dict[str, Any]) -> None:
    data = b"".join(encode(Message(type_, fields, given_arrays)))
    (size,) = struct.unpack(">I", data[:4])
    decoded_type, decoded_fields, plans = decode_header(data[4 : 4 + size])
    at = 4 + size
    assert (decoded_type, decoded_fields) == (type_, fields)
    for plan in plans:
        array = decode_array(plan, data[at : at + plan.nbytes])
        at += plan.nbytes
        assert array.dtype == given_arrays[plan.name].dtype and array.shape == given_arrays[plan.name].shape
        assert array.tobytes() == given_arrays[plan.name].tobytes()
    assert at == len(data)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_a_header_or_a_link_error(data: bytes) -> None:
    try:
        decode_header(data)
    except LinkError as error:
        assert "malformed frame" in str(error)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {"name": "a", "dtype": "object", "shape": [1]},
        {"name": "a", "dtype": "int32", "shape": [-1]},
        {"name": "a", "dtype": "int32", "shape": [True]},
        {"name": 3, "dtype": "int32", "shape": []},
        {"name": "a", "dtype": "int32", "shape": [1] * 5},
        {"name": "a", "dtype": "int32", "shape": [1 << 31, 1 << 31]},
    ],
)
def test_a_bad_array_entry_is_refused(entry: object) -> None:
    with pytest.raises(LinkError, match="malformed frame"):
        decode_header(msgpack.packb({"type": "x", "arrays": [entry]}))


def test_object_arrays_cannot_be_sent() -> None:
    with pytest.raises(LinkError, match="dtype object"):
        encode(Message("x", {}, {"a": np.array([None])}))


@pytest_asyncio.fixture
async def link(tmp_path: Path) -> AsyncIterator[LearnerLink]:
    made = LearnerLink(tmp_path / "l.sock", "secret", hello_timeout_s=0.5)
    await made.start()
    yield made
    await made.close()


async def in_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(work), 20)


async def connected(link: LearnerLink) -> ControlLink:
    def work() -> ControlLink:
        client = ControlLink(link.path, "secret")
        client.hello("k", 3, 5)
        return client

    client = await in_thread(work)
    hello = await link.receive(5)
    assert hello.type == "hello" and hello.fields["step"] == 3 and "token" not in hello.fields
    return client


async def test_a_whole_step(link: LearnerLink) -> None:
    rows = random_rows(0)
    client = await connected(link)
    seen: list[Any] = []

    def learner() -> None:
        client.send("sync_begin", version="k-3")
        client.wait_for({"sync_go"}, 5)
        client.send("sync_done", version="k-3", proof={"mean_abs": math.inf}, seconds={})
        client.wait_for({"sync_ack"}, 5)
        client.send("pull", credit=2)
        batch = client.wait_for({"batch", "stop"}, 5)
        seen.extend(rows_from_wire(batch["rows"], batch.arrays))
        client.send("result", step=batch["step"], version="k-4", rows={row.row_id: "trained" for row in seen}, metrics={"loss": 0.5})
        assert client.wait_for({"batch", "stop"}, 5)["save"] is True
        client.send("bye")

    thread = threading.Thread(target=learner)
    thread.start()
    assert (await link.receive(5)).type == "sync_begin"
    await link.send("sync_go")
    assert (await link.receive(5)).type == "sync_done"
    await link.send("sync_ack")
    await link.send_batch(4, rows, 5)
    result = await link.receive(5)
    assert result["step"] == 4 and result["rows"][rows[0].row_id] == "trained"
    await link.send("stop", save=True)
    assert (await link.receive(5)).type == "bye"
    await in_thread(thread.join)
    assert [row.ids.tolist() for row in seen] == [row.ids.tolist() for row in rows]
    client.close()
    assert (await link.receive(5)).type == "closed"


async def test_credit_bounds_what_is_in_flight(link: LearnerLink) -> None:
    client = await connected(link)
    with pytest.raises(LinkError, match="asked for no batch"):
        await link.send_batch(4, random_rows(0), 0.1)
    await in_thread(lambda: client.send("pull", credit=2))
    for step in (4, 5):
        await link.send_batch(step, random_rows(0), 5)
    with pytest.raises(LinkError):
        await link.send_batch(6, random_rows(0), 0.1)

    def early_batches_are_kept() -> list[int]:
        client.send("sync_begin", version="k-3")
        client.wait_for({"sync_go"}, 5)
        return [client.wait_for({"batch"}, 5)["step"] for _ in range(2)]

    waiting = asyncio.create_task(in_thread(early_batches_are_kept))
    await link.receive(5)
    await link.send("sync_go")
    assert await waiting == [4, 5]
    client.close()


async def test_stop_comes_before_a_batch_that_waits(link: LearnerLink) -> None:
    client = await connected(link)
    await in_thread(lambda: client.send("pull", credit=2))
    await link.send_batch(4, random_rows(0), 5)
    await link.send("sync_go")
    await link.send("stop")
    assert (await in_thread(lambda: client.wait_for({"sync_go"}, 5))).type == "sync_go"
    with pytest.raises(LinkError, match="sync_ack did not come"):
        await in_thread(lambda: client.wait_for({"sync_ack"}, 0.2))
    assert (await in_thread(lambda: client.wait_for({"batch", "stop"}, 5))).type == "stop"
    client.close()


async def test_an_engine_that_was_started_again_twice_in_one_step_is_served_once_and_before_a_batch(link: LearnerLink) -> None:
    client = await connected(link)
    await in_thread(lambda: client.send("pull", credit=2))
    for step in (4, 5):
        await link.send_batch(step, random_rows(0), 5)
    await link.send("resync")
    await link.send("resync")
    await link.send("sync_go")
    assert (await in_thread(lambda: client.wait_for({"sync_go"}, 5))).type == "sync_go"
    kinds = [(await in_thread(lambda: client.wait_for({"batch", "resync"}, 5))).type for _ in range(3)]
    assert kinds == ["resync", "batch", "batch"]
    client.close()


@pytest.mark.parametrize("token", ["wrong", "", "secret "])
async def test_a_wrong_token_is_refused(link: LearnerLink, token: str) -> None:
    def work() -> None:
        client = ControlLink(link.path, token)
        with pytest.raises(LinkError, match=r"refused this learner: .* token"):
            client.hello("k", 0, 5)
        client.close()

    await in_thread(work)
    assert not link.connected


async def test_a_second_learner_is_refused_and_a_restarted_one_is_not(link: LearnerLink) -> None:
    first = await connected(link)

    def second() -> None:
        client = ControlLink(link.path, "secret")
        with pytest.raises(LinkError, match="another learner is connected"):
            client.hello("k", 0, 5)
        client.close()

    await in_thread(second)
    first.close()
    assert (await link.receive(5)).type == "closed"
    (await connected(link)).close()


def raw(link: LearnerLink, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(link.path))
        client.sendall(data)
        return client.recv(4096)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack(">I", 1 << 30), b"over the limit"),
        (struct.pack(">I", 3) + b"\xc1\xc1\xc1", b"malformed frame"),
        (b"".join(encode(Message("hello", {"token": "secret"}, {"a": np.zeros(9)}))), b"over the limit of 0"),
        (b"".join(encode(Message("pull", {"credit": 2}))), b"must be a hello"),
        (b"", b"no hello in"),
    ],
)
async def test_before_the_token_nothing_is_taken(link: LearnerLink, data: bytes, why: bytes) -> None:
    assert why in await in_thread(lambda: raw(link, data))
    assert not link.connected


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack(">I", link_module.HEADER_BYTES + 1), "over the limit"),
        (struct.pack(">I", 1) + b"\xc1", "malformed frame"),
        (struct.pack(">I", 100) + b"x", "inside a frame"),
        (b"".join(encode(Message("pull", {"credit": 99}))), "credit of 99"),
        (b"".join(encode(Message("pull", {}))), "lacks field 'credit'"),
    ],
)
async def test_a_learner_that_breaks_the_protocol_is_cut_off_with_the_reason(link: LearnerLink, data: bytes, why: str) -> None:
    client = await connected(link)
    client._socket.sendall(data)
    client.close()
    closed = await link.receive(5)
    assert closed.type == "closed" and why in closed["reason"]


async def test_waits_have_deadlines(link: LearnerLink) -> None:
    with pytest.raises(LinkError, match="no message from the learner"):
        await link.receive(0.05)
    with pytest.raises(LinkError, match="no learner is connected"):
        await link.send("sync_go")


async def test_control_that_lives_may_take_its_time(tmp_path: Path) -> None:
    """A batch may take longer to collect than any deadline; only control's silence has one."""
    link = LearnerLink(tmp_path / "m.sock", "secret", alive_s=0.05)
    await link.start()
    client, heard = await connected(link), []
    client.on_alive = lambda: heard.append("alive")
    waiting = asyncio.create_task(in_thread(lambda: client.wait_for({"batch", "resync"}, 0.4)))
    await asyncio.sleep(1.0)
    await link.send("resync")
    assert (await waiting).type == "resync" and len(heard) > 5
    link._alive_s = 60.0  # a control that hangs
    await asyncio.sleep(0.1)
    with pytest.raises(LinkError, match=r"batch did not come in 0 s"):
        await in_thread(lambda: client.wait_for({"batch"}, 0.3))
    client.close()
    await link.close()


async def test_control_that_dies_is_named(link: LearnerLink) -> None:
    client = await connected(link)
    await link.close()
    with pytest.raises(LinkError, match="control closed the connection"):
        await in_thread(lambda: client.wait_for({"batch"}, 5))


def test_paths_a_socket_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="longer than a Unix socket allows"):
        LearnerLink(tmp_path / ("x" * 120), "t")
    with pytest.raises(LinkError, match="cannot connect to control"):
        ControlLink(tmp_path / "absent.sock", "t")
