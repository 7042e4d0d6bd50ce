"""The LM head's peak memory, measured, at a vocabulary of 151,936 and 8k tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def measured(kind: str, tokens: int) -> int:
    result = subprocess.run(
        [sys.executable, "-m", "harness_rl.bench.head_memory", kind, str(tokens)], capture_output=True, text=True, timeout=190, check=True
    )
    return int(result.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.timeout(600)
def test_the_chunked_head_takes_at_most_a_fifth_of_the_plain_one_at_8k_tokens() -> None:
    """The plain head holds tokens x vocabulary several times over, so a straight line through two sizes gives it at 8,192 tokens, where it
    would need about 20 GB; it lies above the logits alone, which are 5 GB. The chunked one is measured there."""
    chunked, few, more = measured("chunked", 8192), measured("plain", 128), measured("plain", 512)
    plain = few + (more - few) * (8192 - 128) // (512 - 128)
    assert plain > 8192 * 151_936 * 4
    print(f"chunked {chunked / 2**20:.0f} MiB, plain {plain / 2**20:.0f} MiB")
    assert 0 < chunked <= plain / 5
