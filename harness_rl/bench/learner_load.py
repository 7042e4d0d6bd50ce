"""A learner-like load, run as a script by the torch environment: forward, chunked token log-probabilities, backward, clip, AdamW.

Prints one JSON line when ready and one per step, so that a reader can time exactly the steps that overlap with something else.
It ends when its standard input closes, or after `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import select
import sys
import time
from typing import Any


def step(model: Any, optimizer: Any, ids: Any, chunk: int = 128) -> None:
    """One optimizer step on `ids` [1, L] that never holds more than `chunk` x vocabulary logits."""
    import torch
    from torch.utils.checkpoint import checkpoint

    hidden = model.model(input_ids=ids).last_hidden_state[0, :-1]
    targets = ids[0, 1:]

    def logprobs(part: Any, target: Any) -> Any:
        return torch.log_softmax(model.lm_head(part).float(), -1).gather(-1, target[:, None])[:, 0]

    total = sum(
        checkpoint(logprobs, hidden[i : i + chunk], targets[i : i + chunk], use_reentrant=False).sum()
        for i in range(0, len(targets), chunk)
    )
    (-total / len(targets)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=600.0)
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.randint(100, model.config.vocab_size, (1, args.length))
    step(model, optimizer, ids)
    print(json.dumps({"ready": True, "threads": torch.get_num_threads()}), flush=True)
    deadline = time.monotonic() + args.seconds
    while time.monotonic() < deadline and not select.select([sys.stdin], [], [], 0)[0]:
        started = time.monotonic()
        step(model, optimizer, ids)
        print(json.dumps({"tokens": args.length, "seconds": time.monotonic() - started}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
