"""Which recorded turn does a request continue?

Invariant: a turn is continued only by a request whose messages are that turn's messages, then its answer, then more (compared by
`messages.message_key`); among turns that fit equally, a tool-call id that we minted decides, then delivery, then the later start. The
result never depends on the order in which concurrent calls finished. Ids without the content continue nothing: the client has edited it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from capture_proxy.graph import Turn
from capture_proxy.messages import Message, chain_keys
from capture_proxy.reasons import Reason

RECENT = 8
"""How many requests of a session are kept, so that a conversation that grows is not digested anew at every call."""


@dataclass(frozen=True)
class Continuation:
    """The recorded turn, and the index of its answer in the request's messages."""

    turn: Turn
    answer_at: int


class History:
    """Index of a session's answers by the conversation up to and including each."""

    def __init__(self) -> None:
        self._by_key: defaultdict[bytes, list[Turn]] = defaultdict(list)
        self._by_call: dict[str, Turn] = {}
        """By the ids of the tool calls that they made."""
        self._recent: deque[tuple[list[Message], list[bytes]]] = deque(maxlen=RECENT)
        """Messages and keys of the requests seen last."""

    def keys(self, messages: list[Message], seed: bytes, reasoning: bool = True) -> list[bytes]:
        """`chain_keys(messages, seed, reasoning)`; what an earlier request began with is compared, not digested.

        `reasoning` is the same for all requests of a session.
        """
        known: list[bytes] = [seed]
        for before, keys in reversed(tuple(self._recent)):  # a big call's are compared in a thread
            if keys[0] != seed:
                continue
            shared = next((i for i, (a, b) in enumerate(zip(before, messages, strict=False)) if a != b), min(len(before), len(messages)))
            if shared >= len(known):
                known = keys[: shared + 1]
            if shared == len(before):
                break
        known = [*known[:-1], *chain_keys(messages[len(known) - 1 :], known[-1], reasoning)]
        self._recent.append((messages, known))
        return known

    def add(self, turn: Turn) -> None:
        self._by_key[turn.reply_key].append(turn)
        self._by_call |= dict.fromkeys(turn.tool_call_ids, turn)

    def find(self, messages: list[Message], keys: list[bytes]) -> Continuation | None:
        """The deepest recorded turn that the request continues; `keys` is `self.keys(messages, ...)`."""
        for index in range(len(messages) - 1, -1, -1):
            if messages[index].get("role") != "assistant":
                continue
            if turns := self._by_key.get(keys[index + 1]):
                return Continuation(_choose(turns, messages[index]), index)
        return None

    def edited(self, messages: list[Message], continuation: Continuation | None) -> Turn | None:
        """The turn that a request shows, by a tool-call id that we minted, later than the one it continues: its answer, or something
        before it, is not what it was."""
        last = -1 if continuation is None else continuation.answer_at
        for index in range(len(messages) - 1, last, -1):
            for call in messages[index].get("tool_calls") or ():
                if (turn := self._by_call.get(call["id"])) is not None:
                    return turn
        return None


def _choose(turns: list[Turn], answer: Message) -> Turn:
    ids = {call["id"] for call in answer.get("tool_calls") or ()}
    minted = [turn for turn in turns if ids & set(turn.tool_call_ids)]
    return max(minted or turns, key=lambda turn: (turn.delivered and turn.reason is not Reason.ABANDONED, turn.seq))
