from datasets import Dataset
from openspiel_env import OpenSpielEnv
from openspiel_env.models import OpenSpielAction
from textarena_env import TextArenaAction, TextArenaEnv

from trl import GRPOConfig, GRPOTrainer

WORDLE_URL = "https://openenv-wordle.hf.space"
CATCH_URL = "https://openenv-openspiel-env.hf.space"


class MultiEnv:
    def __init__(self):
        self._clients = {}
        self.game = None
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        self.game = kwargs["env"]
        self.reward, self.done = 0.0, False
        old = self._clients.pop(self.game, None)
        if old is not None:
            try:
                old.close()
            except Exception:
                pass
        if self.game == "wordle":
            self._clients["wordle"] = TextArenaEnv(base_url=WORDLE_URL)
            self._seen = self._clients["wordle"].reset().observation.messages[0].content
            return self._seen
        self._clients["catch"] = OpenSpielEnv(base_url=CATCH_URL)
        result = self._clients["catch"].reset()
        self.done = result.observation.done
        return str(result.observation.info_state)

    def _only_in(self, game):
        if self.game != game:
            raise ValueError(f"this is no tool of {self.game}")
        if self.done:
            raise ValueError("Game over.")

    def guess(self, guess: str) -> str:
        """
        Guess a word of the Wordle game.

        Args:
            guess: The word, as in '[abcde]'

        Returns:
            What the game says to it.
        """
        self._only_in("wordle")
        result = self._clients["wordle"].step(TextArenaAction(message=guess))
        everything = result.observation.messages[0].content
        new, self._seen = everything[len(self._seen) :], everything
        self.reward = 0.0 if "You attempted an invalid move" in new else result.reward
        self.done = result.done
        return new

    def _act(self, action_id):
        self._only_in("catch")
        result = self._clients["catch"].step(OpenSpielAction(action_id=action_id, game_name="catch"))
        self.reward, self.done = result.reward or 0.0, result.observation.done
        return str(result.observation.info_state)

    def move(self, direction: str) -> str:
        """Move the paddle.

        Args:
            direction: Where to, "left" or "right".

        Returns:
            What is to be seen then.
        """
        if direction not in ("left", "right"):
            raise ValueError(f"{direction!r} is no direction")
        return self._act(0 if direction == "left" else 2)

    def stay(self) -> str:
        """Wait while the ball falls one row.

        Returns:
            What is to be seen then.
        """
        return self._act(1)


def wordle_reward(environments, **kwargs) -> list[float | None]:
    return [env.reward if env.game == "wordle" else None for env in environments]


def catch_reward(environments, **kwargs) -> list[float | None]:
    return [(max(env.reward, 0.0) if env.done else 0.0) if env.game == "catch" else None for env in environments]


n = 500
dataset = Dataset.from_dict(
    {
        "prompt": (
            [[{"role": "user", "content": "Play Wordle."}]] * n
            + [[{"role": "user", "content": "Play Catch."}]] * n
        ),
        "env": ["wordle"] * n + ["catch"] * n,
    }
)

trainer = GRPOTrainer(
    model="Qwen/Qwen3-1.7B",
    reward_funcs=[wordle_reward, catch_reward],
    train_dataset=dataset,
    args=GRPOConfig(
        report_to="wandb",
        log_completions=True,
        num_completions_to_print=2,
        logging_steps=1,
        chat_template_kwargs={"enable_thinking": False},
        max_completion_length=1024,
    ),
    environment_factory=MultiEnv,
)
trainer.train()
