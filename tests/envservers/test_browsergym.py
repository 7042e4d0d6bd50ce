"""The browser example: whole games in a real Chromium over WebSockets, through the real loop and proxy; what the browser cannot reach."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import http.server
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import train_browsergym
from environments.bench import Bench, call
from envs.browsergym_env import BrowserGymAction, BrowserGymEnv, chromium
from envs.browsergym_env.chromium import PROGRAM, BrowserGone, Chromium
from envs.browsergym_env.page import ActionError, parsed
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_rl.errors import Cause
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.openenv_servers import openenv_server

needs_browser = pytest.mark.skipif(bool(chromium.missing()), reason=chromium.missing() or "all is there")


@contextlib.contextmanager
def serving() -> Iterator[str]:
    with openenv_server(app=train_browsergym.APP, sessions=8, env={"BROWSERGYM_MAX_STEPS": "4"}) as url:
        yield url


@pytest.fixture(scope="module")
def pages() -> Iterator[str]:
    with serving() as url:
        yield url


def prepared(bench: Bench, url: str, tmp_path: Path) -> Any:
    """The example's own factory, in front of the test's proxy and engine."""
    options = train_browsergym.parse(["--dataset-size", "8", "--output-dir", str(tmp_path / "run"), "--model", "m"])
    factory = train_browsergym.trainer(options, url).factory
    factory.bind(bench.services())
    return factory


def children() -> dict[int, set[int]]:
    """Of every process, those that it has started."""
    found: dict[int, set[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), set()).add(int(path.parent.name))
    return found


def below(process: int, word: str) -> set[int]:
    """The process's descendants whose command line has the word."""
    tree, found, left = children(), set(), [process]
    while left:
        for child in tree.get(left.pop(), ()):
            left.append(child)
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{child}/cmdline").read_text():
                    found.add(child)
    return found


def alive(processes: set[int]) -> set[int]:
    return {process for process in processes if Path(f"/proc/{process}").exists()}


async def gone(processes: set[int]) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(30):
        while alive(processes):
            await asyncio.sleep(0.05)


@needs_browser
async def test_a_solvers_games_have_the_full_reward(bench: Bench, pages: str, tmp_path: Path):
    factory = prepared(bench, pages, tmp_path)
    rows = factory.prompt_rows()[:4]
    assert {row["task_name"] for row in rows} == set(train_browsergym.TASKS)
    scripts = [factory.demonstration(row) for row in rows]
    for session in await asyncio.gather(*(bench.play(factory, row, script=script) for row, script in zip(rows, scripts, strict=True))):
        assert (session.verify().env_reward, session.outcome().tool_failure_count) == (1.0, 0), session.outcome().completion
    await factory.close()


@needs_browser
async def test_a_policy_sees_the_page_and_what_did_not_work_and_has_no_reward_for_a_wrong_end(bench: Bench, pages: str, tmp_path: Path):
    factory = prepared(bench, pages, tmp_path)
    row = next(row for row in factory.prompt_rows() if row["task_name"] == "enter-text")
    solved = [json.dumps(turn["tool_calls"][0]) for turn in factory.demonstration(row)[:-1]]
    text, submit = json.loads(solved[0])["arguments"]["text"], json.loads(solved[1])["arguments"]["bid"]
    bench.engine.say(call("fill", bid="99", text=text))
    bench.engine.say(call("fill", bid=json.loads(solved[0])["arguments"]["bid"], text=text.lower()))
    bench.engine.say(call("click", bid=submit))
    bench.engine.say(call("click", bid=submit))
    session = await bench.play(factory, row)
    assert session.verify().env_reward == 0.0
    first, error, filled, over, after = bench.prompts()[:5]
    assert f'Goal: Enter "{text}" into the text field' in first and "textbox 'Text'" in first
    assert "there is no element '99'" in error.removeprefix(first)
    assert f"value='{text.lower()}', focused" in filled.removeprefix(error)
    assert "The task is over." in over.removeprefix(filled)
    assert (session.outcome().tool_failure_count, "The task is over." in after.removeprefix(over)) == (1, True)
    await factory.close()


class Kept:
    """As TRL's example has it: one synchronous client for all games, from before the first."""

    url = ""

    def __init__(self) -> None:
        self.client = BrowserGymEnv(base_url=type(self).url).sync()
        self.reward = 0.0

    def reset(self, **columns: Any) -> str:
        self.reward = 0.0
        return self.client.reset(task_name="click-test").observation.axtree_txt

    def click(self, bid: str) -> str:
        """Click.

        Args:
            bid: What.
        """
        result = self.client.step(BrowserGymAction(action_str=f"click({bid!r})"))
        self.reward = float(result.done and (result.reward or 0) > 0)
        return result.observation.axtree_txt


@needs_browser
async def test_a_class_as_the_seed_writes_it(bench: Bench, pages: str):
    Kept.url = pages
    factory = bench.factory(Kept, reward_funcs=lambda environments, **columns: [each.reward for each in environments])
    rewards = []
    for bid in ("1", "2", "1"):
        bench.engine.say(call("click", bid=bid))
        rewards.append((await bench.play(factory)).verify().env_reward)
    assert (rewards, factory.kinds[""].made) == ([1.0, 0.0, 1.0], 1)
    await factory.close()


