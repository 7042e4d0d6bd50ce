from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from capture_proxy.trace import TrainingTrace
from harness_rl.errors import UserError
from harness_rl.viewer.tokens import load_tokenizer, token_pieces
from harness_rl.viewer.trace import CONTEXT, PROMPT, TRAINED, new_from, show_trace, turn_text


def shown(run_dir: Path, rollout: str | None, **options: Any) -> str:
    out = io.StringIO()
    show_trace(run_dir, rollout, console=Console(file=out, width=120), **options)
    return out.getvalue()


def pieces(text: Any) -> list[tuple[str, str]]:
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def test_exactly_the_trained_tokens_are_green(run_dir: Path, trace: TrainingTrace) -> None:
    tokenizer = load_tokenizer(run_dir)
    first, second = trace.turns
    assert pieces(turn_text(first, new_from(trace, first), tokenizer)) == [
        ("pq", PROMPT),
        ("A", TRAINED),
        ("B", CONTEXT),
        ("C", TRAINED),
    ]
    # Only what is new since the parent, then a turn that is not trained at all.
    assert pieces(turn_text(second, new_from(trace, second), tokenizer)) == [("r", PROMPT), ("A", CONTEXT)]


def test_logprobs_shade_within_the_colour_of_the_mask(run_dir: Path, trace: TrainingTrace) -> None:
    plain = pieces(turn_text(trace.turns[0], 0, load_tokenizer(run_dir)))
    shaded = pieces(turn_text(trace.turns[0], 0, load_tokenizer(run_dir), logprobs=True))
    assert [piece for piece, _ in shaded] == [piece for piece, _ in plain]
    assert len({style for _, style in shaded}) == 4


def test_a_rollout_is_found_by_its_beginning_and_printed(run_dir: Path) -> None:
    text = shown(run_dir, "g0-0")
    assert "reward 0.50" in text and "4 tokens sampled   2 trained   2 kept as context\nturns not trained: retry 1" in text
    assert "turn 1  agent  branch 0" in text and "turn 2  agent  branch 0  stop  retry" in text
    assert "version k-1 [0, 2), k-2 [2, 3)" in text and "prompt 6 (+1)" in text
    assert "pqABC" in text
    (run_dir / "rollouts" / "zz9-0").mkdir()
    with pytest.raises(UserError, match=r"zz9-0 has no trace.bin \(not ended\)"):
        shown(run_dir, "zz")


def test_without_a_tokenizer_ids_are_printed(run_dir: Path) -> None:
    (run_dir.parent / "model" / "tokenizer.json").unlink()
    text = shown(run_dir, "g0-0")
    assert "ids are shown" in text and "10 11 20 21 22" in text


def test_json_has_every_token(run_dir: Path) -> None:
    document = json.loads(shown(run_dir, "g0-0", json=True))
    tokens = document["turns"][0]["completion"]
    assert [(token["id"], token["text"], token["trained"]) for token in tokens] == [(20, "A", True), (21, "B", False), (22, "C", True)]
    assert tokens[0]["logprob"] == pytest.approx(-0.01)
    assert document["turns"][1]["mask_reason"] == "retry" and document["turns"][1]["prompt_new_from"] == 5
    assert [rollout["cause"] for rollout in json.loads(shown(run_dir, None, json=True))] == [None, "engine"]


def test_the_list_has_every_rollout(run_dir: Path) -> None:
    (run_dir / "rollouts" / "g1-0").mkdir()
    lines = shown(run_dir, None).splitlines()
    assert lines[1].split() == ["g0-0", "write-a-file", "0.50", "2", "2", "scored"]
    assert lines[2].split() == ["g0-1", "write-a-file", "–", "–", "–", "engine"]
    assert lines[3].split() == ["g1-0", "–", "–", "–", "–"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("g0-7", "no rollout 'g0-7' in .*; did you mean g0-1, g0-0"),
        ("nonsense", "leave the id out to list the 2"),
        ("g0", "2 rollouts begin with 'g0': g0-0, g0-1; give more"),
        ("g0-1", r"g0-1 has no trace.bin \(engine\)"),
    ],
)
def test_a_wrong_id_gets_one_clear_line(run_dir: Path, wanted: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        shown(run_dir, wanted)
    assert "\n" not in str(caught.value)


def test_broken_files_get_one_clear_line(run_dir: Path) -> None:
    with pytest.raises(UserError, match="has no rollouts folder"):
        shown(run_dir.parent, None)
    path = run_dir / "rollouts" / "g0-0" / "trace.bin"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"trace.bin cannot be read"):
        shown(run_dir, "g0-0")
    (run_dir.parent / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer file"):
        load_tokenizer(run_dir)


class Bytes:
    """One token per UTF-8 byte; 300 and above are unknown."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def id_to_token(self, id: int) -> str | None:
        return str(id) if id < 256 else None


def test_pieces_join_to_the_text_and_nothing_raw_reaches_the_terminal() -> None:
    ids = list("aé😀\x1b[31m\n".encode())
    assert "".join(token_pieces(Bytes(), ids)) == "aé😀␛[31m\n"
    assert token_pieces(Bytes(), list("é".encode())) == ["", "é"]
    assert token_pieces(Bytes(), [97, 300, 98]) == ["a", "⟨300⟩", "b"]
    assert token_pieces(Bytes(), [97, 0xF0, 0x9F]) == ["a", "", "�"]
    assert token_pieces(Bytes(), []) == []
