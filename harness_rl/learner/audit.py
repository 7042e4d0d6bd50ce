"""What the loss really consumed, written down: per step one file with every trained row as it was read back from the packed tensors.

Off by default. Anyone who doubts a run turns it on and compares the rows, to the bit, with the proxy's store.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness_rl.learner.rows import PackedRow, Row, Version

_ARRAYS = ("ids", "predicts", "targets", "behaviour", "advantages", "stale_positions")


@dataclass
class AuditedRow:
    row_id: str
    ids: NDArray[np.int64]
    """[L]"""
    predicts: NDArray[np.int64]
    """[n] the position whose hidden state predicts each trained token."""
    targets: NDArray[np.int64]
    """[n]"""
    behaviour: NDArray[np.float32]
    """[n] the engine's logprobs."""
    stale_positions: NDArray[np.int64]
    """Captured tokens that were masked as stale."""
    advantages: NDArray[np.float32]
    """[n]"""
    versions: list[Version]


def write_audit(path: Path, rows: Sequence[tuple[Row, PackedRow]]) -> None:
    """Write the rows of one step. Raises OSError."""
    arrays: dict[str, NDArray[Any]] = {}
    facts = []
    for index, (row, packed) in enumerate(rows):
        found: dict[str, NDArray[Any]] = {name: getattr(packed, name) for name in _ARRAYS if name != "stale_positions"}
        found["stale_positions"] = np.flatnonzero((row.mask == 1) & (row.stale == 1))
        arrays |= {f"{index}/{name}": array for name, array in found.items()}
        versions = [list(version) for span in row.spans for version in span.versions]
        facts.append({"row_id": row.row_id, "versions": versions})
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, facts=np.array(json.dumps(facts)), **arrays)  # type: ignore[arg-type]


def read_audit(path: Path) -> list[AuditedRow]:
    with np.load(path) as file:
        facts = json.loads(str(file["facts"]))
        return [
            AuditedRow(
                row_id=fact["row_id"],
                versions=[(str(version), int(start), int(end)) for version, start, end in fact["versions"]],
                **{name: file[f"{index}/{name}"] for name in _ARRAYS},
            )
            for index, fact in enumerate(facts)
        ]
