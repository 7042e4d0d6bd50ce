"""Token-keyed graph of one session's turns.

Invariant: a turn's parent is the earlier turn whose prompt + completion is the longest exact token prefix of its prompt, among those that
were recorded when it was rendered; so parents do not depend on the order in which concurrent calls finish. Branches, roles and the reasons
that need hindsight (retry, discarded, auxiliary) are computed from the finished set in order of arrival, never updated in place. A turn's
ids are views of the longest array that continues them, so memory is linear in a conversation's tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from capture_proxy import delta
from capture_proxy.codec import Logps, common_prefix
from capture_proxy.ids import Ids, PrefixHash
from capture_proxy.reasons import Reason

RECENT_BODIES = 8
"""How many request bodies of a session are kept whole; concurrent sub-agents seldom need more."""


@dataclass(eq=False)
class Turn:
    """One call that reached the engine and came back with an answer."""

    node_id: str
    seq: int
    """Order of arrival in the session, from 1."""
    parent: str | None
    base: str | None
    """The turn relative to which prompt and request are stored: `parent` where there is one, else the turn recorded before."""
    keep: int
    """How many leading prompt ids are those of `base`'s prompt + completion."""
    prompt_len: int
    total: Ids
    """Prompt + sampled ids: the context that a continuation has. int32."""
    logps: Logps
    """One per sampled id, or empty when the engine's answer did not hold up (`reason` says so)."""
    reason: Reason | None
    """Why the turn is not trained, as known when it was recorded or amended; None: trained, unless hindsight says otherwise."""
    request: delta.Body
    """What the agent sent, relative to `base`'s request."""
    response: dict[str, Any]
    meta: dict[str, Any]
    """Facts of the call: sampling, seed, versions, times, engine, finish reason, findings."""
    chain: bytes
    """Key of the conversation that was asked."""
    reply_key: bytes
    """Key of that conversation with this answer."""
    system_key: bytes
    """Key of the leading system message, to tell agents from sub-agents."""
    rendered_len: int
    """Length and hash of the engine's plain render of the request, before any splice."""
    rendered_hash: str
    total_hash: bytes | None = None
    """Digest of `total`, where it is known already."""
    continues: str | None = None
    """The turn whose answer the request's history holds, whether or not the tokens could be kept."""
    tool_call_ids: tuple[str, ...] = ()
    has_tools: bool = False
    ruled: str | None = None
    """The role that a rule gave this call (`roles`)."""
    retry_mark: bool = False
    delivered: bool = True
    """The answer's last byte went out to the client. Stored before it is known: where the proxy died in between, it stays False."""

    @property
    def prompt(self) -> Ids:
        return self.total[: self.prompt_len]

    @property
    def completion(self) -> Ids:
        return self.total[self.prompt_len :]


@dataclass(frozen=True)
class Placed:
    """A turn with what only the whole session can tell."""

    turn: Turn
    branch: int
    role: str
    reason: Reason | None


