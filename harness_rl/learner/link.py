"""Control <-> learner over one Unix socket: framed messages, a token, credits, and a deadline on every wait.

Frame: u32 big-endian length, msgpack header `{"type": ..., ..., "arrays": [{"name", "dtype", "shape"}]}`, the arrays' bytes in order.
Nothing is pickled; a frame is bounded before it is read, and until a peer has shown the token it may send `HELLO_BYTES` and no array.

`LearnerLink` is control's end (asyncio); `ControlLink` the learner's (blocking). Message types: see each class.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from harness_rl.errors import LearnerError
from harness_rl.learner.rows import Row, rows_to_wire

TOKEN_ENV = "HARNESS_RL_LINK_TOKEN"
HEADER_BYTES = 64 << 20
ARRAY_BYTES = 4 << 30
HELLO_BYTES = 4096
CREDIT = 2
ALIVE_S = 20.0
"""Control says so often that it lives."""
DTYPES = ("int32", "int64", "uint8", "float32", "float64")


class LinkError(LearnerError):
    """The peer broke the protocol, refused the token, went away or missed a deadline; the message says which."""


class NoCredit(LinkError):
    """The learner asked for no batch in the time allowed; nothing was sent."""


@dataclass(frozen=True)
class Message:
    type: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        try:
            return self.fields[key]
        except KeyError:
            raise LinkError(f"message {self.type!r} lacks field {key!r}") from None


def encode(message: Message) -> list[bytes]:
    """The frame as buffers to be written one after the other. Raises LinkError over a bound or for a dtype that is not in `DTYPES`."""
    arrays = [(name, np.asarray(array, order="C")) for name, array in message.arrays.items()]
    for name, array in arrays:
        if array.dtype.name not in DTYPES:
            raise LinkError(f"message {message.type!r}: array {name!r} has dtype {array.dtype}, allowed: {', '.join(DTYPES)}")
    header = {
        **message.fields,
        "type": message.type,
        "arrays": [{"name": n, "dtype": a.dtype.name, "shape": list(a.shape)} for n, a in arrays],
    }
    packed = msgpack.packb(header, use_bin_type=True)
    _bound("header", len(packed), HEADER_BYTES)
    _bound("arrays", sum(a.nbytes for _, a in arrays), ARRAY_BYTES)
    little = (a.astype(a.dtype.newbyteorder("<"), copy=False) for _, a in arrays)
    return [struct.pack(">I", len(packed)), packed, *(a.tobytes() for a in little)]


@dataclass(frozen=True)
class ArrayPlan:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = np.dtype(self.dtype).itemsize
        for n in self.shape:
            size *= n
        return size


def decode_header(packed: bytes) -> tuple[str, dict[str, Any], list[ArrayPlan]]:
    """(type, fields, what follows). Raises LinkError for anything malformed or over a bound."""
    try:
        header = msgpack.unpackb(packed, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise LinkError(f"malformed frame: header is not msgpack ({error})") from None
    if not isinstance(header, dict) or not isinstance(header.get("type"), str) or not isinstance(header.get("arrays"), list):
        raise LinkError("malformed frame: header needs a text 'type' and a list 'arrays'")
    plans = [_plan(entry) for entry in header.pop("arrays")]
    if len({plan.name for plan in plans}) != len(plans):
        raise LinkError("malformed frame: two arrays have one name")
    _bound("arrays", sum(plan.nbytes for plan in plans), ARRAY_BYTES)
    return header.pop("type"), header, plans


def _plan(entry: Any) -> ArrayPlan:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= ARRAY_BYTES for n in shape):
        raise LinkError(f"malformed frame: array entry {entry!r:.100} needs a shape of non-negative integers")
    if not isinstance(entry.get("name"), str) or entry.get("dtype") not in DTYPES or len(shape) > 4:
        raise LinkError(
            f"malformed frame: array entry {entry!r:.100} needs a name, a dtype of {', '.join(DTYPES)} and at most 4 dimensions"
        )
    return ArrayPlan(entry["name"], entry["dtype"], tuple(shape))


def decode_array(plan: ArrayPlan, data: bytes | bytearray) -> NDArray[Any]:
    return np.frombuffer(data, dtype=np.dtype(plan.dtype).newbyteorder("<")).reshape(plan.shape)


def _bound(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise LinkError(f"malformed frame: {what} of {size} bytes is over the limit of {limit}")


class LearnerLink:
    """Control's end. One learner at a time; after it has gone another (restarted) one may connect.

        link = LearnerLink(run / "learner.sock", token); await link.start()
        hello = await link.receive(timeout=300)          # Message "hello" {lineage, step, pid}; "welcome" was sent by the link itself
        await link.send_batch(step, rows, timeout=...)   # waits for a credit
        message = await link.receive(timeout=...)        # sync_begin | sync_done | result | checkpoint | failed | bye | closed
        await link.send("sync_go"); await link.send("sync_ack"); await link.send("stop", save=True)
        await link.close()

    `pull` is consumed here as credit. `closed` (made here, field `reason`) ends one learner's messages. `alive` goes out every `alive_s`
    seconds: the learner may have to wait long, for a batch or an evaluation, and its deadlines are of control's silence.
    """

    def __init__(
        self,
        path: Path,
        token: str,
        *,
        hello_timeout_s: float = 10.0,
        write_timeout_s: float = 120.0,
        alive_s: float = ALIVE_S,
        queue: int = 64,
    ) -> None:
        if len(os.fsencode(path)) > 100:
            raise LinkError(f"socket path {path} is longer than a Unix socket allows (100 bytes); use a shorter run folder")
        self.path, self._token = path, token
        self._hello_timeout, self._write_timeout, self._alive_s = hello_timeout_s, write_timeout_s, alive_s
        self._messages: asyncio.Queue[Message] = asyncio.Queue(queue)
        self._credit = asyncio.Semaphore(0)
        self._writer: asyncio.StreamWriter | None = None
        self._sending = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        return self._writer is not None

    async def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path=str(self.path))
        self.path.chmod(0o600)

    async def receive(self, timeout: float | None) -> Message:
        """The learner's next message. Raises LinkError when none comes in `timeout` seconds (None: it is waited for)."""
        try:
            return await asyncio.wait_for(self._messages.get(), timeout)
        except TimeoutError:
            raise LinkError(f"no message from the learner in {timeout:.0f} s") from None

    async def send(self, type_: str, arrays: Mapping[str, NDArray[Any]] | None = None, **fields: Any) -> None:
        writer = self._writer
        if writer is None:
            raise LinkError(f"cannot send {type_!r}: no learner is connected")
        buffers = encode(Message(type_, fields, dict(arrays or {})))
        try:
            async with self._sending, asyncio.timeout(self._write_timeout):
                for buffer in buffers:
                    writer.write(buffer)
                    await writer.drain()
        except TimeoutError:
            writer.close()
            raise LinkError(f"the learner did not take {type_!r} in {self._write_timeout:.0f} s") from None
        except OSError as error:
            raise LinkError(f"the learner went away while {type_!r} was sent: {error}") from None

    async def send_batch(self, step: int, rows: Sequence[Row], timeout: float, rollouts: int | None = None) -> None:
        """Send the rows of optimizer step `step` once the learner has granted a credit (it holds at most `CREDIT` batches). `rollouts`: see
        `Trainer.prepare`.

        Raises NoCredit when it does not in `timeout` seconds, LinkError when it has gone.
        """
        try:
            await asyncio.wait_for(self._credit.acquire(), timeout)
        except TimeoutError:
            raise NoCredit(f"the learner asked for no batch in {timeout:.0f} s") from None
        metas, arrays = rows_to_wire(rows)
        await self.send("batch", arrays, step=step, rows=metas, rollouts=rollouts)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            self._writer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            hello = await self._admit(reader)
        except LinkError as error:
            writer.write(b"".join(encode(Message("refused", {"error": str(error)}))))
            with suppress(OSError):
                await writer.drain()
            writer.close()
            self._tasks.discard(task)
            return
        self._writer, self._credit = writer, asyncio.Semaphore(0)
        reason = "the learner closed the connection"
        alive = asyncio.create_task(self._say_alive(), name="alive")
        try:
            await self.send("welcome")
            await self._messages.put(hello)
            while True:
                message = await _read(reader, HEADER_BYTES, ARRAY_BYTES)
                if message.type == "pull":
                    self._grant(message["credit"])
                else:
                    await self._messages.put(message)
        except (LinkError, OSError) as error:
            reason = str(error)
        finally:
            alive.cancel()
            self._writer = None
            writer.close()
            self._tasks.discard(task)
        await self._messages.put(Message("closed", {"reason": reason}))

    async def _say_alive(self) -> None:
        with suppress(LinkError):  # who reads from the link hears of its end
            while True:
                await asyncio.sleep(self._alive_s)
                await self.send("alive")

    async def _admit(self, reader: asyncio.StreamReader) -> Message:
        try:
            hello = await asyncio.wait_for(_read(reader, HELLO_BYTES, 0), self._hello_timeout)
        except TimeoutError:
            raise LinkError(f"no hello in {self._hello_timeout:.0f} s") from None
        token = hello.fields.pop("token", None)
        if hello.type != "hello" or not isinstance(token, str) or not hmac.compare_digest(token.encode(), self._token.encode()):
            raise LinkError("the first message must be a hello with this run's token")
        if self._writer is not None:
            raise LinkError("another learner is connected")
        return hello

    def _grant(self, credit: Any) -> None:
        if not isinstance(credit, int) or isinstance(credit, bool) or not 1 <= credit <= CREDIT:
            raise LinkError(f"pull asks for a credit of {credit!r}; 1 to {CREDIT} is allowed")
        for _ in range(credit):
            self._credit.release()


