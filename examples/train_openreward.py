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

from envs.openreward import OpenReward, environment, openreward_reward, rows

from harness_rl import GRPOConfig, GRPOTrainer


def trainer(options: argparse.Namespace, server: OpenReward) -> GRPOTrainer:
    name = options.environment or server.environments()[0]
    return GRPOTrainer(
        model=options.model,
        environment_factory=environment(server, name, options.split),
        reward_funcs=openreward_reward,
        train_dataset=rows(server, name, options.split),
        args=GRPOConfig(
            output_dir=options.output_dir,
            seed=options.seed,
            max_steps=options.steps,
            num_generations=8,
            per_device_train_batch_size=options.batch_size,
            max_completion_length=2048,
            max_tool_calling_iterations=16,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            chat_template_kwargs={"enable_thinking": False},
            vllm_mode=options.vllm_mode,
            vllm_server_base_url=options.vllm_server_url if options.vllm_mode == "server" else None,
        ),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-url", "--env-host", required=True)
    parser.add_argument("--deployment", help="of a hosted environment: owner/name")
    parser.add_argument("--environment", help="where the server has several; left out, its first")
    parser.add_argument("--split", default="train")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--batch-size", type=int, default=32, help="episodes a step")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--vllm-mode", choices=["colocate", "server"], default="colocate", help="launch the engine, or connect to one")
    parser.add_argument("--vllm-server-url", default="http://localhost:8000", help="with --vllm-mode server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="runs/openreward")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    asked = parse()
    trainer(asked, OpenReward(asked.env_url, os.environ.get("OPENREWARD_API_KEY"), asked.deployment)).train()
