"""Wordle's rules and a player by them: the marks of a guess, the words that they leave, the guess that tells most of these apart."""

from __future__ import annotations

import functools
import re
from collections import Counter

from envs.textarena_env.words import SECRETS

_MARKS = re.compile(r"Feedback:\s*\n[A-Z ]+\n([GYX ]+)")


def marks(guess: str, secret: str) -> str:
    """G: the letter is there; Y: it is elsewhere, and not accounted for by another G or Y; X: it is not."""
    left = Counter(there for letter, there in zip(guess, secret, strict=True) if letter != there)
    found = ""
    for letter, there in zip(guess, secret, strict=True):
        if letter == there:
            found += "G"
        elif left[letter]:
            left[letter] -= 1
            found += "Y"
        else:
            found += "X"
    return found


def read_marks(feedback: str) -> str | None:
    """What TextArena's answer to a guess says; None where it was not taken, or has won."""
    seen = _MARKS.search(feedback)
    return seen[1].replace(" ", "") if seen else None


@functools.lru_cache(maxsize=4096)
def best_guess(words: tuple[str, ...] = SECRETS) -> str:
    """Of the words that are left, the first whose marks tell most of them apart."""
    return max(words, key=lambda guess: len({marks(guess, secret) for secret in words}))


def consistent(words: tuple[str, ...], guess: str, seen: str) -> tuple[str, ...]:
    """Those of `words` that would have got these marks for the guess."""
    return tuple(word for word in words if marks(guess, word) == seen)
