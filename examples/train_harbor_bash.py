# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-rl[harbor]"]
# ///
"""Harbor tasks with a loop of ours instead of an agent: one tool, bash, in the task's sandbox, and its verifier's reward.

From the repository, as root:

    .venv/bin/python examples/train_harbor_bash.py --tasks FOLDER
    .venv/bin/python examples/train_harbor_bash.py --cpu              the quickstart's tasks, on two cores
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from envs.options import add_training, read, run, training

from harness_rl import GRPOConfig, GRPOTrainer, HarborEnvironment
from harness_rl.sessions.harbor_environment import task_rows
from harness_rl.tasks.load import read_task, solution_commands

SHORT = {"warmup": {"demonstrations": 32, "check_from": 32}}
"""After twelve demonstrations it solves next to none of the quickstart's tasks: all rewards of a group would be alike."""
CPU = {"max_completion_length": 256, "max_tool_calling_iterations": 3, "rollout": {"max_output_tokens_per_call": 64}}


def demonstration(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The task's own solution, for the warm start."""
    command = solution_commands(read_task(Path(row["task_path"])))
    return [{"content": None, "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}, {"content": "Done."}]


def trainer(options: argparse.Namespace) -> GRPOTrainer:
    return GRPOTrainer(
        model=options.model,
        environment_factory=HarborEnvironment,
        train_dataset=task_rows(options.tasks),
        demonstrations=demonstration,
        args=GRPOConfig(
            **training(
                options,
                CPU,
                SHORT,
                max_completion_length=4096,
                max_tool_calling_iterations=20,
                rollout={"max_concurrent_rollouts": options.sandboxes},
            )
        ),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="examples/tasks/quickstart/train", help="a folder of Harbor tasks")
    parser.add_argument("--sandboxes", type=int, default=8, help="tasks at once")
    add_training(parser, "harbor-bash", counted=False, per_device_batch_size=32)
    return read(parser, arguments)


if __name__ == "__main__":
    asked = parse()
    run(asked, trainer(asked))
