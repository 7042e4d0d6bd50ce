"""What the learner's packing brings, with the same weights and the same rows: padded batches, plain packing, prefix trees.

`python -m harness_rl.bench.learner MODEL_FOLDER REPORT.md`, in the torch environment. Four loads: (a) 8 rollouts of one long prompt, (b)
one conversation whose every turn drops the thinking of the one before, so that each is a row of its own, (c) rows that share nothing, (d)
a step of the quickstart's. A bar is a ratio of times to a ratio of FLOPs: what sharing could bring at best, which the lengths alone
decide. And the LM head's peak memory, in chunks and whole.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from harness_rl.bench.learner_ways import Measured, Sizes

CPU = Sizes(prompt=2048, own=256, turns=60)
GPU = Sizes(prompt=8192, own=1024, turns=60, thought=512, said=128, output=256)
LOADS = {
    "shared": "(a) 8 rollouts of one prompt",
    "forked": "(b) a conversation that drops its thinking",
    "apart": "(c) nothing shared",
    "quickstart": "(d) a step of the quickstart's",
}
HEAD_TOKENS, HEAD_FEW, HEAD_MORE = 8192, 128, 512
HEAD_VOCABULARY = 151_936


def measured(model: Path, load: str, way: str, sizes: Sizes, rounds: int) -> Measured:
    command = [sys.executable, "-m", "harness_rl.bench.learner_ways", str(model), load, way, json.dumps(asdict(sizes))]
    one = Measured(**_json([*command, "--rounds", str(rounds)]))
    turns = f", {sizes.turns} turns" if load == "forked" else ""
    _tell(f"{LOADS[load]}{turns}, {way}: {one.seconds:.2f} s, {one.forwarded} tokens forwarded, {one.peak_bytes >> 20} MiB")
    return one


def head_bytes(kind: str, tokens: int) -> int:
    found = int(_json([sys.executable, "-m", "harness_rl.bench.head_memory", kind, str(tokens)]))
    _tell(f"LM head, {kind}, {tokens} tokens: {found >> 20} MiB")
    return found


def _tell(line: str) -> None:
    """Each measurement as it comes: the report is written when all are there."""
    print(line, file=sys.stderr, flush=True)


def _json(command: list[str]) -> Any:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def bars(found: dict[tuple[str, str], Measured], growth: list[Measured]) -> list[tuple[str, float, str, bool]]:
    """(what, value, bar, met) of each."""
    plain, tree, padded = ({load: found[load, way] for load in LOADS} for way in ("plain", "tree", "padded"))
    bound = plain["shared"].flops / tree["shared"].flops
    gain = plain["shared"].seconds / tree["shared"].seconds
    same = tree["apart"].seconds / plain["apart"].seconds
    per_flop = plain["apart"].seconds / plain["apart"].flops
    unique = tree["forked"].seconds / (tree["forked"].flops * per_flop)
    rates = [one.seconds / one.flops for one in growth]
    bytes_ = [one.peak_bytes / one.forwarded for one in growth]
    step = plain["quickstart"].seconds / tree["quickstart"].seconds
    sums = [abs(way[load].total / plain[load].total - 1) for way in (tree, padded) for load in LOADS]
    return [
        (f"(a) tree against plain: {gain:.2f} times faster, the FLOPs allow {bound:.2f}", gain / bound, ">= 0.85", gain / bound >= 0.85),
        ("(c) time of the tree way, of plain packing's", same, "<= 1.05", same <= 1.05),
        ("(b) time of the tree way, of what its FLOPs cost in (c)", unique, "<= 1.3", unique <= 1.3),
        (
            "(b) time for each FLOP: the longest conversation's, of the shortest's",
            rates[-1] / rates[0],
            "<= 1.3",
            rates[-1] <= 1.3 * rates[0],
        ),
        ("(b) memory for each token: the longest's, of the shortest's", bytes_[-1] / bytes_[0], "<= 1.3", bytes_[-1] <= 1.3 * bytes_[0]),
        ("(d) times that the tree way is faster than plain packing", step, ">= 1.5", step >= 1.5),
        ("sums of logprobs differ by, relatively", max(sums), "<= 1e-3", max(sums) <= 1e-3),
    ]


def report(model: str, found: dict[tuple[str, str], Measured], growth: list[Measured], head: tuple[int, int]) -> str:
    chunked, plain_head = head
    lines = ["# The learner's packing", "", f"{model}, {_machine()}; forward and backward, no optimizer.", ""]
    for load, title in LOADS.items():
        trained, best = found[load, "plain"].trained, found[load, "plain"].flops
        lines += [f"## {title}: {trained} sampled tokens", ""]
        lines += ["| | trained tokens/s | tokens forwarded | FLOPs, of plain | peak memory (MiB) | packing (s) |", "| --- " * 6 + "|"]
        for way in ("padded", "plain", "tree"):
            one = found[load, way]
            cells = (f"{trained / one.seconds:.1f}", one.forwarded, f"{one.flops / best:.2f}", one.peak_bytes >> 20, f"{one.packing:.3f}")
            lines.append(f"| {way} | " + " | ".join(map(str, cells)) + " |")
        lines.append("")
    lines += ["## Growth of (b)", "", "| turns | tokens forwarded | seconds | peak memory (MiB) |", "| --- " * 4 + "|"]
    for one in growth:
        lines.append(f"| {one.load} | {one.forwarded} | {one.seconds:.2f} | {one.peak_bytes >> 20} |")
    lines += ["", "## Bars", "", "| | found | bar | |", "| --- " * 4 + "|"]
    share = chunked / plain_head
    all_bars = [*bars(found, growth), (f"LM head, {HEAD_TOKENS} tokens, vocabulary {HEAD_VOCABULARY}", share, "<= 0.2", share <= 0.2)]
    for what, value, bar, met in all_bars:
        lines.append(f"| {what} | {value:.3g} | {bar} | {'met' if met else 'MISSED'} |")
    lines += [
        "",
        f"LM head: {chunked >> 20} MiB in chunks; plain {plain_head >> 20} MiB, by a line through {HEAD_FEW} and {HEAD_MORE} tokens.",
        "",
    ]
    return "\n".join(lines)


def _machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, bfloat16"
    return f"{torch.get_num_threads()} threads, float32"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=json.loads, default={}, help="fields of Sizes to change, as JSON: a quick look on a small model")
    args = parser.parse_args()
    sizes = replace(GPU if torch.cuda.is_available() else CPU, **args.sizes)
    ways = [(load, way) for load in LOADS for way in ("padded", "plain", "tree")]
    found = {(load, way): measured(args.model, load, way, sizes, args.rounds) for load, way in ways}
    parts = [replace(sizes, turns=turns) for turns in (sizes.turns // 4, sizes.turns // 2)]
    growth = [*(measured(args.model, "forked", "tree", part, args.rounds) for part in parts), found["forked", "tree"]]
    growth = [replace(one, load=str(turns)) for one, turns in zip(growth, [*(part.turns for part in parts), sizes.turns], strict=True)]
    few, more = head_bytes("plain", HEAD_FEW), head_bytes("plain", HEAD_MORE)
    head = head_bytes("chunked", HEAD_TOKENS), few + (more - few) * (HEAD_TOKENS - HEAD_FEW) // (HEAD_MORE - HEAD_FEW)
    text = report(args.model.name, found, growth, head)
    args.report.write_text(text)
    print(text)
    return 1 if "MISSED" in text else 0


if __name__ == "__main__":
    sys.exit(main())