@dataclass
class TurnGraph:
    """The turns of a session by node id, in order of recording."""

    turns: dict[str, Turn] = field(default_factory=dict)
    _by_total: dict[int, dict[bytes, list[str]]] = field(default_factory=dict)
    """Length of prompt + completion -> digest of it -> node ids of such turns, in order of recording."""

    _recent: dict[str, delta.Body] = field(default_factory=dict)
    """Bodies of the turns recorded last, so that a conversation that grows is not rebuilt at every call."""

    def parent_of(self, prompt: Ids, continues: Turn | None, digest: PrefixHash | None = None) -> str | None:
        """The recorded turn whose whole context is the longest prefix of `prompt`. One pass over the ids.

        Of several turns with the same tokens it is the one that the request `continues` by its messages, else the first.
        `digest` is the prompt's, where its caller goes on with it.
        """
        digest = digest or PrefixHash(prompt)
        best: list[str] = []
        shortest = 0
        if continues is not None and len(continues.total) <= len(prompt):
            # Usually it is a prefix; then shorter ones need no look.
            n = len(continues.total)
            shortest = n if digest.at(n) in self._by_total.get(n, ()) else 0
        for n in sorted(n for n in self._by_total if shortest <= n <= len(prompt)):
            best = self._by_total[n].get(digest.at(n), best)
        if continues is not None and continues.node_id in best:
            return continues.node_id
        return best[0] if best else None

    def place(self, parent: str | None, prompt: Ids) -> tuple[str | None, int, delta.Body | None]:
        """`(base, keep, the base's body)` relative to which a new turn with this parent and prompt is stored."""
        base = parent if parent is not None else next(reversed(self.turns), None)
        if base is None:
            return None, 0, None
        keep = len(self.turns[base].total) if parent is not None else common_prefix(self.turns[base].total, prompt)
        return base, keep, self.body(base)

    def add(self, turn: Turn) -> None:
        """Records a turn whose `parent`, `base` and `keep` come from `place`, and whose `request` is its body relative to the base's."""
        digest = turn.total_hash or PrefixHash(turn.total).whole()
        self._by_total.setdefault(len(turn.total), {}).setdefault(digest, []).append(turn.node_id)
        self.turns[turn.node_id] = turn
        self._recent[turn.node_id] = self.body(turn.node_id)
        if len(self._recent) > RECENT_BODIES:
            del self._recent[next(iter(self._recent))]
        ancestor = turn.parent
        while ancestor is not None:
            older = self.turns[ancestor]
            older.total = turn.total[: len(older.total)]
            ancestor = older.parent

    def body(self, node_id: str) -> delta.Body:
        """The request body of a turn, rebuilt from its base's."""
        chain: list[Turn] = []
        at: str | None = node_id
        while at is not None and at not in self._recent:
            chain.append(self.turns[at])
            at = self.turns[at].base
        body = self._recent[at] if at is not None else None
        for turn in reversed(chain):
            body = delta.apply(body, turn.request)
        assert body is not None
        return body

    def bodies(self) -> dict[str, delta.Body]:
        """Every turn's request body; unchanged parts are shared."""
        bodies: dict[str, delta.Body] = {}
        for turn in self.turns.values():
            bodies[turn.node_id] = delta.apply(bodies[turn.base] if turn.base is not None else None, turn.request)
        return bodies

    def placed(self) -> list[Placed]:
        """All turns in order of arrival, with branch, role and final reason."""
        turns = sorted(self.turns.values(), key=lambda turn: turn.seq)
        used = {turn.parent for turn in turns} | {turn.continues for turn in turns}
        branches = 0
        branch: dict[str, int] = {}
        extended: set[str] = set()
        main = _main_root(turns)
        roles: dict[str, str] = {}
        by_chain: defaultdict[bytes, list[Turn]] = defaultdict(list)
        for turn in turns:
            by_chain[turn.chain].append(turn)
        out: list[Placed] = []
        for turn in turns:
            if turn.parent is not None and turn.parent not in extended:
                extended.add(turn.parent)
                branch[turn.node_id] = branch[turn.parent]
            else:
                branch[turn.node_id], branches = branches, branches + 1
            # What a rule says is said of that call alone; what follows it is placed by itself.
            roles[turn.node_id] = roles[turn.parent] if turn.parent is not None else _root_role(turn, main)
            role = turn.ruled or roles[turn.node_id]
            reason = turn.reason
            if reason is None and turn.node_id not in used:
                reason = _unused_reason(turn, by_chain[turn.chain])
                if reason is None and not turn.delivered:
                    reason = Reason.ABANDONED
            if reason is None and role == "auxiliary":
                reason = Reason.AUXILIARY
            out.append(Placed(turn, branch[turn.node_id], role, reason))
        return out


def _main_root(turns: Iterable[Turn]) -> Turn | None:
    """The first root with tools, or the first root when no call of the session has tools; of those that no rule gives another role."""
    roots = [turn for turn in turns if turn.parent is None and turn.ruled is None]
    return next((turn for turn in roots if turn.has_tools), roots[0] if roots else None)


def _root_role(turn: Turn, main: Turn | None) -> str:
    """A root without tools beside an agent with tools is a side call; one with another system message is a sub-agent."""
    if main is None or turn is main:
        return "agent"
    if main.has_tools and not turn.has_tools:
        return "auxiliary"
    return "agent" if turn.system_key == main.system_key else "subagent"


def _unused_reason(turn: Turn, same_request: list[Turn]) -> Reason | None:
    """Whether a later identical request shows that the client did not use this answer. Repetition alone is no evidence."""
    for other in same_request:
        if other.seq <= turn.seq:
            continue
        if other.retry_mark:
            return Reason.RETRY
        if turn.meta.get("finish_reason") == "length" and other.meta["started_at"] >= turn.meta["ended_at"]:
            return Reason.DISCARDED
    return None
