"""Measures the capture proxy beside OpenEnv's capture server and a direct connection, and writes a report.

`python -m harness_rl.bench.capture REPORT.md`. CPU is the server process's own user + system time, from /proc; engine and agents are
processes of their own. What is measured alternates between the servers, so that the machine's noise meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness_rl.bench.capture import ours
from harness_rl.bench.capture.conversation import Plan
from harness_rl.bench.capture.report import DIRECT, OURS, READ, SHARES, THEIRS, Measured, report
from harness_rl.processes import Child, spawn

ADMIN_KEY = "bench-admin-key-0123456789"
SESSIONS, TURNS = 4, 8
"""Of one CPU measurement: conversations at once, and calls of each."""


@dataclass
class Server:
    """Where agents call, and what is measured there."""

    name: str
    url: str
    child: Child | None
    """None: the engine itself."""

    def create(self, count: int) -> list[str]:
        """Keys of new sessions."""
        return [self.session()[1] for _ in range(count)]

    def session(self) -> tuple[str, str]:
        """Id and key of a new session."""
        if self.child is None:
            return "", "none"
        body = {"sampling": {"temperature": 1.0}}
        request = urllib.request.Request(
            self.url + "/sessions", json.dumps(body).encode(), {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            created = json.load(answer)
        return created["session_id"], created.get("api_key", created["session_id"])

    def cpu_s(self) -> float:
        """User + system seconds of the process so far: the time that its threads ran, in nanoseconds where `stat` counts ticks."""
        assert self.child is not None
        tasks = Path(f"/proc/{self.child.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def rss(self) -> int:
        """Bytes resident."""
        assert self.child is not None
        status = Path(f"/proc/{self.child.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024


@asynccontextmanager
async def running(name: str, argv: list[str], folder: Path) -> AsyncIterator[tuple[Child, str]]:
    """A server and the address that the last word of its first line names."""
    child = await spawn(name, argv, log_path=folder / f"{name}.log", stdout=subprocess.PIPE)
    try:
        assert child.process.stdout is not None
        line = await asyncio.wait_for(child.process.stdout.readline(), 60)
        if not line:
            raise SystemExit(f"bench: {name} ended: {child.last_words()}")
        yield child, line.decode().split()[-1]
    finally:
        await child.stop()


@asynccontextmanager
async def openenv_server(engine: str, folder: Path) -> AsyncIterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    child = await spawn("openenv", [*peer(), "serve", engine, str(port)], log_path=folder / "openenv.log")
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                await asyncio.to_thread(urllib.request.urlopen, url + "/health", None, 5)
                break
            except OSError:
                if not child.alive or time.monotonic() > deadline:
                    raise SystemExit(f"bench: OpenEnv's capture server does not answer: {child.last_words()}") from None
                await asyncio.sleep(0.2)
        yield Server(THEIRS, url, child)
    finally:
        await child.stop()


def peer() -> list[str]:
    python = Path(__file__).parents[3] / ".venv-openenv/bin/python"
    if not python.exists():
        raise SystemExit("bench: .venv-openenv is missing; run scripts/setup.sh openenv")
    return [str(python), "-m", "harness_rl.bench.capture.peer"]


async def load(server: Server, plan: Plan, turns: int, keys: list[str], **options: Any) -> dict[str, Any]:
    """Holds conversations from another process."""
    spec = {"url": server.url + "/v1", "keys": keys, "plan": asdict(plan), "turns": turns, **options}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "harness_rl.bench.capture.load", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    out, _ = await process.communicate(json.dumps(spec).encode())
    if process.returncode:
        raise SystemExit(f"bench: the agents of {server.name} failed")
    result: dict[str, Any] = json.loads(out)
    return result


async def cpu_per_call(server: Server, size: int) -> tuple[float, float]:
    """(CPU ms of the server for one call, median latency ms)."""
    keys, before = server.create(SESSIONS), server.cpu_s() if server.child else 0.0
    done = await load(server, Plan(size), TURNS, keys)
    spent = server.cpu_s() - before if server.child else 0.0
    return 1000 * spent / (SESSIONS * TURNS), 1000 * statistics.median(done["latencies"])


async def held(server: Server, engine: str, calls: int, over_s: float, hold_s: float) -> dict[str, float]:
    """Calls that the engine holds for `hold_s`, arriving over `over_s`. One rollout each, as at the start of a large batch."""
    keys = server.create(calls)
    await asyncio.to_thread(_most, engine)
    before = server.cpu_s() if server.child else 0.0
    done = await load(server, Plan(2_000, hold_s=hold_s, head=900), 1, keys, over_s=over_s, give_up_s=over_s + hold_s + 15)
    cpu_ms = 1000 * (server.cpu_s() - before) / calls if server.child else 0.0
    added = sorted(1000 * (latency - hold_s) for latency in done["latencies"])
    most = await asyncio.to_thread(_most, engine)
    p50, p99 = (added[int(len(added) * part)] if added else float("inf") for part in (0.5, 0.99))
    return {"most": most, "unanswered": done["unanswered"], "cpu_ms": cpu_ms, "p50": p50, "p99": p99}


def _most(engine: str) -> int:
    with urllib.request.urlopen(engine + "/most", timeout=60) as answer:
        return int(json.load(answer)["most"])


async def memory(server: Server, sessions: int) -> tuple[float, float]:
    """KiB that a session costs that has not called yet, and one with eight calls of a 16k conversation behind it."""
    before = server.rss()
    keys = server.create(sessions)
    idle = server.rss() - before
    some = keys[:32]
    before = server.rss()
    await load(server, Plan(16_000), 8, some)
    return idle / sessions / 1024, (server.rss() - before) / len(some) / 1024


async def long_session(server: Server, turns: int) -> tuple[str, float, float]:
    """Session of one conversation of `turns` turns that ends at 118k ids; CPU ms and latency ms of a call."""
    session, key = server.session()
    before = server.cpu_s()
    done = await load(server, Plan(8_000), turns, [key])
    return session, 1000 * (server.cpu_s() - before) / turns, 1000 * statistics.fmean(done["latencies"])


async def of_peer(*arguments: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(*peer(), *arguments, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"bench: {' '.join(arguments)} failed in the OpenEnv environment")
    result: dict[str, Any] = json.loads(out)
    return result


@asynccontextmanager
async def capture_proxy(name: str, folder: Path, *engine_flags: str) -> AsyncIterator[tuple[Server, str]]:
    """A capture proxy before an engine of its own, and that engine's address."""
    key = folder.parent / f"{folder.name}.key"
    await asyncio.to_thread(key.write_text, ADMIN_KEY)
    module = [sys.executable, "-m"]
    async with running("engine", [*module, "harness_rl.bench.capture.engine", *engine_flags], folder) as (_, engine):
        flags = ["--engine", engine, "--model", "policy", "--store", str(folder / "store"), "--admin-key-file", str(key)]
        async with running("proxy", [*module, "capture_proxy", *flags, "--port", "0"], folder) as (child, url):
            yield Server(name, url, child), engine


