# /// script
# requires-python = ">=3.11"
# dependencies = ["harness-rl[openenv]", "textarena"]
# ///
"""Train in TextArena's Wordle, on an OpenEnv server: six guesses at a word of five letters.

The start is warm: the model first learns from games of a solver (`--no-warm-start` leaves that out).

    .venv-openenv/bin/python examples/openenv_wordle.py                                             a server of its own
    .venv-openenv/bin/python examples/openenv_wordle.py --cpu                                       sixteen words, on two cores
    .venv-openenv/bin/python examples/openenv_wordle.py --env-url https://openenv-wordle.hf.space   a Space
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from envs.options import add_server, add_training, held_out, read, run, server, training
from envs.textarena_env import TextArenaAction, TextArenaEnv
from envs.textarena_env.words import secrets
from envs.wordle import best_guess, consistent, read_marks

from harness_rl import GRPOConfig, GRPOTrainer

APP = "envs.textarena_env.server:app"
GUESSES = 6
PROMPT = (
    "Play Wordle. Find the secret English word of five letters in six guesses. After each guess every letter is marked: G is right, "
    "Y belongs to another place, X is not in the word. Do not guess a word twice. Call the tool `guess` for each guess; stop when the "
    "game is over.\n"
)
WEIGHTS = [1.0, 0.3, 0.2]
"""Of the three parts of the reward: won, letters, valid."""
CPU_FLAGS = {"words": 16}
CPU = {"max_completion_length": 960, "max_tool_calling_iterations": GUESSES, "engine": {"max_model_len": 1536}}


def environment(url: str) -> type:
    """The environment class of games at `url`."""

    class WordleEnv:
        def __init__(self) -> None:
            self.client: TextArenaEnv | None = None
            self.said, self.done = "", False
            self.guesses = self.invalid = 0
            self.won, self.letters = False, 0.0

        def reset(self, seed: int, **columns: Any) -> str:
            if self.client is not None:
                with contextlib.suppress(ConnectionError):
                    self.client.close()
            self.client = TextArenaEnv(base_url=url)
            self.said = self.client.reset(seed=seed).observation.messages[0].content
            self.done = self.won = False
            self.guesses = self.invalid = 0
            self.letters = 0.0
            return self.said

        def guess(self, guess: str) -> str:
            """Guess a word.

            Args:
                guess: The word, in square brackets: [crane]
            """
            if self.done:
                raise ValueError("Game over.")
            result = self.client.step(TextArenaAction(message=guess))
            said = result.observation.messages[0].content
            feedback, self.said, self.done = said[len(self.said) :], said, result.done  # the server says again what it has said before
            self.guesses += 1
            seen = read_marks(feedback)
            if result.done and result.reward == 1.0:
                self.won, self.letters = True, 1.0
            elif seen is not None:
                self.letters = max(self.letters, (seen.count("G") + seen.count("Y") / 2) / len(seen))
            else:
                self.invalid += 1
            return feedback

    return WordleEnv


def reward_won(environments: list[Any], **columns: Any) -> list[float]:
    return [float(env.won) for env in environments]


def reward_letters(environments: list[Any], **columns: Any) -> list[float]:
    """The best guess's share of right letters; a letter in the wrong place counts half. So lost games of a group differ too."""
    return [env.letters for env in environments]


def reward_valid(environments: list[Any], **columns: Any) -> list[float]:
    """The share of guesses that the game took; 0 for a game without a guess."""
    return [1.0 - env.invalid / env.guesses if env.guesses else 0.0 for env in environments]


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": PROMPT}], "task_name": f"wordle {seed}", "seed": seed} for seed in range(count)]


def solver_game(url: str, row: dict[str, Any], count: int = 0) -> list[dict[str, Any]]:
    """The turns of a solver in the game with this row's seed, played to its end on the server, which draws from `count` words."""
    game = environment(url)()
    game.reset(**row)
    words, turns = secrets(count), []
    while not game.done and words:
        guess = best_guess(words)
        turns.append({"content": None, "tool_calls": [{"name": "guess", "arguments": {"guess": f"[{guess}]"}}]})
        seen = read_marks(game.guess(f"[{guess}]"))
        if seen is not None:
            words = consistent(words, guess, seen)
    game.client.close()
    return [*turns, {"content": "Done."}]


def trainer(options: argparse.Namespace, url: str) -> GRPOTrainer:
    return GRPOTrainer(
        model=options.model,
        reward_funcs=[reward_won, reward_letters, reward_valid],
        train_dataset=rows(options.dataset_size),
        eval_dataset=held_out(options, rows),
        environment_factory=environment(url),
        demonstrations=lambda row: solver_game(url, row, options.words),
        args=GRPOConfig(
            **training(
                options,
                CPU,
                reward_weights=WEIGHTS,
                max_completion_length=4096,
                max_tool_calling_iterations=2 * GUESSES,
                vllm_importance_sampling_mode="token_truncate",
            )
        ),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server(parser, image="registry.hf.space/openenv-wordle:latest")
    add_training(parser, "wordle", dataset_size=1000, num_generations=16, per_device_batch_size=64)
    parser.add_argument("--warm-start", action=argparse.BooleanOptionalAction, default=True, help="first learn from games of a solver")
    add_game(parser)
    return read(parser, arguments, **CPU_FLAGS)


def add_game(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--words", type=int, default=0, help="secret words of a server of this script's (0: all that it has)")


def game(options: argparse.Namespace) -> dict[str, str]:
    """For the server's process."""
    return {"TEXTARENA_ENV_ID": "Wordle-v0", "WORDLE_SECRETS": str(options.words)}


if __name__ == "__main__":
    asked = parse()
    with server(asked, APP, **game(asked)) as found:
        run(asked, trainer(asked, found))
