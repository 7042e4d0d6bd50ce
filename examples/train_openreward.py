# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-rl"]
# ///
"""Train in an environment that speaks the Open Reward Standard: its tools become the policy's, its rewards are summed.

.venv/bin/python examples/train_openreward.py --env-url http://127.0.0.1:8080                                      a server of yours
.venv/bin/python examples/train_openreward.py --env-url https://sessions.openreward.ai --deployment owner/name     hosted

For a hosted one, the key is read from OPENREWARD_API_KEY.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from envs.openreward import OpenReward, environment, openreward_reward, rows
from envs.options import add_training, held_out, read, run, training

from harness_rl import GRPOConfig, GRPOTrainer
from harness_rl.imports import load_object

CPU = {"max_completion_length": 384, "max_tool_calling_iterations": 4}


def warm(options: argparse.Namespace) -> dict[str, Any]:
    return {**CPU, "warmup": {"enabled": options.demonstrations is not None}}


def trainer(options: argparse.Namespace, server: OpenReward) -> GRPOTrainer:
    name = options.environment or server.environments()[0]
    tasks = rows(server, name, options.split)
    return GRPOTrainer(
        model=options.model,
        environment_factory=environment(server, name, options.split),
        reward_funcs=openreward_reward,
        train_dataset=tasks[: options.dataset_size],
        eval_dataset=held_out(options, lambda count: tasks[:count]),
        demonstrations=load_object(options.demonstrations, "--demonstrations") if options.demonstrations else None,
        args=GRPOConfig(**training(options, warm(options), max_completion_length=2048, max_tool_calling_iterations=16)),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-url", "--env-host", required=True)
    parser.add_argument("--deployment", help="of a hosted environment: owner/name")
    parser.add_argument("--environment", help="where the server has several; left out, its first")
    parser.add_argument("--split", default="train")
    parser.add_argument("--demonstrations", help="file.py:function of yours, row -> the turns that solve it; --cpu starts from them")
    add_training(parser, "openreward", model="Qwen/Qwen3-0.6B", max_steps=50, per_device_batch_size=32)
    return read(parser, arguments)


if __name__ == "__main__":
    asked = parse()
    run(asked, trainer(asked, OpenReward(asked.env_url, os.environ.get("OPENREWARD_API_KEY"), asked.deployment)))
