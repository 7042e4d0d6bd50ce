"""From packs to new weights: forward, loss and backward for each pack, then one update a minibatch, on all ranks together.

Every rank back-propagates its share of a minibatch's packs, each term weighed over the whole optimizer step, so that the sum over packs and
ranks is the step's gradient. All ranks run the same number of packs: one that has fewer runs empty ones, whose gradient is zero, because
the others wait for it in every layer. A pack that is split runs on all ranks of a context group at one time, and the first of them tells
of it. Norm, clipping and signal are of the whole gradient. A gradient that is not finite changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness_rl.learner import lora, objectives, rng
from harness_rl.learner.objectives.base import Terms
from harness_rl.learner.optimizers import build_optimizer, set_rate
from harness_rl.learner.packing import Pack
from harness_rl.learner.policy import Policy
from harness_rl.learner.prefixtree import fold
from harness_rl.learner.ranks import ALONE, Ranks
from harness_rl.learner.sharding import local
from harness_rl.learner.signal import SignalShare
from harness_rl.learner.spec import LearnerSpec

Floats = NDArray[np.float32]


class Clock:
    """Seconds by name; on a GPU each span waits for the work it started."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self._cuda:
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


@dataclass
class PackValues:
    """What one pack's terms came to, [N] each."""

    losses: Floats
    """Already weighted: their sum over the step is its loss."""
    logprobs: Floats
    old: Floats
    entropies: Floats
    flags: dict[str, NDArray[np.bool_]]
    values: dict[str, Floats]


class Updater:
    """Model and optimizer of one rank. `train`, `state` and `restore` are collectives: all ranks call them, with the same arguments."""

    def __init__(self, policy: Policy, spec: LearnerSpec, reference: Policy | None = None, ranks: Ranks = ALONE) -> None:
        self.policy, self.spec, self.reference, self.ranks = policy, spec, reference, ranks
        self.objective = objectives.build(spec)
        if self.objective.needs_reference and reference is None and not spec.lora_rank:
            raise ValueError("kl_beta is not 0 and there is no reference policy")
        self.parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(self.parameters, spec)
        self.signal = SignalShare(spec.adam_beta1)
        self.updates = 0
        """Optimizer steps done, over all lineages."""

    def train(self, minibatches: Sequence[Sequence[Pack]], clock: Clock) -> tuple[list[list[PackValues]], list[float]]:
        """(on rank 0 the values of each pack, on others nothing; norm of each minibatch's gradient before clipping, inf or nan where it was
        not applied)."""
        shares = [share(packs, self.ranks) for packs in minibatches]
        with clock("forward"):
            old = self._old_logprobs(shares)
        values, norms = [], []
        for packs in shares:
            done = [self._accumulate(pack, old.get(id(pack)), clock) for pack in packs]
            with clock("optimizer"):
                norms.append(self.update())
            values.append(in_order(self.ranks.gather(done)))
        return values, norms

    def _old_logprobs(self, shares: Sequence[Sequence[Pack]]) -> dict[int, torch.Tensor]:
        """Logprobs at the start of the batch, by pack. Empty for one minibatch: there the training forward itself gives them, exactly."""
        if len(shares) <= 1:
            return {}
        with torch.no_grad():
            return {id(pack): self.policy.score(pack)[0] for packs in shares for pack in packs}

    @torch.no_grad()
    def _reference_logprobs(self, pack: Pack) -> torch.Tensor | None:
        if not self.objective.needs_reference:
            return None
        if self.reference is not None:
            return self.reference.score(pack)[0]
        with lora.switched_off(self.policy.model):
            return self.policy.score(pack)[0]

    def _accumulate(self, pack: Pack, old: torch.Tensor | None, clock: Clock) -> PackValues | None:
        """Add the pack's share of the step's gradient; None for an empty one, and where another rank of the group tells of it."""

        def put(array: Any) -> torch.Tensor:
            return torch.from_numpy(array).to(self.policy.device)

        with clock("forward"):
            logprobs, entropies = self.policy.score(pack)
            old = logprobs.detach() if old is None else old
            reference = self._reference_logprobs(pack)
            if pack.rows:
                result = self.objective(Terms(logprobs, old, put(pack.behaviour), put(pack.advantages), put(pack.sequence), reference))
                weighted = result.loss * put(pack.weights)
            else:
                weighted = logprobs * 0.0
        with clock("backward"):
            weighted.sum().backward()
        if not pack.rows or (pack.split and self.ranks.context_rank):
            return None

        def take(tensor: torch.Tensor) -> Any:
            return tensor.detach().cpu().numpy()

        return PackValues(
            losses=take(weighted),
            logprobs=take(logprobs),
            old=take(old),
            entropies=take(entropies),
            flags={name: take(flag) for name, flag in result.flags.items()},
            values={name: take(value) for name, value in result.values.items()},
        )

    def update(self) -> float:
        """Clip and apply the accumulated gradient; returns its norm before clipping. A norm that is not finite applies nothing."""
        gradients = [local(p.grad) for p in self.parameters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if self.ranks.size > 1:
            norm = math.sqrt(self.ranks.sum(norm**2))
        if math.isfinite(norm):
            if norm > self.spec.max_grad_norm:
                torch._foreach_mul_(gradients, self.spec.max_grad_norm / norm)
            self.signal.observe(self.ranks.sum(self._along_momentum()), min(norm, self.spec.max_grad_norm) ** 2)
            set_rate(self.optimizer, self.learning_rate())
            self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _along_momentum(self) -> float:
        """Inner product of this rank's slices of the gradient and of Adam's first moment as the last update left it."""
        moments = ((p.grad, self.optimizer.state[p].get("exp_avg")) for p in self.parameters if p.grad is not None)
        known = ((local(grad), local(moment)) for grad, moment in moments if moment is not None)
        plain = ((grad, moment if type(moment) is torch.Tensor else moment.dequantize()) for grad, moment in known)
        return sum(float(torch.dot(grad.flatten(), moment.flatten())) for grad, moment in plain)

    def learning_rate(self) -> float:
        """Of the next update: by the schedule; times the gradient's share of signal where that is asked for."""
        share = scheduled(self.updates, self.spec.warmup_steps, self.spec.total_updates, self.spec.schedule)
        return self.spec.learning_rate * share * (self.signal.value if self.spec.scale_by_signal else 1.0)

    def state(self) -> dict[str, Any]:
        """What a resumed rank 0 needs besides weights and optimizer; on the others nothing."""
        generators = self.ranks.gather(rng.states())
        return {"signal": self.signal.state(), "updates": self.updates, "rng": generators} if generators else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Generators go on where those of the same rank were; a rank that was not there takes another's."""
        self.signal.restore(state["signal"])
        self.updates = state["updates"]
        rng.restore(state["rng"][self.ranks.rank % len(state["rng"])])


def scheduled(done: int, warmup: int, total: int, schedule: str) -> float:
    """Share of the learning rate for the update after `done` ones: linear up to 1 over `warmup` updates, then 1, or down to 0 at `total`
    along a line or half a cosine."""
    if done < warmup:
        return (done + 1) / warmup
    if schedule == "constant":
        return 1.0
    gone = min(1.0, (done - warmup) / (total - warmup))
    return 1.0 - gone if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))