async def _read(reader: asyncio.StreamReader, header_limit: int, array_limit: int) -> Message:
    try:
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        _bound("header", size, header_limit)
        type_, fields, plans = decode_header(await reader.readexactly(size))
        _bound("arrays", sum(plan.nbytes for plan in plans), array_limit)
        return Message(type_, fields, {plan.name: decode_array(plan, await reader.readexactly(plan.nbytes)) for plan in plans})
    except asyncio.IncompleteReadError as error:
        cut = " inside a frame" if error.partial else ""
        raise LinkError(f"the learner closed the connection{cut}") from None


class ControlLink:
    """The learner's end: blocking, read by one thread at a time; any may send.

    Sends hello, pull, sync_begin, sync_done, result, checkpoint, failed and bye; `wait_for` returns the first message of the wanted types
    and keeps batches that come earlier. A `stop` is remembered (`stopping`) and returned by any `wait_for` that lists it.
    """

    def __init__(self, path: Path, token: str, *, connect_timeout_s: float = 30.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(connect_timeout_s)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            raise LinkError(f"cannot connect to control at {path}: {error}") from None
        self._token = token
        self._write_timeout = connect_timeout_s
        self._sending = threading.Lock()
        self._pending: deque[Message] = deque()
        self.stopping: Message | None = None
        self.on_alive: Callable[[], None] = lambda: None
        """Called within `wait_for` for each sign of life: whoever waits for this process is to hear of it."""

    def hello(self, lineage: str, step: int, timeout: float) -> None:
        self.send("hello", token=self._token, lineage=lineage, step=step, pid=os.getpid())
        answer = self.wait_for({"welcome", "refused"}, timeout)
        if answer.type == "refused":
            raise LinkError(f"control refused this learner: {answer['error']}")

    def send(self, type_: str, **fields: Any) -> None:
        frame = b"".join(encode(Message(type_, fields)))
        try:
            with self._sending:
                self._socket.settimeout(self._write_timeout)
                self._socket.sendall(frame)
        except OSError as error:
            raise LinkError(f"control went away while {type_!r} was sent: {error}") from None

    def wait_for(self, types: set[str], timeout: float) -> Message:
        """Raises LinkError when none of `types` comes and control gives no sign of life for `timeout` seconds, or for a message that is
        none of them and cannot wait (a batch, a resync and a stop can)."""
        deadline = time.monotonic() + timeout
        while True:
            if self.stopping is not None and "stop" in types:
                return self.stopping
            # Agents are held until an engine that was started again has its weights; a batch can wait.
            for message in sorted(self._pending, key=lambda message: message.type != "resync"):
                if message.type in types:
                    self._pending.remove(message)
                    return message
            message = self._receive(deadline, f"control: {' or '.join(sorted(types))} did not come in {timeout:.0f} s")
            if message.type == "alive":
                deadline = time.monotonic() + timeout
                self.on_alive()
                continue
            if message.type != "stop" and message.type in types:
                return message
            self._keep(message, " or ".join(sorted(types)))

    def read_early(self, woken: socket.socket) -> Message | None:
        """The next message, kept for `wait_for` too, or None as soon as `woken` has something to read. The caller owns the link until then.

        Raises LinkError as `wait_for` does; a message that has begun must end within the deadline of a write.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            if any(key.fileobj is woken for key, _ in selector.select()):
                return None
        message = self._receive(time.monotonic() + self._write_timeout, f"control stalled in a message for {self._write_timeout:.0f} s")
        self._keep(message, "the end of a step")
        return message

    def _keep(self, message: Message, awaited: str) -> None:
        if message.type == "stop":
            self.stopping = message
        elif message.type == "alive" or (message.type == "resync" and any(kept.type == "resync" for kept in self._pending)):
            return  # one push of the weights as they are serves all who asked for it
        elif message.type in ("batch", "resync") and len(self._pending) < CREDIT + 1:
            self._pending.append(message)  # came early, on credit
        else:
            raise LinkError(f"unexpected {message.type!r} from control while waiting for {awaited}")

    def close(self) -> None:
        self._socket.close()

    def _receive(self, deadline: float, late: str) -> Message:
        (size,) = struct.unpack(">I", self._exactly(4, deadline, late))
        _bound("header", size, HEADER_BYTES)
        type_, fields, plans = decode_header(bytes(self._exactly(size, deadline, late)))
        return Message(type_, fields, {plan.name: decode_array(plan, self._exactly(plan.nbytes, deadline, late)) for plan in plans})

    def _exactly(self, size: int, deadline: float, late: str) -> bytearray:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise LinkError(late)
            self._socket.settimeout(remaining)
            try:
                count = self._socket.recv_into(view[at:])
            except TimeoutError:
                raise LinkError(late) from None
            except OSError as error:
                raise LinkError(f"control went away: {error}") from None
            if count == 0:
                raise LinkError("control closed the connection" + (" inside a frame" if at else ""))
            at += count
        return data
