"""The model in training: parameters in float32, forward pass in the spec's dtype, logprobs of a pack's loss terms.

Nothing here knows of objectives, optimizers or engines. Dropout is off for good: a logprob must not depend on chance.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness_rl.errors import UserError
from harness_rl.learner import attention, context, lora
from harness_rl.learner.logprobs import token_logprobs
from harness_rl.learner.packing import Pack
from harness_rl.learner.prefixtree import PrefixTree, fold, side_by_side
from harness_rl.learner.ranks import ALONE, Ranks
from harness_rl.learner.recurrent import RowBorders, has_state, prove_isolation
from harness_rl.learner.sharding import give_back, shard, spread, whole
from harness_rl.learner.spec import LearnerSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


class Policy:
    def __init__(self, model: Any, dtype: torch.dtype, chunk: int, offload_activations: bool = False) -> None:
        self.model, self.dtype = model, dtype
        self._whole = _Whole(model, dtype, chunk, offload_activations)
        head = model.get_output_embeddings()
        self.device = head.weight.device
        self.ranks, self.sharded = ALONE, False
        if getattr(head, "bias", None) is not None:
            raise attention.UnsupportedModel("the output head has a bias, which is not supported")
        for name in _SCALED_LOGITS:
            if getattr(model.config, name, None) not in (None, 1, 1.0):
                raise attention.UnsupportedModel(f"the model's config sets {name}, which is not supported")
        self._borders = RowBorders(model.base_model) if has_state(model) else None
        if self._borders is not None and self.device.type != "meta":
            prove_isolation(self)

    @property
    def shares_prefixes(self) -> bool:
        """False for a model with layers that carry a state: its rows are packed side by side."""
        return self._borders is None

    @classmethod
    def load(cls, spec: LearnerSpec, source: Path, ranks: Ranks = ALONE) -> Policy:
        """From a folder in Hugging Face format (or a hub id), sharded where there are several ranks. With LoRA it is `spec.model`, and only
        the adapter is the folder's, where that is another. Raises UserError when it cannot be loaded or trained."""
        dtype = DTYPES[("bfloat16" if ranks.device.type == "cuda" else "float32") if spec.dtype == "auto" else spec.dtype]
        attention.register()
        try:
            base = Path(spec.model) if spec.lora_rank else source
            model = _model(base, ranks)
            if spec.lora_rank:
                lora.add(model, spec)
                if source != base and ranks.rank == 0:  # a base that was trained with an adapter has it merged
                    lora.load(model, source / lora.FOLDER)
            if ranks.size == 1 and not spec.offload_optimizer:  # a sharded model comes to its GPU layer by layer
                model = model.to(ranks.device)
            policy = cls.wrap(model, dtype, spec.logprob_chunk, spec.gradient_checkpointing, spec.offload_activations)
            if ranks.context_size > 1:
                context.check(model, dtype, ranks.device, ranks.context_size)
        except (OSError, ValueError) as error:
            raise UserError(f"learner: model {source} cannot be used: {error}") from error
        values = model.state_dict() if ranks.size > 1 else {}
        policy.over(ranks, spec.offload_optimizer)
        if ranks.size > 1:
            spread(policy._whole, model, values, ranks, spec.offload_optimizer)
        return policy

    def over(self, ranks: Ranks, offload: bool = False) -> Policy:
        """This policy, sharded over the ranks (over one for `offload`); a collective."""
        if ranks.size > 1 or offload:
            shard(self._whole, self.model.base_model, ranks, self.dtype, offload)
            self.ranks, self.device, self.sharded = ranks, ranks.device, True
        return self

    @classmethod
    def wrap(
        cls, model: Any, dtype: torch.dtype, chunk: int = 256, gradient_checkpointing: bool = False, offload_activations: bool = False
    ) -> Policy:
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
        return cls(model, dtype, chunk, offload_activations)

    def score(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, entropies) [N] of the pack's loss terms, in its order; differentiable where grad is enabled. One that is split is a
        collective of its context group, and every rank gets all terms."""
        if not pack.split:
            return self.score_tree(pack.tree, pack.predicts, pack.targets, pack.temperatures)
        group, piece = self.ranks.context, context.Piece.of(pack, self.ranks.context_rank, self.ranks.context_size)
        terms = piece.terms
        found = self._call(piece.ids, piece.positions, context.Ring(group), piece.predicts, pack.targets[terms], pack.temperatures[terms])
        places = torch.from_numpy(terms).to(self.device)
        logprobs, entropies = (context.join(values, places, pack.terms, group) for values in found)
        return logprobs, entropies

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
        branches = attention.Branches.of(tree, self.device)
        if self._borders is not None:
            self._borders.lengths = branches.lengths
        return self._call(tree.ids, tree.positions, branches, predicts, targets, temperatures)

    def _call(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], branches: attention.Attends, *of_terms: NDArray[Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def put(array: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        found: tuple[torch.Tensor, torch.Tensor] = self._whole(put(ids), put(positions), branches, *map(put, of_terms))
        if not torch.is_grad_enabled():
            give_back(self._whole)
        return found

    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The model's own named parameters, each once (a tied head is no second one), as they are, an adapter merged into them. Of a
        sharded model copies in `dtype` in host memory of rank 0, and nothing on the others; a collective."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter, change in lora.with_changes(self.model):
            tensor = whole(parameter.to(dtype) if self.sharded and change is None else parameter, self.device)
            if change is not None:
                a, b = whole(change.a, self.device), whole(change.b, self.device)
                tensor = torch.addmm(tensor, b, a, alpha=change.scale)
            if self.ranks.rank == 0:
                found[name] = tensor.to("cpu", dtype) if self.sharded else tensor
        return found

    def adapter(self) -> dict[str, torch.Tensor]:
        """Copies of the adapter's parameters, by their names in the model, in host memory of rank 0; a collective."""
        found = {name: whole(parameter, self.device) for name, parameter in lora.adapter(self.model).items()}
        return {name: tensor.to("cpu", copy=not self.sharded) for name, tensor in found.items()} if self.ranks.rank == 0 else {}


def _model(source: Path, ranks: Ranks) -> Any:
    """The model of a folder; on other ranks than 0 without its values, and without memory for them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"dtype": torch.float32, "attn_implementation": attention.IMPLEMENTATION}
    if ranks.rank == 0:
        return AutoModelForCausalLM.from_pretrained(source, **settings)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), **settings)


class _Whole(torch.nn.Module):
    """Body and head in one call, so that one gathering of a sharded model's outer parameters serves both uses of a tied one."""

    def __init__(self, model: Any, dtype: torch.dtype, chunk: int, offload_activations: bool) -> None:
        super().__init__()
        self.model, self._dtype, self._chunk, self._offload = model, dtype, chunk, offload_activations

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        branches: attention.Attends,
        predicts: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lower = self._dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(ids.device.type, dtype=self._dtype, enabled=lower), self._kept():
            out = self.model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False, branches=branches)
        hidden, weight = out.last_hidden_state[0], self.model.get_output_embeddings().weight
        return token_logprobs(hidden, weight, predicts, targets, temperatures, chunk=self._chunk, dtype=self._dtype)

    def _kept(self) -> AbstractContextManager[Any]:
        """What backward needs of each layer, in host memory where that is asked for."""
        if self._offload and torch.is_grad_enabled():
            return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
        return nullcontext()