@needs_browser
def test_a_seed_is_the_same_page_in_every_session_and_the_goal_differs_between_seeds(pages: str):
    with BrowserGymEnv(base_url=pages).sync() as one, BrowserGymEnv(base_url=pages).sync() as other:
        for task in ("click-button", "enter-text", "choose-list"):
            views = [
                (one.reset(task_name=task, seed=seed).observation, other.reset(task_name=task, seed=seed).observation) for seed in range(6)
            ]
            assert all((a.goal, a.axtree_txt) == (b.goal, b.axtree_txt) for a, b in views)
            assert len({a.goal for a, _ in views}) > 2


@needs_browser
def test_a_game_ends_at_its_last_action_and_says_what_it_does_not_know(pages: str):
    with BrowserGymEnv(base_url=pages).sync() as client:
        client.reset(task_name="click-button", seed=1)
        results = [client.step(BrowserGymAction(action_str=action)) for action in ("noop()", "goto('x')", "click()", "import os")]
        assert [result.done for result in results] == [False, False, False, True]
        assert [result.reward for result in results] == [0.0] * 4
        errors = [result.observation.error for result in results]
        assert errors[0] == "" and [result.observation.last_action_error for result in results] == [False, True, True, True]
        assert "there is no action goto; known: click, fill" in errors[1]
        assert errors[2] == "click takes 1 arguments, not 0" and "'import os' is no action" in errors[3]
        right = re.search(
            r"\[(\d+)\] button '{}'".format(re.findall('"(.+)"', results[3].observation.goal)[0]), results[3].observation.axtree_txt
        )
        late = client.step(BrowserGymAction(action_str=f"click('{right[1]}')"))  # the right button, too late
        assert (late.reward, late.done, late.observation.error) == (0.0, True, "the task is over")
        assert (client.state().step_count, client.state().cum_reward) == (4, 0.0)
        with pytest.raises(RuntimeError, match="there is no task 'none'; known: choose-list, click-button, click-test, enter-text"):
            client.reset(task_name="none")


@needs_browser
def test_keys_go_where_the_focus_is_and_a_covered_button_is_not_reached(tmp_path: Path):
    from envs.browsergym_env.page import Page

    files = len(os.listdir("/proc/self/fd"))
    browser = Chromium(make_page(tmp_path, "<input><button onclick='hit = 1'>Under</button><div id=lid></div><script>hit = 0</script>"))
    try:
        browser.open("a.html")
        page = Page(browser)
        assert "[1] textbox ''" in page.text() and "[2] button 'Under'" in page.text()
        page.act("fill('1', 'one')")
        page.act("send_keys(' two')")
        page.act("send_keys('Backspace')")
        assert "value='one tw', focused" in page.text()
        page.act("send_keys('Tab')")
        page.act("send_keys('Enter')")
        assert browser.evaluate("hit") == 1
        browser.evaluate("hit = 0; lid.style = 'position: fixed; inset: 0'; null")
        page.act("click('2')")
        assert browser.evaluate("hit") == 0
        for wrong in ("fill('2', 'x')", "select_option('1', 'x')", "click('7')", "scroll('left')"):
            with pytest.raises(ActionError):
                page.act(wrong)
    finally:
        browser.close()
    assert len(os.listdir("/proc/self/fd")) == files


def make_page(folder: Path, body: str) -> Path:
    (folder / "pages").mkdir()
    (folder / "pages" / "a.html").write_text(f"<!doctype html><title>a</title><body>{body}</body>")
    return folder / "pages"


