"""Echo: send a word, and it comes back. The smallest environment: one tool, one short turn, and credit for coming close."""

from __future__ import annotations

import difflib
from typing import Any

WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "tiger",
    "piano",
    "lemon",
    "candle",
    "window",
    "rocket",
    "garden",
    "silver",
    "bridge",
    "castle",
    "dragon",
    "forest",
    "hammer",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "market",
    "needle",
    "orange",
    "pencil",
    "rabbit",
    "saddle",
    "temple",
    "violin",
    "wallet",
    "yellow",
    "zebra",
]


class EchoEnv:
    def __init__(self) -> None:
        self.word = ""
        self.heard = ""

    def reset(self, word: str, **columns: Any) -> None:
        self.word, self.heard = word, ""

    def echo(self, message: str) -> str:
        """Send a message; it comes back.

        Args:
            message: What to send.
        """
        if not isinstance(message, str):  # a model may send anything
            raise ValueError("message must be a text")
        self.heard = message
        return message

    def get_reward(self) -> float:
        """1 for the word itself, less for what only resembles it, 0 for silence."""
        return difflib.SequenceMatcher(None, self.word, self.heard).ratio()


def rows() -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"Echo: {word}"}], "word": word} for word in WORDS]


def demonstration(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns of a policy that plays well, for the warm start."""
    return [{"content": None, "tool_calls": [{"name": "echo", "arguments": {"message": row["word"]}}]}, {"content": "Done."}]
