"""The model in training: parameters in float32, forward pass in the spec's dtype, logprobs of a pack's loss terms.

Nothing here knows of objectives, optimizers or engines. Dropout is off for good: a logprob must not depend on chance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness_rl.errors import UserError
from harness_rl.learner import attention
from harness_rl.learner.logprobs import token_logprobs
from harness_rl.learner.packing import Pack
from harness_rl.learner.prefixtree import PrefixTree, fold, side_by_side
from harness_rl.learner.recurrent import RowBorders, has_state, prove_isolation
from harness_rl.learner.spec import LearnerSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


class Policy:
    def __init__(self, model: Any, dtype: torch.dtype, chunk: int) -> None:
        self.model, self.dtype, self._chunk = model, dtype, chunk
        self._body = model.base_model
        self._head = model.get_output_embeddings()
        self.device = self._head.weight.device
        if getattr(self._head, "bias", None) is not None:
            raise attention.UnsupportedModel("the output head has a bias, which is not supported")
        for name in _SCALED_LOGITS:
            if getattr(model.config, name, None) not in (None, 1, 1.0):
                raise attention.UnsupportedModel(f"the model's config sets {name}, which is not supported")
        self._borders = RowBorders(self._body) if has_state(model) else None
        if self._borders is not None:
            prove_isolation(self)

    @property
    def shares_prefixes(self) -> bool:
        """False for a model with layers that carry a state: its rows are packed side by side."""
        return self._borders is None

    @classmethod
    def load(cls, spec: LearnerSpec, source: Path) -> Policy:
        """From a folder in Hugging Face format (or a hub id). Raises UserError when it cannot be loaded or trained."""
        from transformers import AutoModelForCausalLM

        device = torch.device("cuda" if spec.device == "cuda" or (spec.device == "auto" and torch.cuda.is_available()) else "cpu")
        dtype = DTYPES[("bfloat16" if device.type == "cuda" else "float32") if spec.dtype == "auto" else spec.dtype]
        attention.register()
        try:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation=attention.IMPLEMENTATION)
            return cls.wrap(model.to(device), dtype, spec.logprob_chunk, spec.gradient_checkpointing)
        except (OSError, ValueError) as error:
            raise UserError(f"learner: model {source} cannot be used: {error}") from error

    @classmethod
    def wrap(cls, model: Any, dtype: torch.dtype, chunk: int = 256, gradient_checkpointing: bool = False) -> Policy:
        attention.register()
        model.set_attn_implementation(attention.IMPLEMENTATION)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train(gradient_checkpointing)
        return cls(model, dtype, chunk)

    def score(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, entropies) [N] of the pack's loss terms, in its order; differentiable where grad is enabled."""
        return self.score_tree(pack.tree, pack.predicts, pack.targets, pack.temperatures)

    @torch.no_grad()
    def score_prompts(self, prompts: list[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Logprobs at temperature 1 of tokens 1 .. L - 1 of each prompt, as an engine's prompt logprobs give them."""
        tree = fold(prompts) if self.shares_prefixes else side_by_side(prompts)
        predicts = np.concatenate([path[:-1] for path in tree.paths])
        targets = np.concatenate([prompt[1:] for prompt in prompts]).astype(np.int64)
        logprobs, _ = self.score_tree(tree, predicts, targets, np.ones(len(targets), dtype=np.float32))
        return np.split(logprobs.cpu().numpy(), np.cumsum([len(p) - 1 for p in prompts])[:-1])

    def score_tree(
        self, tree: PrefixTree, predicts: NDArray[np.int64], targets: NDArray[np.int64], temperatures: NDArray[np.float32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, entropies) [N]: `predicts` are indices of hidden states, `targets` the tokens that follow them."""

        def put(array: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        branches = attention.Branches.of(tree, self.device)
        if self._borders is not None:
            self._borders.lengths = branches.lengths
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype in (torch.bfloat16, torch.float16)):
            out = self._body(input_ids=put(tree.ids)[None], position_ids=put(tree.positions)[None], use_cache=False, branches=branches)
        return token_logprobs(
            out.last_hidden_state[0],
            self._head.weight,
            put(predicts),
            put(targets),
            put(temperatures),
            chunk=self._chunk,
            dtype=self.dtype,
        )
