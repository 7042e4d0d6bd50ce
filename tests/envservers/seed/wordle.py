from datasets import Dataset
from textarena_env import TextArenaAction, TextArenaEnv

from trl import GRPOConfig, GRPOTrainer


class WordleEnv:
    def __init__(self):
        self.client = TextArenaEnv(base_url="https://openenv-wordle.hf.space")

    def reset(self, **kwargs) -> str | None:
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
        result = self.client.step(TextArenaAction(message=guess))
        everything = result.observation.messages[0].content
        new, self._seen = everything[len(self._seen) :], everything
        self.reward = 0.0 if "You attempted an invalid move" in new else result.reward
        self.done = result.done
        return new


def reward_func(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]


prompt = "You play Wordle well. Use the tool `guess` for each guess."
dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}]] * 1000})

trainer = GRPOTrainer(
    model="Qwen/Qwen3-1.7B",
    reward_funcs=reward_func,
    train_dataset=dataset,
    args=GRPOConfig(
        use_vllm=True,
        vllm_mode="colocate",
        chat_template_kwargs={"enable_thinking": False},
        max_completion_length=1024,
        num_generations=4,
        gradient_accumulation_steps=64,
    ),
    environment_factory=WordleEnv,
)
trainer.train()
