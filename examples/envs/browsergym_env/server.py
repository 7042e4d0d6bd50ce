"""Small web tasks, as MiniWoB has them, in a Chromium of each session's own: an OpenEnv server of the BrowserGym Space's kind.

BROWSERGYM_TASK_NAME is the task of a `reset` that names none, BROWSERGYM_MAX_STEPS how many actions a game has. What a policy does wrong
comes back as `last_action_error` with `error`. A game whose browser is gone ends with its session: its client loses the connection, and
cannot take that for an answer.
"""

from __future__ import annotations

import os
import random
import uuid
from typing import Any

from openenv.core.env_server import Environment, create_app

from .chromium import BrowserGone, Chromium
from .models import BrowserGymAction, BrowserGymObservation, BrowserGymState
from .page import PAGES, TASKS, ActionError, Page


class SessionOver(BaseException):
    """Ends the session. OpenEnv's server answers every Exception, and the game would go on."""


class BrowserGymEnvironment(Environment[BrowserGymAction, BrowserGymObservation, BrowserGymState]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._task = os.environ.get("BROWSERGYM_TASK_NAME", "click-test")
        self._max_steps = int(os.environ.get("BROWSERGYM_MAX_STEPS", "10"))
        self._browser: Chromium | None = None
        self._page: Page | None = None
        self._state = BrowserGymState()
        self._done = False

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, task_name: str | None = None, **kwargs: Any
    ) -> BrowserGymObservation:
        """Without a seed, any. The browser is started for the first game and kept for the session. Raises ValueError, BrowserGone."""
        task = (task_name or self._task).removeprefix("miniwob.")
        if task not in TASKS:
            raise ValueError(f"there is no task {task!r}; known: {', '.join(TASKS)}")
        if self._page is None:
            self._browser = Chromium(PAGES)
            self._page = Page(self._browser)
        try:
            goal = self._page.begin(task, random.randrange(2**31) if seed is None else seed)
            self._done = False
            self._state = BrowserGymState(
                episode_id=episode_id or str(uuid.uuid4()),
                task_name=task,
                goal=goal,
                current_url=f"file:///pages/{task}.html",
                max_steps=self._max_steps,
            )
            return self._observation(0.0)
        except BrowserGone:
            self.close()
            raise

    def step(self, action: BrowserGymAction, timeout_s: float | None = None, **kwargs: Any) -> BrowserGymObservation:
        if self._page is None:
            raise ValueError("reset the game first")
        if self._done:
            return self._observation(0.0, "the task is over")
        error = ""
        self._state.step_count += 1
        try:
            try:
                self._page.act(action.action_str)
            except ActionError as wrong:
                error = str(wrong)
            ended, reward = self._page.result()
            self._done = ended or self._state.step_count >= self._max_steps
            self._state.cum_reward += reward
            return self._observation(reward, error)
        except BrowserGone as gone:
            self.close()
            raise SessionOver(str(gone)) from gone

    def close(self) -> None:
        browser, self._browser, self._page = self._browser, None, None
        if browser is not None:
            browser.close()

    @property
    def state(self) -> BrowserGymState:
        return self._state

    def _observation(self, reward: float, error: str = "") -> BrowserGymObservation:
        assert self._page is not None
        text = self._page.text()
        return BrowserGymObservation(
            text=text,
            axtree_txt=text,
            url=self._state.current_url,
            goal=self._state.goal,
            error=error,
            last_action_error=bool(error),
            done=self._done,
            reward=reward,
        )


app = create_app(
    BrowserGymEnvironment,
    BrowserGymAction,
    BrowserGymObservation,
    env_name="browsergym_env",
    state_cls=BrowserGymState,
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "8")),
)
