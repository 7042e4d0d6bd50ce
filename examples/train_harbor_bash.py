"""Harbor tasks with a loop of ours instead of an agent: one tool, bash, in the task's sandbox, and its verifier's reward.

From the repository, as root: .venv/bin/python examples/train_harbor_bash.py
"""

import argparse
from pathlib import Path

from harness_rl import GRPOConfig, GRPOTrainer, HarborEnvironment
from harness_rl.sessions.harbor_environment import task_rows
from harness_rl.tasks.load import read_task, solution_commands


def demonstration(row):
    """The task's own solution, for the warm start."""
    commands = solution_commands(read_task(Path(row["task_path"])))
    calls = [{"content": None, "tool_calls": [{"name": "bash", "arguments": {"command": command}}]} for command in commands]
    return [*calls, {"content": "Done."}]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", default="examples/tasks/quickstart/train")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output-dir", default="runs/harbor-bash")
    options = parser.parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        environment_factory=HarborEnvironment,
        train_dataset=task_rows(options.tasks),
        demonstrations=demonstration,
        args=GRPOConfig(
            output_dir=options.output_dir,
            max_steps=options.steps,
            num_generations=8,
            per_device_train_batch_size=24,
            max_completion_length=256,
            max_tool_calling_iterations=3,
            learning_rate=3e-5,
            lr_scheduler_type="constant",
            loss_type="grpo",
            save_strategy="no",
            rollout={"max_output_tokens_per_call": 64, "max_concurrent_rollouts": 8},
            engine={"max_model_len": 1024, "max_num_seqs": 8},
            warmup={"enabled": True},
        ),
    )
    trainer.train()
