"""Control tokens that a user or a tool merely quotes, such as `<|im_end|>` in a file that the agent reads.

Invariant: they are found on every call. An engine's tokenizer makes real control tokens of them (`as_engine`); under `split` they are
encoded as the text that they are, and nothing else of the engine's render is touched: a stretch of ids that holds none stays id for id.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from capture_proxy.engine import Rendered
from capture_proxy.messages import Message
from capture_proxy.upstream import EngineError

USUAL = re.compile(r"<\|[\w./-]{1,64}\|>|<｜[\w▁./-]{1,64}｜>|</?(?:think|tool_call|tool_response|s)>|<(?:start|end)_of_turn>|\[/?INST\]")
"""How the control tokens of known model families look, where the tokenizer itself is not at hand."""
MARKS = tuple((chr(at), chr(at + 1)) for at in range(0x10FF00, 0x10FFFE, 2))
"""Pairs of private-use characters to stand around the number of a hidden token: of the last ones, where no font draws its icons. No
tokenizer merges them with digits or with what surrounds them."""


def quoted(messages: list[Message], pattern: re.Pattern[str] = USUAL) -> tuple[str, ...]:
    """The control tokens that stand in the text of other messages than the assistant's, each once, in order."""
    found: dict[str, None] = {}
    for message in messages:
        if message.get("role") != "assistant":
            for text in _texts(message.get("content")):
                found.update(dict.fromkeys(pattern.findall(text)))
    return tuple(found)


@dataclass(frozen=True)
class Hidden:
    """Messages without quoted control tokens, and what stood in their places."""

    messages: list[Message]
    tokens: tuple[str, ...]
    marks: tuple[str, str]
    """What stands around each token's number; in none of the messages."""


class ControlTokens:
    """The control tokens of one tokenizer, and how their text is encoded."""

    def __init__(self, path: Path) -> None:
        """`path`: the model's tokenizer.json. Raises ValueError when it cannot be used."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            self._whole = Tokenizer.from_str(json.dumps(raw))
            self._ids = frozenset(int(token["id"]) for token in raw["added_tokens"])
            names = sorted((str(token["content"]) for token in raw["added_tokens"]), key=len, reverse=True)
            self._plain = Tokenizer.from_str(json.dumps({**raw, "added_tokens": [], "post_processor": None}))
        except Exception as error:
            raise ValueError(f"{path} cannot be used as a tokenizer.json: {error}") from error
        self.pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def hide(self, messages: list[Message]) -> Hidden:
        """The messages with a numbered mark in place of each quoted control token. Raises `EngineError` where they hold every mark."""
        tokens: list[str] = []
        texts = [text for message in messages for text in _texts(message.get("content"))]
        unused = (pair for pair in MARKS if not any(mark in text for mark in pair for text in texts))
        if (marks := next(unused, None)) is None:
            raise EngineError("the messages hold every private-use character (from U+10FF00 on) that could mark a quoted control token")
        opening, closing = marks

        def mark(match: re.Match[str]) -> str:
            tokens.append(match[0])
            return f"{opening}{len(tokens) - 1}{closing}"

        def shown(text: str) -> str:
            return self.pattern.sub(mark, text)

        out = []
        for message in messages:
            content = message.get("content")
            if message.get("role") == "assistant" or content is None:
                out.append(message)
            elif isinstance(content, str):
                out.append({**message, "content": shown(content)})
            else:
                out.append({**message, "content": [{**part, "text": shown(part["text"])} if "text" in part else part for part in content]})
        return Hidden(out, tuple(tokens), marks)

    def restore(self, rendered: Rendered, hidden: Hidden) -> Rendered:
        """The render with the hidden tokens as text. Raises `EngineError` where this is not the engine's own tokenizer."""
        if not hidden.tokens:
            return rendered
        opening, closing = hidden.marks
        out: list[int] = []
        found = 0
        for stretch, control in self._stretches(rendered.ids.tolist()):
            text = "" if control else self._whole.decode(stretch, skip_special_tokens=False)
            if opening not in text:
                out += stretch
                continue
            if self._encoded(text) != stretch:
                raise EngineError("--tokenizer is not the engine's tokenizer: it encodes the engine's own render as other ids")
            pieces = re.split(f"{opening}(\\d+){closing}", text)
            found += len(pieces) // 2
            out += self._encoded("".join(hidden.tokens[int(piece)] if n % 2 else piece for n, piece in enumerate(pieces)))
        if found != len(hidden.tokens):
            raise EngineError(f"the engine's template shows {found} of {len(hidden.tokens)} quoted control tokens")
        return replace(rendered, ids=np.array(out, dtype=np.int32))

    def _stretches(self, ids: list[int]) -> list[tuple[list[int], bool]]:
        """Runs of ordinary ids, and single control tokens."""
        out: list[tuple[list[int], bool]] = []
        for i in ids:
            if i in self._ids:
                out.append(([i], True))
            elif out and not out[-1][1]:
                out[-1][0].append(i)
            else:
                out.append(([i], False))
        return out

    def _encoded(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if isinstance(part.get("text"), str)]