def hands(packs: Sequence[Pack], context: int) -> list[list[Pack]]:
    """What a context group takes at one time, in the order of the packs: one that is split, or one for each of its ranks."""
    found: list[list[Pack]] = []
    for pack in packs:
        if pack.split or not found or found[-1][0].split or len(found[-1]) == context:
            found.append([])
        found[-1].append(pack)
    return found


def share(packs: Sequence[Pack], ranks: Ranks) -> list[Pack]:
    """This rank's packs, dealt out to the context groups hand by hand: as many as every other rank has, the missing ones empty."""
    dealt = hands(packs, ranks.context_size)
    groups, place = ranks.size // ranks.context_size, ranks.context_rank
    own = dealt[ranks.rank // ranks.context_size :: groups]
    mine = [hand[0] if hand[0].split else hand[place] if place < len(hand) else empty_pack() for hand in own]
    return mine + [empty_pack()] * (math.ceil(len(dealt) / groups) - len(mine))


def empty_packs(packs: Sequence[Pack], ranks: Ranks) -> int:
    """How many `share` adds, on all ranks together."""
    rounds = math.ceil(len(hands(packs, ranks.context_size)) * ranks.context_size / ranks.size)
    return rounds * ranks.size - sum(ranks.context_size if pack.split else 1 for pack in packs)


def in_order(by_rank: Sequence[Sequence[PackValues | None]]) -> list[PackValues]:
    """What `share` gave away, round by round."""
    return [values for of_round in zip(*by_rank, strict=True) for values in of_round if values is not None]


def empty_pack() -> Pack:
    """Two tokens of no row, one term of weight 0."""
    one, zero = np.ones(1, dtype=np.float32), np.zeros(1, dtype=np.int64)
    return Pack([], fold([np.zeros(2, dtype=np.int64)]), zero, zero, zero, -one, 0 * one, one, 0 * one, zero)
