"""`harness-rl trace`: what a rollout's turns were, token by token, and which of them were trained.

The colours are the captured loss mask and nothing else: green tokens are trained, yellow ones were sampled and kept as context (the turn
names the reason), dim text is what the engine was given since the parent turn.
"""

from __future__ import annotations

import math
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from capture_proxy.trace import TrainingTrace, TrainingTurn
from harness_rl.viewer.rollouts import RolloutSummary, find_rollout, list_rollouts, load_trace, rollouts_table
from harness_rl.viewer.text import by_count, number, printable
from harness_rl.viewer.tokens import Decoder, load_tokenizer, token_pieces

TRAINED, CONTEXT, PROMPT = "green", "yellow", "dim"

_SHADES = {
    TRAINED: ("#2a7a3f", "#33994d", "#3fb950", "#7ee787", "#d2ffd9"),
    CONTEXT: ("#7d6219", "#a5801f", "#d29922", "#f0c45c", "#fff1c2"),
}
_SHADE_FROM = (0.9, 0.5, 0.2, 0.05)
"""Probabilities above which a token gets each of the darker shades: the brighter, the less expected."""

_PROMPT_SHOWN = 320
"""New prompt tokens of a turn that are shown without `full`: so many at each end, half and half."""


def show_trace(
    run_dir: Path,
    rollout: str | None,
    *,
    console: Console,
    json: bool = False,
    logprobs: bool = False,
    full: bool = False,
) -> None:
    """Print a rollout (its id or a unique beginning of it) or, without one, the list of them.

    `json`: one JSON document instead. `logprobs`: shade sampled tokens by their probability. `full`: whole prompts. Raises UserError.
    """
    if rollout is None:
        rollouts = list_rollouts(run_dir)
        if json:
            _print_json(console, [vars(summary) for summary in rollouts])
        else:
            console.print(rollouts_table(rollouts))
        return
    summary = find_rollout(run_dir, rollout)
    trace = load_trace(run_dir, summary)
    tokenizer = load_tokenizer(run_dir)
    if json:
        _print_json(console, {**vars(summary), "turns": [_turn_record(turn, new_from(trace, turn), tokenizer) for turn in trace.turns]})
        return
    console.print(_headline(summary, trace, tokenizer))
    for index, turn in enumerate(trace.turns, start=1):
        console.print()
        console.print(Rule(_turn_title(index, turn), align="left", style="bright_black"))
        console.print(_turn_facts(turn, new_from(trace, turn)))
        console.print(turn_text(turn, new_from(trace, turn), tokenizer, logprobs=logprobs, full=full), soft_wrap=True)


def new_from(trace: TrainingTrace, turn: TrainingTurn) -> int:
    """Where the turn's prompt leaves the tokens of its parent (its prompt and what it sampled); 0 without a parent."""
    parent = next((other for other in trace.turns if other.node_id == turn.metadata.get("parent")), None)
    if parent is None:
        return 0
    before = np.concatenate([parent.prompt_token_ids, parent.completion_token_ids])
    shared = min(len(before), len(turn.prompt_token_ids))
    differs = np.flatnonzero(before[:shared] != turn.prompt_token_ids[:shared])
    return int(differs[0]) if len(differs) else shared


def turn_text(turn: TrainingTurn, start: int, tokenizer: Decoder | None, *, logprobs: bool = False, full: bool = False) -> Text:
    """The prompt from `start` on, then every sampled token in the colour of its mask."""
    text = _prompt_text(turn.prompt_token_ids.tolist(), start, tokenizer, full)
    pieces = token_pieces(tokenizer, turn.completion_token_ids.tolist(), turn.prompt_token_ids[-8:].tolist())
    for piece, trained, logprob in zip(pieces, turn.completion_mask.tolist(), turn.per_token_logps.tolist(), strict=True):
        colour = TRAINED if trained else CONTEXT
        text.append(piece.replace("\n", "↵\n"), _shade(colour, logprob) if logprobs else colour)
    return text