class Counting(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@needs_browser
def test_the_browser_reaches_no_server_and_no_file_but_its_pages(tmp_path: Path):
    pages = make_page(tmp_path, "Hello")
    secret = tmp_path / "secret.html"
    secret.write_text("secret")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Counting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    assert httpx.get(url).status_code == 204 and Counting.asked == 1
    browser = Chromium(pages)
    try:
        browser.open("a.html")
        fetch = f"fetch({url!r}, {{mode: 'no-cors'}}).then(() => 'reached', () => 'refused')"
        assert browser.call("Runtime.evaluate", expression=fetch, awaitPromise=True, returnByValue=True)["result"]["value"] == "refused"
        assert browser.call("Page.navigate", url=url)["errorText"] == "net::ERR_CONNECTION_REFUSED"
        assert Counting.asked == 1
        assert browser.call("Page.navigate", url=secret.as_uri())["errorText"] == "net::ERR_FILE_NOT_FOUND"
        assert browser.call("Page.navigate", url="file:///etc/passwd")["errorText"] == "net::ERR_FILE_NOT_FOUND"
        assert "errorText" not in browser.call("Page.navigate", url="file:///pages/a.html")
    finally:
        browser.close()
        server.shutdown()
        server.server_close()


@needs_browser
async def test_the_browser_is_gone_when_the_environment_is_left(pages: str):
    environment = train_browsergym.environment(pages)()
    with environment:
        await asyncio.to_thread(environment.reset, task_name="click-test", seed=0)
        running = below(os.getpid(), PROGRAM)
        assert running
    await gone(running)


@needs_browser
async def test_the_browser_is_gone_when_its_server_is_killed():
    with serving() as url:
        client = BrowserGymEnv(base_url=url).sync()
        await asyncio.to_thread(client.reset, task_name="click-test")
        (server,) = (process for process in below(os.getpid(), train_browsergym.APP) if below(process, PROGRAM))
        running = below(server, PROGRAM)
        os.kill(server, signal.SIGKILL)
        await gone(running)
        with contextlib.suppress(Exception):
            await asyncio.to_thread(client.close)


@needs_browser
async def test_a_game_whose_browser_dies_is_lost_and_not_scored(bench: Bench, pages: str, tmp_path: Path):
    factory = prepared(bench, pages, tmp_path)
    before = below(os.getpid(), PROGRAM)

    bench.engine.say(call("noop"), delay_s=1.0)
    playing = asyncio.create_task(bench.play(factory))
    while not bench.engine.bodies("/generate"):
        await asyncio.sleep(0.02)
    for process in below(os.getpid(), PROGRAM) - before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    with pytest.raises(RolloutFailure) as caught:
        await playing
    assert caught.value.cause is Cause.ENVIRONMENT_LOST
    row = factory.prompt_rows()[0]
    session = await bench.play(factory, row, script=factory.demonstration(row))  # the next game has a browser of its own
    assert session.verify().env_reward == 1.0
    await factory.close()


@needs_browser
def test_a_browser_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = below(os.getpid(), PROGRAM)
    browser = Chromium(make_page(tmp_path, "Hello"))
    try:
        browser.open("a.html")
        running = below(os.getpid(), PROGRAM) - before
        for process in running:
            os.kill(process, signal.SIGSTOP)
        monkeypatch.setattr(chromium, "TIMEOUT_S", 0.5)
        monkeypatch.setattr(chromium, "CLOSE_S", 0.5)
        started = time.monotonic()
        with pytest.raises(BrowserGone, match=r"did not answer Runtime\.evaluate within 0\.5 s"):
            browser.evaluate("1")
        assert time.monotonic() - started < 10
    finally:
        browser.close()
    assert running
    asyncio.run(gone(running))
    with pytest.raises(BrowserGone, match="was closed"):
        browser.evaluate("1")


@needs_browser
def test_a_browser_that_cannot_start_says_why_and_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(chromium, "PROGRAM", "/usr/bin/false")
    with pytest.raises(BrowserGone, match=r"the browser ended (before|during) Target\.createTarget: it said nothing"):
        Chromium(tmp_path)
    monkeypatch.setattr(chromium, "_FLAGS", ["x" * (1 << 22)])
    with pytest.raises(OSError, match="Argument list too long"):
        Chromium(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == files


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = "chromium-headless-shell is missing: apt-get install chromium-headless-shell; bwrap is missing: apt-get install bubblewrap"
    with pytest.raises(BrowserGone, match=wanted):
        Chromium(tmp_path)


def test_the_flags_reach_the_config(tmp_path: Path):
    wanted = [
        "--vllm-mode",
        "server",
        "--vllm-server-url",
        "http://box:8000",
        "--per-device-batch-size",
        "16",
        "--browsers",
        "3",
        "--warm-start",
    ]
    options = train_browsergym.parse([*wanted, "--env-host", "http://pages:1", "--output-dir", str(tmp_path / "run"), "--model", "m"])
    config = train_browsergym.trainer(options, options.env_url).config
    assert (options.env_url, config.engine.url, config.warmup.enabled) == ("http://pages:1", "http://box:8000", True)
    assert (config.rollout.max_concurrent_rollouts, config.rollout.groups_per_step, config.rollout.max_calls) == (3, 2, 11)


@settings(deadline=None)
@given(st.sampled_from(["click", "fill", "noop"]), st.lists(st.text(), max_size=3))
def test_an_action_is_read_as_python_writes_it(name: str, texts: list[str]):
    assert parsed(f"{name}({', '.join(map(repr, texts))})") == (name, texts)


@settings(deadline=None)
@given(st.text())
def test_what_is_no_action_is_the_policys_error_and_nothing_is_run(text: str):
    try:
        name, arguments = parsed(text)
    except ActionError:
        return
    tree = ast.parse(text.strip(), mode="eval").body
    assert isinstance(tree, ast.Call) and name == tree.func.id and len(arguments) == len(tree.args)


@pytest.mark.parametrize(
    "text", ["click", "click(3)", "a.b('x')", "click(bid='3')", "click(f'{1}')", "click(*'ab')", "click('1'); noop()", "(" * 500, "\0"]
)
def test_no_other_python_is_an_action(text: str):
    with pytest.raises(ActionError, match="is no action"):
        parsed(text)
