"""Each checkpoint as a commit of a model repository on the Hugging Face Hub, in the background and never in training's way.

One upload runs at a time; of the checkpoints that come meanwhile only the newest waits, so that a slow line costs no more commits than it
can carry. What is uploaded is what a model's users need: weights, config, tokenizer; not the optimizer's state. A checkpoint is not deleted
while it is read. The client and its settings (HF_TOKEN, HF_ENDPOINT ...) are huggingface_hub's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from harness_rl.learner.checkpoint import MARKER, OPTIMIZER, STATE, Checkpoint, held

TRIES = 4
FIRST_PAUSE_S = 2.0
PRIVATE = [MARKER, STATE, f"{OPTIMIZER}/*"]

Told = Callable[[Checkpoint, str, str | None], None]
"""Gets each checkpoint that was uploaded or given up, where to, and what went wrong; called on the uploading thread."""


class Pusher:
    def __init__(self, repository: str, told: Told, private: bool = True, pause_s: float = FIRST_PAUSE_S) -> None:
        """`repository` is made if it does not exist, `private` or not."""
        self._repository, self._told, self._private, self._pause = repository, told, private, pause_s
        self._waiting: Checkpoint | None = None
        self._ending = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="pushing", daemon=True)
        self._thread.start()

    def push(self, checkpoint: Checkpoint) -> None:
        """Returns at once."""
        with self._change:
            self._waiting = checkpoint
            self._change.notify_all()

    def finish(self, timeout: float) -> bool:
        """Upload what waits, then end. False when that takes longer than `timeout` seconds."""
        with self._change:
            self._ending = True
            self._change.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting is not None or self._ending)
                checkpoint, self._waiting = self._waiting, None
            if checkpoint is None:
                return
            self._told(checkpoint, self._repository, self._try(checkpoint))

    def _try(self, checkpoint: Checkpoint) -> str | None:
        """None, or what went wrong with the last of `TRIES` tries; a refusal that no second try can change is not tried again."""
        import httpx
        from huggingface_hub.errors import HfHubHTTPError

        pause = self._pause
        for attempt in range(TRIES):
            try:
                with held(checkpoint.path):
                    self._upload(checkpoint)
                return None
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on and the user is told
                status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
                passing = status in (408, 429) or (status or 0) >= 500 or isinstance(error, httpx.TransportError)
                if not passing or attempt == TRIES - 1:
                    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            time.sleep(pause)
            pause *= 2
        return None

    def _upload(self, checkpoint: Checkpoint) -> None:
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(self._repository, private=self._private, exist_ok=True)
        api.upload_folder(
            repo_id=self._repository,
            folder_path=checkpoint.path,
            commit_message=f"Step {checkpoint.step} ({checkpoint.version})",
            ignore_patterns=PRIVATE,
        )
