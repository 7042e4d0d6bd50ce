"""TextArena's games for one player (Wordle, if TEXTARENA_ENV_ID names no other) as an OpenEnv environment.

WORDLE_SECRETS: so many secret words, where our own word list is used (0: all of it).

TextArena draws from Python's one random generator: a game is drawn, and seeded, while no other session's is. Its dictionary, which takes
seconds to read, is read once for all sessions.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any

from openenv.core.env_server import Environment, create_app

from .models import TextArenaAction, TextArenaMessage, TextArenaObservation, TextArenaState
from .words import write_nltk_data

_drawing = threading.Lock()


@functools.cache
def textarena() -> Any:
    """The package, with the words that it needs at hand."""
    import nltk

    if "NLTK_DATA" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="nltk-")
        textarena_data.append(folder)
        write_nltk_data(Path(folder.name), int(os.environ.get("WORDLE_SECRETS", "0")))
        nltk.data.path.insert(0, folder.name)
        nltk.download = lambda *args, **kwargs: True  # all that is asked for is there
    import textarena as package
    import textarena.envs.Wordle.env as wordle

    wordle.EnglishDictionary = functools.cache(wordle.EnglishDictionary)
    return package


textarena_data: list[tempfile.TemporaryDirectory[str]] = []
"""Kept until the process ends."""


class TextArenaEnvironment(Environment[TextArenaAction, TextArenaObservation, TextArenaState]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, env_id: str | None = None) -> None:
        super().__init__()
        self._id = env_id or os.environ.get("TEXTARENA_ENV_ID", "Wordle-v0")
        self._state = TextArenaState(env_id=self._id)
        self._game: Any = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> TextArenaObservation:
        with _drawing:
            self._game = textarena().make(self._id)  # anew: its wrappers keep what was said in earlier games
            self._game.reset(num_players=1, seed=seed)
        self._state = TextArenaState(env_id=self._id, episode_id=episode_id or str(uuid.uuid4()))
        return self._observation(done=False)

    def step(self, action: TextArenaAction, timeout_s: float | None = None, **kwargs: Any) -> TextArenaObservation:
        if self._game is None:
            raise ValueError("reset the game first")
        done, info = self._game.step(action.message)
        rewards = self._game.state.rewards or {}
        self._state.step_count += 1
        self._state.turn = self._game.state.turn
        self._state.last_reward = float(rewards.get(0, 0.0))
        return self._observation(done=bool(done), info=info)

    @property
    def state(self) -> TextArenaState:
        return self._state

    def _observation(self, *, done: bool, info: dict[str, Any] | None = None) -> TextArenaObservation:
        player, said = self._game.get_observation()
        return TextArenaObservation(
            prompt=str(said),
            messages=[TextArenaMessage(sender_id=-1, content=str(said), category="MESSAGE")],
            current_player_id=player,
            legal_players=[player],
            info=info or {},
            done=done,
            reward=self._state.last_reward,
        )


app = create_app(
    TextArenaEnvironment,
    TextArenaAction,
    TextArenaObservation,
    env_name="textarena_env",
    state_cls=TextArenaState,
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "64")),
)
