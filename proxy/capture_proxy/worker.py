"""One of several workers: a whole proxy for the sessions that it owns, whose connections come from the front.

Invariant: a worker differs from a proxy that stands alone in where its connections come from and in nothing else. Each answer closes its
connection, so that the next request is routed by its own key. It ends when the front does.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from pathlib import Path

from aiohttp import web

from capture_proxy.admin import main_app
from capture_proxy.app import Proxy, close_after, server
from capture_proxy.handoff import HandoffServer
from capture_proxy.settings import Settings

SHUTDOWN_S = 2.0
FDS = 16
"""Connections taken in one step."""

log = logging.getLogger(__name__)


def http_path(folder: Path, index: int) -> Path:
    """The Unix socket on which the front asks worker `index` what concerns all of them."""
    return folder / f"{index}.http"


def handoff_path(folder: Path, index: int) -> Path:
    return folder / f"{index}.handoff"


async def serve_worker(settings: Settings, folder: Path, channel: socket.socket) -> None:
    """Runs until SIGTERM, or until the other end of `channel` is closed."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the terminal's; the front passes on what is meant for us
    proxy = Proxy(settings)
    app = main_app(proxy)
    app.on_response_prepare.append(close_after)
    runner = server(app, SHUTDOWN_S)
    handoff = HandoffServer(proxy, handoff_path(folder, settings.worker))
    taking: set[asyncio.Task[object]] = set()
    channel.setblocking(False)

    def take() -> None:
        try:
            data, fds, _, _ = socket.recv_fds(channel, FDS, FDS)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            loop.remove_reader(channel)
            stop.set()
        for fd in fds:
            connection = socket.socket(fileno=fd)
            connection.setblocking(False)
            task = asyncio.create_task(loop.connect_accepted_socket(_factory(runner), connection))
            taking.add(task)
            task.add_done_callback(taking.discard)

    try:
        await runner.setup()
        path = http_path(folder, settings.worker)
        path.unlink(missing_ok=True)
        await web.UnixSite(runner, str(path)).start()
        handoff.start()
        loop.add_reader(channel, take)
        print(f"capture-proxy worker {settings.worker} is ready", flush=True)
        await stop.wait()
    finally:
        await handoff.close()
        await proxy.close()
        await runner.cleanup()


def _factory(runner: web.AppRunner) -> web.Server:
    assert runner.server is not None
    return runner.server
