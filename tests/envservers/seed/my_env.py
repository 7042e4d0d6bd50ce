from my_client import MyClient

from trl import GRPOConfig, GRPOTrainer

ENV_URL = "https://my-env.hf.space"


class MyEnv:
    def __init__(self):
        self.client = MyClient(base_url=ENV_URL)  # from the scope around it
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return "What the model sees first"

    def my_tool(self, arg1: str, arg2: int) -> str:
        """
        What this tool does.

        Args:
            arg1: What arg1 is
            arg2: What arg2 is

        Returns:
            What came of it.
        """
        self.reward = 1.0
        return "What came of it"


def reward_func(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]


args = GRPOConfig(
    max_completion_length=4096,
    max_steps=1,
)
trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=reward_func, args=args, environment_factory=MyEnv)
trainer.train()
