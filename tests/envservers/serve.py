"""The tests' servers in one process: the ledger, and the examples' games. CLOSE_EVERY_S: how long each WebSocket lasts, in seconds."""

from __future__ import annotations

import os
from functools import partial

from envs.echo_env.server import app as echo
from envs.openspiel_env.server import app as openspiel
from envs.textarena_env import TextArenaAction, TextArenaObservation
from envs.textarena_env.server import TextArenaEnvironment, textarena
from envs.textarena_env.server import app as wordle
from envservers.apps import Closing, LedgerAction, LedgerEnvironment, LedgerObservation
from openenv.core.env_server import create_app

main = create_app(LedgerEnvironment, LedgerAction, LedgerObservation, max_concurrent_envs=int(os.environ["MAX_CONCURRENT_ENVS"]))
main.add_api_route("/pid", os.getpid)
main.mount("/echo", echo)
main.mount("/openspiel", openspiel)
main.mount("/wordle", wordle)
textarena().make("Wordle-v0")  # reads its dictionary now, not in the first game
easy = partial(TextArenaEnvironment, "Sudoku-v0-very-easy")
main.mount("/sudoku", create_app(easy, TextArenaAction, TextArenaObservation, max_concurrent_envs=8))
seconds = float(os.environ.get("CLOSE_EVERY_S", "0"))
app = Closing(main, seconds) if seconds else main
