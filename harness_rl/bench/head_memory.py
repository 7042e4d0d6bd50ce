"""Peak memory of one LM head, forward and backward, in a process of its own:
`python -m harness_rl.bench.head_memory chunked|plain TOKENS` prints bytes.

What the process holds before (torch, the hidden states, the head itself) is taken off; the head's gradient is in.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from harness_rl.learner.logprobs import token_logprobs

VOCABULARY, WIDTH = 151_936, 16


def main(kind: str, tokens: int) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    targets, temperatures = torch.randint(0, VOCABULARY, (tokens,)), torch.full((tokens,), 0.7)
    torch.randn(8, WIDTH) @ torch.randn(WIDTH, 8)  # what the first multiplication sets up is not the head's
    before = _peak()
    if kind == "chunked":
        logprobs, _ = token_logprobs(hidden, weight, torch.arange(tokens), targets, temperatures)
    else:
        logits = hidden @ weight.T / temperatures[:, None]
        logprobs = torch.log_softmax(logits, -1).gather(-1, targets[:, None]).squeeze(-1)
    logprobs.sum().backward()
    return _peak() - before


def _peak() -> int:
    """Of this process alone; getrusage begins with what the parent held when it forked."""
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2])))