async def measure(options: argparse.Namespace) -> Measured:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxy, engine = await stack.enter_async_context(capture_proxy(OURS, folder / "ours"))
        reading, _ = await stack.enter_async_context(capture_proxy(READ, folder / "reading", "--one-call"))
        direct = Server(DIRECT, engine, None)
        servers = [direct, proxy]
        if not options.alone:
            servers.append(await stack.enter_async_context(openenv_server(engine, folder)))
        out = Measured()
        out.memory = {server.name: await memory(server, options.sessions) for server in servers if server.child}
        print(out.memory, file=sys.stderr)
        called = [*servers, reading]
        for size in SHARES:
            for server in called:
                await load(server, Plan(size), TURNS, server.create(1))  # the engine computes its answers, the proxy comes to trust it
            for _ in range(options.rounds):
                for server in called:
                    out.cpu.setdefault((server.name, size), []).append(await cpu_per_call(server, size))
            print({server.name: out.cpu[server.name, size] for server in called}, file=sys.stderr)
        for server in servers:
            out.held[server.name] = await held(server, engine, options.calls, options.over_s, options.over_s + 2.0)
            print(server.name, out.held[server.name], file=sys.stderr)
        for server in servers[1:]:
            session, cpu_ms, latency_ms = await long_session(server, options.turns)
            found = []
            for _ in range(5 if server is proxy else 1):
                before = server.cpu_s()
                if server is proxy:
                    one = await asyncio.to_thread(ours.trace, server.url, ADMIN_KEY, session)
                else:
                    one = await of_peer("trace", server.url, session)
                found.append({**one, "cpu_s": one["cpu_s"] + server.cpu_s() - before})
            assert all(one["turns"] == options.turns for one in found), found
            out.long[server.name] = {**min(found, key=lambda one: one["seconds"]), "cpu_ms": cpu_ms, "latency_ms": latency_ms}
            print(server.name, out.long[server.name], file=sys.stderr)
    rewritten = [await asyncio.to_thread(ours.ingest, 100, 50_000) for _ in range(3)]
    out.ingest[OURS] = min(one["seconds"] for one in rewritten)
    if not options.alone:
        out.ingest[THEIRS] = (await of_peer("ingest", "100", "50000"))["seconds"]
    print(out.ingest, file=sys.stderr)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--alone", action="store_true", help="without OpenEnv's server")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each CPU figure")
    parser.add_argument("--calls", type=int, default=1000, help="held calls")
    parser.add_argument("--over-s", type=float, default=30.0, help="seconds over which they arrive")
    parser.add_argument("--turns", type=int, default=262, help="turns of the long session")
    parser.add_argument("--sessions", type=int, default=1000, help="sessions whose memory is measured")
    options = parser.parse_args()
    text = report(asyncio.run(measure(options)), options.calls, options.over_s)
    options.report.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
