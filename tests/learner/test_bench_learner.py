"""`make bench-learner` on a tiny model: the ways do the same work, and the report holds every bar. Its times are of no meaning here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from learner_helpers import tiny_llama

from harness_rl.bench.learner import LOADS, bars, report
from harness_rl.bench.learner_ways import Measured, Sizes, measure

VOCABULARY = 5000
"""So many that no two random tokens are the same where they must differ."""
SIZES = Sizes(prompt=24, own=6, turns=6, thought=3, said=2, output=2, groups=2, members=4)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Measured]:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_llama()
    model.resize_token_embeddings(VOCABULARY)
    model.save_pretrained(folder)
    return {(load, way): measure(folder, load, way, SIZES, 1) for load in LOADS for way in ("padded", "plain", "tree")}


def test_all_ways_score_the_same_tokens_alike(found: dict[tuple[str, str], Measured]) -> None:
    for load in LOADS:
        plain = found[load, "plain"]
        for way in ("padded", "tree"):
            assert found[load, way].trained == plain.trained
            assert found[load, way].total == pytest.approx(plain.total, rel=1e-5)


def test_what_each_way_forwards_is_arithmetic(found: dict[tuple[str, str], Measured]) -> None:
    """(a) 8 rows of 24 + 6, the 24 once in a tree. (b) row n is 2 + 4 n of history, 3 thought and 2 said; a tree holds the longest history
    and 5 more for each turn. (c) nothing to share."""
    assert [found["shared", way].forwarded for way in ("padded", "plain", "tree")] == [240, 240, 24 + 8 * 6]
    rows = [2 + 4 * n + 5 for n in range(6)]
    assert [found["forked", way].forwarded for way in ("padded", "plain", "tree")] == [6 * rows[-1], sum(rows), 2 + 4 * 5 + 6 * 5]
    assert [found["apart", way].forwarded for way in ("padded", "plain", "tree")] == [240] * 3
    # (d) 8 rows of 269; in a tree the 120 of all once, a group's 27 and its half that says the same once, and 2 rows of 122 more.
    assert [found["quickstart", way].forwarded for way in ("plain", "tree")] == [8 * 269, 120 + 2 * (27 + 3 * 122)]
    assert found["quickstart", "tree"].trained == 8 * 82
    # 4 heads of width 8 in 2 layers; 30 tokens have 30 * 31 / 2 pairs each, in a tree the prompt's 24 * 25 / 2 only once.
    prompt, whole = 24 * 25 / 2, 30 * 31 / 2
    saved = found["shared", "plain"].flops - found["shared", "tree"].flops
    weights = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 32 * 48 * 3 + 32 * 2) + 32
    assert saved == pytest.approx(
        12 * 32 * 2 * (8 * whole - (prompt + 8 * (whole - prompt))) + 6 * weights * 7 * 24 + 8 * VOCABULARY * 32 * 7
    )


def test_the_report_holds_every_bar_and_says_which_is_missed(found: dict[tuple[str, str], Measured]) -> None:
    slow = dict(found)
    even = {key: replace(one, seconds=one.flops, peak_bytes=one.forwarded) for key, one in slow.items()}
    growth = [replace(even["forked", "tree"], load=str(turns)) for turns in (15, 30, 60)]
    assert all(met for _, _, _, met in bars(even, growth))
    text = report("m", even, growth, (1, 5))
    assert text.count("| met |") == 8 and "MISSED" not in text
    even["shared", "tree"].seconds *= 1.3
    growth[-1].peak_bytes *= 2
    assert report("m", even, growth, (2, 5)).count("| MISSED |") == 3
