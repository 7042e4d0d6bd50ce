"""`capture-proxy replay STORE`: every trace derived anew from its log alone, proven by the hashes that were taken when the engine answered.

Invariant: nothing is written, and a log that does not hold up is named with its turn, never passed over.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from capture_proxy.records import trace_from_log
from capture_proxy.store import StoreError, read_log
from capture_proxy.trace import TrainingTrace, hash_ids


def problems(trace: TrainingTrace) -> Iterator[str]:
    """What of a trace is not what was recorded."""
    for turn in trace.turns:
        meta = turn.metadata
        recomputed = {"prompt_hash": hash_ids(turn.prompt_token_ids), "completion_hash": hash_ids(turn.completion_token_ids)}
        for name, value in recomputed.items():
            if meta.get(name) != value:
                yield f"turn {turn.node_id}: {name} is {value}, recorded was {meta.get(name)}"
    if TrainingTrace.from_bytes(trace.to_bytes()) != trace:
        yield "its binary form does not read back equal"


def main(argv: Sequence[str]) -> int:
    """0 when every trace holds up, 1 when one does not, 2 for wrong input."""
    p = argparse.ArgumentParser(prog="capture-proxy replay", description="Derives every trace of a store anew, and compares.")
    p.add_argument("store", type=Path, metavar="STORE", help="folder of the session logs")
    p.add_argument("--traces", type=Path, metavar="DIR", help="also compare with the trace.bin files below this folder")
    args = p.parse_args(argv)
    logs = sorted(args.store.glob("**/*.log"))
    if not logs:
        p.error(f"{args.store} holds no session logs")
    saved = {}
    failed = turns = tokens = compared = 0
    for path in sorted(args.traces.glob("**/trace.bin")) if args.traces else ():
        try:
            trace = TrainingTrace.from_bytes(path.read_bytes())
        except ValueError as error:
            print(f"{path}: {error}")
            failed += 1
            continue
        if trace.turns:
            saved[trace.turns[0].node_id] = (path, trace)
    for log in logs:
        if not log.stat().st_size:
            continue  # killed before its first record
        found = []
        try:
            trace = trace_from_log(log)
            found = list(problems(trace))
            torn = read_log(log).torn_bytes
        except (StoreError, ValueError, KeyError, TypeError) as error:
            found = [str(error)]
        else:
            if torn:
                found.append(f"{torn} bytes after its last whole record are torn")
            turns += len(trace.turns)
            tokens += sum(len(turn.completion_token_ids) for turn in trace.turns)
            path, other = saved.pop(trace.turns[0].node_id, (None, None)) if trace.turns else (None, None)
            compared += other is not None
            if other is not None and other != trace:
                found.append(f"{path} is another trace")
        failed += bool(found)
        for problem in found:
            print(f"{log.name}: {problem}")
    for path, _ in saved.values():
        failed += 1
        print(f"{path}: no log of this store begins with its first turn")
    print(f"{len(logs)} sessions, {turns} turns, {tokens} sampled tokens, {compared} saved traces compared: {failed or 'none'} wrong")
    return 1 if failed else 0
