# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-rl[openenv]"]
# ///
"""Train in the echo game of an OpenEnv server: what comes back is worth a tenth of its length.

.venv-openenv/bin/python examples/openenv_echo.py                                                  a server of its own
.venv-openenv/bin/python examples/openenv_echo.py --cpu                                            small enough for two cores
.venv-openenv/bin/python examples/openenv_echo.py --env-host https://openenv-echo-env.hf.space     a Space
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from envs.echo_env import EchoAction, EchoEnv
from envs.options import add_server, add_training, held_out, read, run, server, training

from harness_rl import GRPOConfig, GRPOTrainer

APP = "envs.echo_env.server:app"
CPU = {"max_completion_length": 96, "max_tool_calling_iterations": 1, "warmup": {"target_low": 0.4, "target_high": 0.8}}


def environment(url: str) -> type:
    """The environment class of games at `url`."""

    class EchoToolEnv:
        def __init__(self) -> None:
            self.client: EchoEnv | None = None
            self.reward = 0.0

        def reset(self, **columns: Any) -> None:
            if self.client is not None:
                with contextlib.suppress(ConnectionError):
                    self.client.close()
            self.client = EchoEnv(base_url=url)
            self.client.reset()
            self.reward = 0.0

        def echo(self, message: str) -> str:
            """Send a message; it comes back.

            Args:
                message: What to send.
            """
            observation = self.client.step(EchoAction(message=message)).observation
            self.reward = observation.reward
            return observation.echoed_message

    return EchoToolEnv


def reward_echo(environments: list[Any], **columns: Any) -> list[float]:
    return [env.reward for env in environments]


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"Echo 'Hello World {number}!' in the environment."}]} for number in range(count)]


def demonstration(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns of a policy that does as it is told, for a warm start."""
    said = row["prompt"][0]["content"].split("'")[1]
    return [{"content": None, "tool_calls": [{"name": "echo", "arguments": {"message": said}}]}, {"content": "Done."}]


def trainer(options: argparse.Namespace, url: str) -> GRPOTrainer:
    return GRPOTrainer(
        model=options.model,
        reward_funcs=reward_echo,
        train_dataset=rows(options.dataset_size),
        eval_dataset=held_out(options, rows),
        environment_factory=environment(url),
        demonstrations=demonstration,
        args=GRPOConfig(**training(options, CPU, max_completion_length=256, max_tool_calling_iterations=2)),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server(parser, image="registry.hf.space/openenv-echo-env:latest")
    add_training(parser, "echo", model="Qwen/Qwen3-0.6B", per_device_batch_size=32)
    return read(parser, arguments)


if __name__ == "__main__":
    asked = parse()
    with server(asked, APP) as found:
        run(asked, trainer(asked, found))
