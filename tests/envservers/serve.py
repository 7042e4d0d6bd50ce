"""The tests' servers, in one process because starting one takes seconds: the ledger, the examples' games, a server with one session at
`/small`, and servers whose WebSockets last so many seconds at `/closing2.5` and `/closing30`."""

from __future__ import annotations

from functools import partial
from typing import Any

from envs.echo_env.server import app as echo
from envs.openspiel_env.server import app as openspiel
from envs.textarena_env import TextArenaAction, TextArenaObservation
from envs.textarena_env.server import TextArenaEnvironment, textarena
from envs.textarena_env.server import app as wordle
from envservers.apps import Closing, ledger
from openenv.core.env_server import create_app


def with_wordle(app: Any) -> Any:
    app.mount("/wordle", wordle)
    return app


textarena().make("Wordle-v0")  # reads its dictionary now, not in the first game
easy = partial(TextArenaEnvironment, "Sudoku-v0-very-easy")
app = with_wordle(ledger())
app.mount("/echo", echo)
app.mount("/openspiel", openspiel)
app.mount("/sudoku", create_app(easy, TextArenaAction, TextArenaObservation, max_concurrent_envs=8))
app.mount("/small", ledger(sessions=1))
for seconds in (2.5, 30):
    app.mount(f"/closing{seconds}", Closing(with_wordle(ledger()), seconds))
