# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-rl[openenv]"]
# ///
"""Train on small web tasks in a real browser: buttons to click, fields to fill, lists to choose from.

.venv-openenv/bin/python examples/train_browsergym.py                                                       a server of its own
.venv-openenv/bin/python examples/train_browsergym.py --cpu                                                 two cores, no GPU
.venv-openenv/bin/python examples/train_browsergym.py --env-host https://openenv-browsergym-env.hf.space    a Space

A server of its own needs Debian's Chromium: apt-get install --no-install-recommends chromium-headless-shell bubblewrap
"""

from __future__ import annotations

import argparse
import contextlib
import re
from typing import Any

from envs.browsergym_env import BrowserGymAction, BrowserGymEnv, BrowserGymObservation
from envs.options import add_training, held_out, read, run, training

from harness_rl import GRPOConfig, GRPOTrainer, openenv_server

APP = "envs.browsergym_env.server:app"
TASKS = ["click-test", "click-button", "enter-text", "choose-list"]
ACTIONS = 10
"""Rounds of tool calls in one game."""
CPU = {"max_completion_length": 512, "max_tool_calling_iterations": 2}
PROMPT = (
    "You use a web page through tools. The page is shown as a tree: `[4] button 'Send'` is an element that you call 4. "
    "Do what the goal says, in as few actions as it takes, and then stop.\n"
)


def shown(observation: BrowserGymObservation) -> str:
    lines = [f"Goal: {observation.goal}"]
    if observation.last_action_error:
        lines.append(f"That did not work: {observation.error}")
    return "\n".join([*lines, observation.axtree_txt[:2000]])


def environment(url: str) -> type:
    """The environment class of pages at `url`."""

    class BrowserGym:
        def __init__(self) -> None:
            self.client: BrowserGymEnv | None = None
            self.reward, self.done = 0.0, False

        def reset(self, task_name: str, seed: int, **columns: Any) -> str:
            self._leave()
            self.client = BrowserGymEnv(base_url=url)
            self.reward, self.done = 0.0, False
            return shown(self.client.reset(task_name=task_name, seed=seed).observation)

        def click(self, bid: str) -> str:
            """Click an element.

            Args:
                bid: The element's number.
            """
            return self._act("click", bid)

        def fill(self, bid: str, text: str) -> str:
            """Write a text into a field, in place of what it holds.

            Args:
                bid: The field's number.
                text: What to write.
            """
            return self._act("fill", bid, text)

        def select_option(self, bid: str, option: str) -> str:
            """Choose from a list.

            Args:
                bid: The list's number.
                option: What it is to be set to, as the list shows it.
            """
            return self._act("select_option", bid, option)

        def send_keys(self, text: str) -> str:
            """Type where the focus is.

            Args:
                text: What to type, or the name of a key: Enter, Tab, Escape, Backspace.
            """
            return self._act("send_keys", text)

        def scroll(self, direction: str) -> str:
            """Scroll the page.

            Args:
                direction: up or down.
            """
            return self._act("scroll", direction)

        def noop(self) -> str:
            """Look at the page again."""
            return self._act("noop")

        def get_reward(self) -> float:
            """1 where the task was done, else 0."""
            return 1.0 if self.done and self.reward > 0 else 0.0

        def _act(self, name: str, *arguments: Any) -> str:
            if self.done:
                raise ValueError("The task is over.")
            action = f"{name}({', '.join(repr(str(argument)) for argument in arguments)})"
            result = self.client.step(BrowserGymAction(action_str=action))
            self.reward, self.done = float(result.reward or 0.0), result.done
            return "The task is over." if self.done else shown(result.observation)

        def _leave(self) -> None:
            """End the session; its browser is gone then."""
            client, self.client = self.client, None
            if client is not None:
                with contextlib.suppress(ConnectionError):
                    client.close()

        def __enter__(self) -> BrowserGym:
            return self

        def __exit__(self, *_: object) -> None:
            self._leave()

    return BrowserGym


def rows(count: int, tasks: list[str]) -> list[dict[str, Any]]:
    """`count` games, the tasks in turn; a seed is the same page each time."""
    prompt = [{"role": "user", "content": PROMPT}]
    return [{"prompt": prompt, "task_name": tasks[seed % len(tasks)], "seed": seed} for seed in range(count)]


def solution(task: str, goal: str, tree: str) -> list[dict[str, Any]]:
    """The calls that do a task, from the page's first view."""

    def bid(role: str, name: str = "[^']*") -> str:
        found = re.search(rf"\[(\d+)\] {role} '{name}'", tree)
        assert found is not None, f"{task}: no {role} in {tree}"
        return found[1]

    def wanted(pattern: str) -> str:
        found = re.search(pattern, goal)
        assert found is not None, goal
        return found[1]

    if task == "click-test":
        return [{"name": "click", "arguments": {"bid": bid("button")}}]
    if task == "click-button":
        return [{"name": "click", "arguments": {"bid": bid("button", wanted('"(.+)"'))}}]
    submit = {"name": "click", "arguments": {"bid": bid("button", "Submit")}}
    if task == "enter-text":
        return [{"name": "fill", "arguments": {"bid": bid("textbox"), "text": wanted('"(.+)"')}}, submit]
    return [{"name": "select_option", "arguments": {"bid": bid("combobox"), "option": wanted("Select (.+) from")}}, submit]


def demonstration(url: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns of a policy that does the row's task, found on a session of its own."""
    with BrowserGymEnv(base_url=url).sync() as client:
        first = client.reset(task_name=row["task_name"], seed=row["seed"]).observation
    calls = solution(row["task_name"], first.goal, first.axtree_txt)
    return [*({"content": None, "tool_calls": [call]} for call in calls), {"content": "Done."}]


def trainer(options: argparse.Namespace, url: str) -> GRPOTrainer:
    return GRPOTrainer(
        model=options.model,
        environment_factory=environment(url),
        train_dataset=rows(options.dataset_size, options.task_name),
        eval_dataset=held_out(options, lambda count: rows(count, options.task_name)),
        demonstrations=lambda row: demonstration(url, row),
        args=GRPOConfig(
            **training(
                options,
                CPU,
                max_completion_length=1024,
                max_tool_calling_iterations=ACTIONS,
                rollout={"max_concurrent_rollouts": options.browsers},
            )
        ),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-url", "--env-host", help="of a server that runs already; without it, this script starts one")
    parser.add_argument("--task-name", nargs="+", default=TASKS, help="names of tasks that the server has")
    parser.add_argument("--browsers", type=int, default=8, help="games at once; each has a browser of about 100 MB")
    parser.add_argument(
        "--warm-start",
        action=argparse.BooleanOptionalAction,
        help="first learn from solved games, which our server's tasks alone have (left out: with --cpu, on a server of this script's)",
    )
    add_training(
        parser, "browsergym", model="Qwen/Qwen3-0.6B", max_steps=50, dataset_size=256, per_device_batch_size=32, learning_rate=5e-6
    )
    options = read(parser, arguments, task_name=["click-test", "click-button"], browsers=4)
    if options.warm_start is None:
        options.warm_start = options.cpu and options.env_url is None
    return options


if __name__ == "__main__":
    asked = parse()
    where: dict[str, Any] = {"url": asked.env_url} if asked.env_url else {"app": APP}
    with openenv_server(**where, sessions=asked.browsers + 4) as found:
        run(asked, trainer(asked, found))
