# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-rl[harbor]"]
# ///
"""Train a model inside mini-swe-agent from Python. Run it as root from the repository: .venv/bin/python examples/train_harness.py"""

from functools import partial

from harness_rl import AsyncGRPOConfig, HarborSessionFactory, HarnessAsyncGRPOTrainer, HarnessRolloutOutcome


def reward(outcome: HarnessRolloutOutcome) -> float | None:
    """The verifier's reward, a little less for an answer that took many tool calls."""
    if outcome.env_reward is None:
        return None
    return outcome.env_reward - 0.05 * max(0, outcome.tool_call_count - 2)


if __name__ == "__main__":
    factory = partial(
        HarborSessionFactory,
        split="examples/tasks/quickstart/train",
        harness="mini-swe-agent",
        sandbox="local",
        agent_config="examples/configs/quickstart_agent.yaml",
    )
    trainer = HarnessAsyncGRPOTrainer(
        model="smollm2-135m",
        harness_session_factory=factory,
        args=AsyncGRPOConfig(
            output_dir="runs/python",
            num_generations=8,
            per_device_train_batch_size=24,  # three groups a step
            max_steps=14,
            learning_rate=2e-5,
            max_completion_length=1024,
            max_tool_calling_iterations=7,
            max_staleness=2,
            rollout={"max_output_tokens_per_call": 128},
            warmup={"enabled": True},
        ),
        rollout_reward_fn=reward,
    )
    trainer.train()
