"""Text of single tokens, from the model's own tokenizer file and without torch.

The pieces of a sequence joined together are the text of the sequence; a character that several tokens spell belongs to the token that
completes it. What a model wrote is never sent raw to a terminal: control characters are shown as their pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from harness_rl.configfile import load_config
from harness_rl.errors import UserError
from harness_rl.paths import cache_dir
from harness_rl.viewer.text import printable

_TOKENIZER_FILE = "tokenizer.json"
_INCOMPLETE = "\ufffd"
_LONGEST_CHARACTER = 4
"""Tokens that one character may need; after that an incomplete one is shown as it is."""


class Decoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, id: int) -> str | None: ...


def load_tokenizer(run_dir: Path) -> Decoder | None:
    """The tokenizer of the run's model; None where its file is not on this machine."""
    path = find_tokenizer(run_dir)
    if path is None:
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The package raises no narrower type for a file that it cannot read.
        raise UserError(f"trace: {path} is not a tokenizer file: {error}") from error


def find_tokenizer(run_dir: Path) -> Path | None:
    """Looked for in the run's own checkpoints, then in the model folder, the models cache and the hub's cache."""
    folders = sorted((run_dir / "checkpoints").glob("step-*"))
    config_file = run_dir / "config.toml"
    if config_file.is_file():
        name = load_config(config_file).model.name
        folders += [Path(name).expanduser(), cache_dir("models", name)]
        hub = Path.home() / ".cache" / "huggingface" / "hub" / f"models--{name.replace('/', '--')}"
        folders += sorted(hub.glob("snapshots/*"))
    return next((folder / _TOKENIZER_FILE for folder in folders if (folder / _TOKENIZER_FILE).is_file()), None)


def token_pieces(tokenizer: Decoder | None, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    """One printable piece per id; `before` is the context that the first of them continues.

    Without a tokenizer, and for ids that it does not know, the piece is the id.
    """
    if tokenizer is None:
        return [f"{token} " for token in ids]
    pieces: list[str] = []
    context = list(before[-_LONGEST_CHARACTER:])
    pending: list[int] = []
    for token in ids:
        if tokenizer.id_to_token(token) is None:
            pieces.append(f"⟨{token}⟩")
            context, pending = [], []
            continue
        pending.append(token)
        known = tokenizer.decode(context, skip_special_tokens=False)
        piece = tokenizer.decode(context + pending, skip_special_tokens=False)[len(known) :]
        if piece.endswith(_INCOMPLETE) and len(pending) < _LONGEST_CHARACTER:
            pieces.append("")
            continue
        pieces.append(printable(piece))
        context, pending = (context + pending)[-_LONGEST_CHARACTER:], []
    if pending:
        pieces[-1] = _INCOMPLETE
    return pieces
