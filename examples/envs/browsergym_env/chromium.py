"""A headless Chromium with one page, shut off from everything but the folder of pages that it is given.

Invariant: the browser has no network (an empty network namespace; it is spoken to over a pair of pipes), sees no files but the system's
libraries and its pages, and keeps its profile in memory. It is gone when it is closed, and when the process or thread that started it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

PROGRAM = "chromium-headless-shell"
INSTALL = {PROGRAM: f"apt-get install {PROGRAM}", "bwrap": "apt-get install bubblewrap"}
TIMEOUT_S = 60.0
"""For each answer; a browser on a busy machine may take its time to start."""
CLOSE_S = 5.0
_ABOVE_THE_BROWSERS = 10
"""File descriptors from here on: the browser reads 3 and writes 4."""
_VIEW = ["--ro-bind", "/usr", "/usr", "--ro-bind", "/etc/fonts", "/etc/fonts", "--proc", "/proc", "--dev", "/dev"]
_LINKS = [word for name in ("bin", "lib", "lib64", "sbin") for word in ("--symlink", f"usr/{name}", f"/{name}")]
_FLAGS = [
    "--remote-debugging-pipe",
    "--user-data-dir=/profile",
    "--no-sandbox",  # the sandbox is the one that it runs in; its own would want privileges there
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
]


def missing() -> str:
    """What is to be installed before a browser can run; empty if nothing is."""
    return "; ".join(f"{name} is missing: {remedy}" for name, remedy in INSTALL.items() if shutil.which(name) is None)


class BrowserError(Exception):
    """The browser refused a command."""


class BrowserGone(Exception):
    """The browser has ended or does not answer: this game cannot be told from another."""


class Chromium:
    """For one thread. `pages` is a folder; `open("a.html")` shows that page of it. Raises BrowserGone."""

    def __init__(self, pages: Path) -> None:
        lacking = missing()
        if lacking:
            raise BrowserGone(lacking)
        self._number = 0
        self._received = b""
        self._events: list[str] = []
        self._session: str | None = None
        self._pid: int | None = None
        self._held = contextlib.ExitStack()
        try:
            with contextlib.ExitStack() as its:
                self._words = _kept(self._held, os.memfd_create("the browser's words"))
                there, self._to = _pipe(its, self._held)
                self._from, back = _pipe(self._held, its)
                os.set_blocking(self._to, False)
                actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]
                actions += [
                    (os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate((self._words, self._words, there, back), start=1)
                ]
                self._pid = os.posix_spawnp("bwrap", _command(pages), dict(os.environ), file_actions=actions)
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            self.call("Page.enable")
            self.call("Inspector.enable")
        except BaseException:
            self.close()
            raise

    def open(self, page: str) -> None:
        self._events.clear()
        failure = self.call("Page.navigate", url=f"file:///pages/{page}").get("errorText")
        if failure:
            raise BrowserGone(f"{page}: {failure}")
        deadline = time.monotonic() + TIMEOUT_S
        while "Page.loadEventFired" not in self._events:
            self._events.append(str(self._message(deadline, f"{page} to load").get("method")))

    def evaluate(self, expression: str) -> Any:
        """Its value, as JSON has it. Raises BrowserError where the page throws."""
        return self._value(self.call("Runtime.evaluate", expression=expression, returnByValue=True))

    def apply(self, node: int, function: str, *arguments: Any) -> Any:
        """The value of a function whose `this` is the element. Raises BrowserError where it throws or the element is gone."""
        found = self.call("DOM.resolveNode", backendNodeId=node)["object"]["objectId"]
        values = [{"value": argument} for argument in arguments]
        answer = self.call("Runtime.callFunctionOn", objectId=found, functionDeclaration=function, arguments=values, returnByValue=True)
        return self._value(answer)

    def _value(self, answer: dict[str, Any]) -> Any:
        thrown = answer.get("exceptionDetails")
        if thrown is not None:
            raise BrowserError(str(thrown.get("exception", {}).get("description") or thrown.get("text")).splitlines()[0])
        return answer["result"].get("value")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the DevTools protocol. Raises BrowserError, or BrowserGone after TIMEOUT_S without an answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        deadline = time.monotonic() + TIMEOUT_S
        self._send(json.dumps(message).encode() + b"\0", deadline, method)
        while True:
            answer = self._message(deadline, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(str(answer["error"].get("message")))
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(str(answer.get("method")))

    def _send(self, data: bytes, deadline: float, about: str) -> None:
        if self._pid is None:
            raise BrowserGone("the browser was closed")
        try:
            while data:
                _, ready, _ = select.select([], [self._to], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise BrowserGone(f"the browser did not take {about} within {TIMEOUT_S:g} s")
                data = data[os.write(self._to, data) :]
        except BrokenPipeError:
            raise BrowserGone(f"the browser ended before {about}: {self._last_words()}") from None

    def _message(self, deadline: float, about: str) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise BrowserGone(f"the browser did not answer {about} within {TIMEOUT_S:g} s")
            data = os.read(self._from, 1 << 16)
            if not data:
                raise BrowserGone(f"the browser ended during {about}: {self._last_words()}")
            self._received += data
        message, self._received = self._received.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        if found.get("method") == "Inspector.targetCrashed":
            raise BrowserGone(f"the page crashed during {about}")
        return found

    def _last_words(self) -> str:
        words = os.pread(self._words, 1 << 20, 0).decode(errors="replace")
        lines = [line.strip() for line in words.splitlines() if line.strip()]
        return " | ".join(lines[-2:])[-300:] or "it said nothing"

    def close(self) -> None:
        """Idempotent. It ends when its pipe does; one that does not is killed, and with it all that it has started."""
        pid, self._pid = self._pid, None
        self._held.close()
        if pid is None:
            return
        deadline = time.monotonic() + CLOSE_S
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.02)


def _command(pages: Path) -> list[str]:
    sandbox = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
    view = [*_VIEW, *_LINKS, "--tmpfs", "/tmp", "--tmpfs", "/profile", "--ro-bind", str(pages.resolve()), "/pages"]
    variables = ["--clearenv", "--setenv", "HOME", "/profile", "--setenv", "PATH", "/usr/bin:/bin"]
    return [*sandbox, *view, *variables, "--", PROGRAM, *_FLAGS, "about:blank"]


def _kept(by: contextlib.ExitStack, end: int) -> int:
    """A file descriptor, closed with that stack."""
    by.callback(os.close, end)
    return end


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """(reading end, writing end), each closed with its stack, and neither where the browser wants its own."""
    with contextlib.ExitStack() as low:
        reading, writing = (_kept(low, end) for end in os.pipe())
        return (
            _kept(reader, fcntl.fcntl(reading, fcntl.F_DUPFD_CLOEXEC, _ABOVE_THE_BROWSERS)),
            _kept(writer, fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, _ABOVE_THE_BROWSERS)),
        )
