# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-rl"]
# ///
"""Train a model in an environment whose loop is ours. From the repository: .venv/bin/python examples/train_echo.py"""

import argparse

from envs.echo import EchoEnv, demonstration, rows

from harness_rl import GRPOConfig, GRPOTrainer

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="runs/echo")
    parser.add_argument("--control", action="store_true", help="shuffle the advantages: nothing can be learned")
    options = parser.parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        environment_factory=EchoEnv,
        train_dataset=rows(),
        demonstrations=demonstration,
        args=GRPOConfig(
            output_dir=options.output_dir,
            seed=options.seed,
            max_steps=options.steps,
            num_generations=8,
            per_device_train_batch_size=48,
            max_completion_length=96,
            max_tool_calling_iterations=1,
            learning_rate=3e-5,
            lr_scheduler_type="constant",
            loss_type="grpo",
            save_strategy="no",
            rollout={"max_output_tokens_per_call": 40, "max_concurrent_rollouts": 24, "shuffle_advantages": options.control},
            engine={"max_model_len": 512, "max_num_seqs": 24},
            warmup={"enabled": True, "batch": 4, "check_from": 8, "check_tasks": 32, "target_low": 0.2, "target_high": 0.5},
        ),
    )
    trainer.train()
