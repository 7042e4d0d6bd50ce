"""Layers that carry a state from token to token (Mamba, gated delta nets, short convolutions), in packs of several rows.

Such a layer knows no branches and no borders: it would hand the last state of one row to the first token of the next. Here each of them
sees one row at a time, so that its state begins anew at every border, and everything else of the model still works on the whole pack. Rows
of such models are packed side by side, never as a tree. Whatever the layers are, `prove_isolation` shows that no row reaches another, or
refuses the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from harness_rl.learner.attention import UnsupportedModel
from harness_rl.learner.prefixtree import side_by_side

LAYER_TYPES = frozenset(("full_attention", "sliding_attention", "linear_attention", "conv", "mamba", "hybrid", "mlp", "moe"))
"""What a config's `layer_types` may name; other kinds of attention would be computed as full attention, and wrongly."""


class RowBorders:
    """Splits the input of every layer with a state at the borders of the pack's rows."""

    def __init__(self, body: Any) -> None:
        self.lengths: list[int] = []
        """[R] tokens of each row of the pack that is forwarded; kept until the next one, as backward may run the layers again."""
        self.layers = [module for module in body.modules() if any(isinstance(child, torch.nn.Conv1d) for child in module.children())]
        for layer in self.layers:
            layer.forward = self._split(layer.forward)

    def _split(self, forward: Any) -> Any:
        def by_row(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            pieces = [forward(piece.contiguous(), *args, **kwargs) for piece in hidden_states.split(self.lengths, dim=1)]
            if not all(isinstance(piece, torch.Tensor) for piece in pieces):
                raise UnsupportedModel("a layer with a state gives more than its hidden states, which packed rows cannot join")
            return torch.cat(pieces, dim=1)

        return by_row


def has_state(model: Any) -> bool:
    """True for a model with layers that carry a state over tokens. Raises UnsupportedModel for kinds of layers that are not known."""
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if types - LAYER_TYPES:
        raise UnsupportedModel(f"layers of type {', '.join(sorted(types - LAYER_TYPES))} are not supported")
    convolutions = any(isinstance(module, torch.nn.Conv1d) for module in model.base_model.modules())
    return convolutions or bool(types & {"linear_attention", "conv", "mamba", "hybrid"})


def prove_isolation(policy: Any) -> None:
    """Score three short rows in one pack and each alone. Raises UnsupportedModel when the pack changes any of them."""
    vocabulary = int(policy.model.config.get_text_config().vocab_size)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, vocabulary, length) for length in (7, 12, 5)]

    def scores(sequences: list[Any]) -> torch.Tensor:
        tree = side_by_side(sequences)
        predicts = np.concatenate([path[:-1] for path in tree.paths])
        targets = np.concatenate([row[1:] for row in sequences]).astype(np.int64)
        with torch.no_grad():
            found: torch.Tensor = policy.score_tree(tree, predicts, targets, np.ones(len(targets), dtype=np.float32))[0]
        return found

    together, alone = scores(rows), torch.cat([scores([row]) for row in rows])
    exact = policy.dtype in (torch.float32, torch.float64)
    gap = float((together - alone).abs().max())
    if not gap < (1e-3 if exact else 0.1):
        raise UnsupportedModel(f"a row changes the logprobs of another in its pack by {gap:.2g}: the model has a state that is not known")
