"""OpenSpiel's games for one player (catch, if OPENSPIEL_GAME names no other) as an OpenEnv environment.

What is left to chance follows the seed of `reset`, so that all games of a group begin alike.
"""

from __future__ import annotations

import os
import random
import uuid
from typing import Any

import pyspiel
from openenv.core.env_server import Environment, create_app

from .models import OpenSpielAction, OpenSpielObservation, OpenSpielState


class OpenSpielEnvironment(Environment[OpenSpielAction, OpenSpielObservation, OpenSpielState]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._name = os.environ.get("OPENSPIEL_GAME", "catch")
        self._game = pyspiel.load_game(self._name)
        if self._game.num_players() != 1:
            raise ValueError(f"OPENSPIEL_GAME: {self._name} is for {self._game.num_players()} players; name a game for one")
        self._random = random.Random()
        self._state = OpenSpielState(game_name=self._name)
        self._play: pyspiel.State | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> OpenSpielObservation:
        self._random = random.Random(seed)
        self._state = OpenSpielState(game_name=self._name, episode_id=episode_id or str(uuid.uuid4()))
        self._play = self._game.new_initial_state()
        self._chance()
        return self._observation("initial")

    def step(self, action: OpenSpielAction, timeout_s: float | None = None, **kwargs: Any) -> OpenSpielObservation:
        if self._play is None:
            raise ValueError("reset the game first")
        if action.action_id not in self._play.legal_actions():
            raise ValueError(f"action {action.action_id} is not one of {self._play.legal_actions()}")
        self._play.apply_action(action.action_id)
        self._state.step_count += 1
        self._chance()
        return self._observation("terminal" if self._play.is_terminal() else "playing")

    @property
    def state(self) -> OpenSpielState:
        return self._state

    def _chance(self) -> None:
        while self._play.is_chance_node():
            outcomes, weights = zip(*self._play.chance_outcomes(), strict=True)
            self._play.apply_action(self._random.choices(outcomes, weights)[0])

    def _observation(self, phase: str) -> OpenSpielObservation:
        return OpenSpielObservation(
            info_state=list(self._play.observation_tensor(0)),
            legal_actions=self._play.legal_actions(),
            game_phase=phase,
            done=self._play.is_terminal(),
            reward=float(self._play.rewards()[0]),
        )


app = create_app(
    OpenSpielEnvironment,
    OpenSpielAction,
    OpenSpielObservation,
    env_name="openspiel_env",
    state_cls=OpenSpielState,
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "64")),
)
