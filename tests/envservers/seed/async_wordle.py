from datasets import Dataset
from textarena_env import TextArenaAction, TextArenaEnv

from trl import AsyncGRPOConfig, AsyncGRPOTrainer

env_url = "https://openenv-wordle.hf.space"


class WordleEnv:
    def __init__(self):
        self._connect()

    def _connect(self):
        self.client = TextArenaEnv(base_url=env_url).sync()

    def reset(self, **kwargs) -> str | None:
        try:
            result = self.client.reset()
        except Exception:
            self._connect()
            result = self.client.reset()
        self._seen = result.observation.messages[0].content
        self.reward = 0.0
        self.done = False
        return self._seen

    def guess(self, guess: str) -> str:
        """
        Guess a word of the Wordle game.

        Args:
            guess: The word, as in '[abcde]'

        Returns:
            What the game says to it.
        """
        if self.done:
            raise ValueError("Game over.")
        try:
            result = self.client.step(TextArenaAction(message=guess))
        except Exception:
            self._connect()
            result = self.client.step(TextArenaAction(message=guess))
        everything = result.observation.messages[0].content
        new, self._seen = everything[len(self._seen) :], everything
        self.reward = 0.0 if "You attempted an invalid move" in new else result.reward
        self.done = result.done
        return new


def reward_func(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]


config = AsyncGRPOConfig(
    vllm_server_base_url="http://localhost:8000",
    learning_rate=1e-6,
    bf16=True,
    output_dir="Qwen3-1.7B-async-wordle-GRPO",
    max_completion_length=1024,
    max_tool_calling_iterations=6,
    per_device_train_batch_size=32,
    num_generations=16,
    max_staleness=5,
    max_steps=100,
    logging_steps=1,
    log_completions=True,
    num_completions_to_print=1,
    report_to="trackio",
    chat_template_kwargs={"enable_thinking": False},
)
dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "You play Wordle well."}] for _ in range(1000)]})
trainer = AsyncGRPOTrainer(
    model="Qwen/Qwen3-1.7B",
    args=config,
    train_dataset=dataset,
    reward_funcs=reward_func,
    environment_factory=WordleEnv,
)
trainer.train()