def _prompt_text(ids: list[int], start: int, tokenizer: Decoder | None, full: bool) -> Text:
    pieces = token_pieces(tokenizer, ids[start:], ids[:start])
    cut = len(pieces) - _PROMPT_SHOWN
    if full or cut <= 0:
        return Text.assemble(("".join(pieces), PROMPT))
    half = _PROMPT_SHOWN // 2
    return Text.assemble(
        ("".join(pieces[:half]), PROMPT), (f" … {cut:,} tokens not shown (--full) … ", "cyan"), ("".join(pieces[-half:]), PROMPT)
    )


def _shade(colour: str, logprob: float) -> str:
    probability = math.exp(logprob)
    level = next((index for index, bound in enumerate(_SHADE_FROM) if probability > bound), len(_SHADE_FROM))
    return _SHADES[colour][level]


def _headline(summary: RolloutSummary, trace: TrainingTrace, tokenizer: Decoder | None) -> Text:
    reasons: dict[str, int] = {}
    for turn in trace.turns:
        reason = turn.metadata.get("mask_reason")
        if reason:
            reasons[reason] = reasons.get(reason, 0) + 1
    trained = sum(int(turn.loss_mask.sum()) for turn in trace.turns)
    sampled = sum(len(turn.completion_token_ids) for turn in trace.turns)
    line = Text.assemble((summary.rollout_id, "bold"), f"   {printable(summary.task or '')}" if summary.task else "")
    line.append(f"\nreward {number(summary.reward)}", "bold")
    line.append(f"   {len(trace.turns)} turns   {sampled:,} tokens sampled   ")
    line.append(f"{trained:,} trained", TRAINED)
    line.append("   ")
    line.append(f"{sampled - trained:,} kept as context", CONTEXT)
    if reasons:
        line.append(f"\nturns not trained: {by_count(reasons)}", CONTEXT)
    if summary.cause:
        line.append(f"\nno reward: {summary.cause}", "red")
    if tokenizer is None:
        line.append("\nids are shown: the model's tokenizer.json is not on this machine", "cyan")
    return line


def _turn_title(index: int, turn: TrainingTurn) -> Text:
    meta = turn.metadata
    title = Text.assemble((f"turn {index}", "bold"), f"  {meta.get('role', 'agent')}")
    if meta.get("branch") is not None:
        title.append(f"  branch {meta['branch']}", "dim")
    if meta.get("finish_reason"):
        title.append(f"  {meta['finish_reason']}", "dim")
    if meta.get("origin") not in (None, "sampled"):
        title.append(f"  {meta['origin']}", "cyan")
    if meta.get("mask_reason"):
        title.append(f"  {meta['mask_reason']}", CONTEXT)
    return title


def _turn_facts(turn: TrainingTurn, start: int) -> Text:
    prompt, sampled, trained = len(turn.prompt_token_ids), len(turn.completion_token_ids), int(turn.loss_mask.sum())
    line = Text(f"prompt {prompt:,} (+{prompt - start:,})   sampled {sampled:,}   trained {trained:,}", "dim")
    if sampled:
        line.append(f"   mean logprob {number(float(turn.per_token_logps.mean()))}")
    spans = turn.metadata.get("weight_versions") or []
    if spans:
        line.append("   version " + ", ".join(_span(span, sampled) for span in spans))
    return line


def _span(span: Any, sampled: int) -> str:
    """`k3f9-12`, with its positions where it did not sample the whole completion."""
    version, start, end = span
    return f"{version}" if (start, end) == (0, sampled) else f"{version} [{start}, {end})"


def _turn_record(turn: TrainingTurn, start: int, tokenizer: Decoder | None) -> dict[str, Any]:
    ids = turn.completion_token_ids.tolist()
    pieces: list[Any] = list(token_pieces(tokenizer, ids, turn.prompt_token_ids[-8:].tolist())) if tokenizer else [None] * len(ids)
    tokens = zip(ids, pieces, turn.per_token_logps.tolist(), turn.completion_mask.tolist(), strict=True)
    return {
        "node_id": turn.node_id,
        **turn.metadata,
        "prompt_tokens": len(turn.prompt_token_ids),
        "prompt_new_from": start,
        "completion": [{"id": token, "text": text, "logprob": logprob, "trained": bool(mask)} for token, text, logprob, mask in tokens],
    }


def _print_json(console: Console, document: Any) -> None:
    """Straight to the console's file: JSON must not be wrapped or coloured."""
    console.file.write(dumps(document, indent=1, allow_nan=False, default=str) + "\n")
