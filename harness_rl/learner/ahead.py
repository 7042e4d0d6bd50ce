"""The next batch is read, decoded, packed and proven while the present one trains; the training thread finds it ready.

The link has one owner at a time: this thread, between the start and the end of a training step, in which the learner says and asks nothing;
else the learner's own. Whatever goes wrong with a batch here is left for its own turn, where it is an error of that step.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from harness_rl.learner.link import ControlLink, LinkError, Message
from harness_rl.learner.step import Prepared


class Ahead:
    def __init__(self, link: ControlLink, prepare: Callable[[Message], Prepared]) -> None:
        self._link, self._prepare = link, prepare
        self._ready: dict[int, Prepared] = {}

    def take(self, batch: Message) -> Prepared | None:
        """The batch as it was prepared, if it came while the one before it trained."""
        return self._ready.pop(batch["step"], None)

    @contextmanager
    def while_training(self) -> Iterator[None]:
        """Read ahead in this block. At its end what is being read or packed is finished first. Raises LinkError when the link broke."""
        failures: list[LinkError] = []
        wake, woken = socket.socketpair()
        with wake, woken:
            thread = threading.Thread(target=self._work, args=(woken, failures), name="packing")
            thread.start()
            try:
                yield
            finally:
                wake.send(b"!")
                thread.join()
        if failures:
            raise failures[0]

    def _work(self, woken: socket.socket, failures: list[LinkError]) -> None:
        try:
            while (message := self._link.read_early(woken)) is not None:
                if message.type == "batch":
                    self._try(message)
        except LinkError as error:
            failures.append(error)

    def _try(self, batch: Message) -> None:
        try:
            self._ready[batch["step"]] = self._prepare(batch)
        except Exception:  # noqa: BLE001 - the batch's own step prepares it again, and there the error is raised
            return
