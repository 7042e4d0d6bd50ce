"""`harness-rl play`: episodes of one environment by hand or by a script, and what the rewards say of them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness_rl.errors import UserError
from harness_rl.imports import load_object, load_script
from harness_rl.metrics import mean, mean_interval, strict_json
from harness_rl.sessions.byhand import Person, Played, Scripted, Turns, play_episode
from harness_rl.sessions.environments import EnvironmentKind
from harness_rl.sessions.openenv_servers import openenv_server
from harness_rl.sessions.rewardfuncs import WeightedReward, weighted_rewards
from harness_rl.sessions.toolloop import Policy


def command(options: argparse.Namespace) -> int:
    """Play, print, and return the exit code: 1 where no episode could be scored. Raises UserError."""
    rows = [_columns(text) for text in options.columns or ["{}"]]
    if options.episodes < 1:
        raise UserError(f"play: --episodes {options.episodes}: play one or more")
    with _server(options) as url:
        kind = EnvironmentKind(_factory(options.environment, url))
        rewards = weighted_rewards([_loaded(path, "--reward", url) for path in options.reward], options.reward_weights)
        if not rewards and not kind.has_reward:
            raise UserError("play: no reward: name --reward FILE.py:NAME, or give the environment a method get_reward(self)")
        for row in rows:
            kind.check_columns(row, f"--columns {json.dumps(row)[:60]}")
        policy = _policy(options, url)
        return asyncio.run(_play(options, kind, rewards, rows, policy))


async def _play(
    options: argparse.Namespace,
    kind: EnvironmentKind,
    rewards: Sequence[WeightedReward],
    rows: list[dict[str, Any]],
    policy: Callable[[dict[str, Any]], Policy],
) -> int:
    played = []
    try:
        for number in range(options.episodes):
            row = rows[number % len(rows)]
            played.append(await play_episode(kind, rewards, row, policy(row), options.max_calls))
            print(json.dumps(strict_json(_facts(played[-1]))) if options.json else _told(number, played[-1]), flush=True)
    finally:
        await kind.close()
    scored = [episode.reward for episode in played if episode.reward is not None]
    if options.episodes > 1:
        print(_summary(played, scored, as_json=options.json))
    return 0 if scored else 1


def _facts(played: Played) -> dict[str, Any]:
    episode = played.episode
    return {
        "reward": played.reward,
        "parts": played.scored.parts if played.scored is not None else {},
        "calls": episode.calls.total() if episode is not None else 0,
        "failed_calls": episode.failures.total() if episode is not None else 0,
        "failure": played.failure.message if played.failure is not None else None,
        "cause": played.failure.cause.value if played.failure is not None else None,
        "messages": episode.messages if episode is not None else [],
    }


def _told(number: int, played: Played) -> str:
    facts = _facts(played)
    if played.failure is not None:
        return f"episode {number}: {played.failure}"
    parts = ", ".join(f"{name} {value:.3f}" for name, value in facts["parts"].items())
    reward = "none: no reward function applies" if facts["reward"] is None else f"{facts['reward']:.3f}"
    return f"episode {number}: reward {reward} ({parts}), {facts['calls']} calls, {facts['failed_calls']} of them failed"


def _summary(played: list[Played], scored: list[float], *, as_json: bool) -> str:
    low, high = mean_interval(scored)
    unscored = [episode.failure for episode in played if episode.reward is None]
    causes = Counter("reward_none" if failure is None else failure.cause.value for failure in unscored)
    if as_json:
        found = {"episodes": len(played), "reward": mean(scored), "low": low, "high": high, "unscored": dict(causes)}
        return json.dumps(strict_json(found))
    lost = f", {causes.total()} unscored ({', '.join(f'{cause} {count}' for cause, count in causes.items())})" if causes else ""
    return f"reward {mean(scored):.3f} [{low:.3f}, {high:.3f}] over {len(scored)} episodes{lost}"


def _policy(options: argparse.Namespace, url: str | None) -> Callable[[dict[str, Any]], Policy]:
    """Of each episode's row."""
    if options.policy:
        function = _loaded(options.policy, "--policy", url)
        return lambda row: Scripted(function)
    if options.turns:
        turns = _loaded(options.turns, "--turns", url)
        return lambda row: Turns(turns(row))
    if options.json:
        raise UserError("play: --json is for scripts; name --policy or --turns")
    return lambda row: Person(print, functools.partial(input, "> " if sys.stdin.isatty() else ""))


def _columns(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"play: --columns {text[:60]}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f'play: --columns {text[:60]}: write an object: {{"seed": 3}}')
    return found


def _factory(path: str, url: str | None) -> Callable[[], Any]:
    """The class; or what makes instances, or makes the class of them."""
    found = _loaded(path, "ENVIRONMENT", url)
    if isinstance(found, type) or any(parameter.default is parameter.empty for parameter in inspect.signature(found).parameters.values()):
        return found  # also one that needs more than it is given: that is said where it is made
    made = found()
    return made if isinstance(made, type) else found


def _loaded(path: str, flag: str, url: str | None) -> Any:
    """What the path names, with the server's URL if it asks for one."""
    load_script(path)
    found = load_object(path, f"play: {flag}")
    if isinstance(found, type) or "url" not in inspect.signature(found).parameters:
        return found
    if url is None:
        raise UserError(f"play: {flag}: {path} asks for the url of a server; name --serve module:app, or --url URL")
    first = next(iter(inspect.signature(found).parameters))
    return functools.partial(found, url) if first == "url" else functools.partial(found, url=url)


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[str | None]:
    if options.serve or options.url:
        load_script(options.environment)  # the server's module too
        with openenv_server(app=options.serve, url=options.url, sessions=4) as url:
            yield url
    else:
        yield None
