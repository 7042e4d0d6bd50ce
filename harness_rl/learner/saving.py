"""Saving in the background: what is saved is what was when `begin` returned, and training goes on while it is written.

Each rank copies its part to host memory and writes its own slices of the optimizer's state; rank 0 writes the rest and makes the checkpoint
count, when all of it is there. One save runs at a time; a failed one is an error of the next thing that is asked of the saver.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from harness_rl.errors import LearnerError, UserError
from harness_rl.learner import checkpoint, lora
from harness_rl.learner.checkpoint import Checkpoint
from harness_rl.learner.policy import Policy
from harness_rl.learner.ranks import ALONE, Ranks
from harness_rl.learner.sharding import local
from harness_rl.learner.spec import LearnerSpec

Saved = Callable[[Checkpoint, float], None]
"""Gets each checkpoint once it counts, and the seconds that it took; called on a thread of the saver."""

_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, dcp.api.CheckpointException)
"""Of a full disk, in the words of Python, torch, safetensors and torch's distributed checkpoint."""
_NOT_COPIED = re.compile(r".*\.(safetensors|bin|pt|gguf|h5|msgpack)|.*\.index\.json|config\.json|" + checkpoint.MARKER)


class Saver:
    def __init__(self, root: Path, spec: LearnerSpec, source: Path | None = None, ranks: Ranks = ALONE, saved: Saved | None = None) -> None:
        """`source`: the folder of the model, whose files beside the weights (tokenizer, chat template) each checkpoint gets too."""
        self._root, self._spec, self._source, self._ranks, self._saved = root, spec, source, ranks, saved
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._running: Future[Any] | None = None

    def begin(self, step: int, version: str, policy: Policy, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """A collective; `state` is rank 0's. Waits for the save before, then copies. Raises LearnerError, of either."""
        began = time.perf_counter()
        self.wait()
        temporary = self._root / f".step-{step}.tmp"
        if self._ranks.rank == 0:
            self._root.mkdir(parents=True, exist_ok=True)
            _check_space(self._root, policy.model)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        self._ranks.agree(True)  # the folder is there
        whole, adapter = whole_weights(policy), policy.adapter()
        slices = self._write_optimizer(temporary / checkpoint.OPTIMIZER, policy, optimizer)

        def finish() -> None:
            try:
                policy.model.save_pretrained(temporary, state_dict=whole, safe_serialization=True)
                if adapter:
                    lora.export(temporary / lora.FOLDER, adapter, self._spec)
                self._copy_extras(temporary)
                torch.save(state, temporary / checkpoint.STATE)
                slices.result()
                done = checkpoint.seal(temporary, step, version, self._spec.keep_checkpoints)
            except _WRITE_ERRORS as error:
                shutil.rmtree(temporary, ignore_errors=True)
                raise LearnerError(f"checkpoint {self._root / f'step-{step}'} could not be written: {error}") from error
            if self._saved is not None:
                self._saved(done, time.perf_counter() - began)

        self._running = self._worker.submit(finish) if self._ranks.rank == 0 else slices

    def _write_optimizer(self, folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> Future[Any]:
        if not optimizer.state:  # before the first update; torch would take one to find out what there is
            nothing: Future[Any] = Future()
            nothing.set_result(None)
            return nothing
        state = _in_full(get_optimizer_state_dict(policy.model, optimizer))
        alone = not dist.is_initialized()
        future: Any = dcp.async_save(state, checkpoint_id=folder, process_group=self._ranks.files, no_dist=alone)
        return future

    def _copy_extras(self, folder: Path) -> None:
        if self._source is None or not self._source.is_dir():
            return
        for extra in self._source.iterdir():
            if extra.is_file() and not _NOT_COPIED.fullmatch(extra.name):
                shutil.copyfile(extra, folder / extra.name)

    def check(self) -> None:
        """Raises the error of a save that has failed."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written. Raises LearnerError when it failed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        self._worker.shutdown(wait=True)


def whole_weights(policy: Policy) -> dict[str, torch.Tensor]:
    """A copy in host memory of what a model's files hold, each tensor once, in float32; nothing on other ranks than 0. A collective."""
    names = policy.model.state_dict().keys()
    kept = {name: value for name, value in policy.model.named_buffers() if name in names}
    found = {name: tensor.to("cpu", torch.float32, copy=not policy.sharded) for name, tensor in policy.weights(torch.float32).items()}
    return found | {name: buffer.detach().to("cpu", copy=True) for name, buffer in kept.items()} if found else {}


def load_state(found: Checkpoint) -> dict[str, Any]:
    """What `trainer.pt` holds."""
    loaded: dict[str, Any] = torch.load(found.path / checkpoint.STATE, map_location="cpu", weights_only=True)
    return loaded


def load_optimizer(found: Checkpoint, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's state as it was saved, by however many ranks: to the bit, or in 8 bits to their rounding. A collective. Raises
    UserError when it is another optimizer's."""
    folder = found.path / checkpoint.OPTIMIZER
    if not folder.is_dir():
        return
    state = get_optimizer_state_dict(policy.model, optimizer)
    saved = _in_full(state)
    try:
        dcp.load(saved, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except dcp.api.CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise UserError(
            f"learner: the optimizer's state in {folder} is not this one's (learner.optimizer and lora_rank must be the run's own): {first}"
        ) from error
    for name, values in state["state"].items():
        for key, value in values.items():
            if _quantised(value):
                local(value).copy_(local(saved["state"][name][key]))
                saved["state"][name][key] = value
    set_optimizer_state_dict(policy.model, optimizer, saved)


def _quantised(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(local(value)) is not torch.Tensor


def _in_full(state: Any) -> dict[str, Any]:
    """The same, with what an optimizer keeps in few bits as float32: torch's checkpoints know no such tensors."""

    def full(value: Any) -> Any:
        if not _quantised(value):
            return value
        slices = local(value).dequantize()
        if not isinstance(value, DTensor):
            return slices
        return DTensor.from_local(slices, value.device_mesh, value.placements, shape=value.shape, stride=value.stride())

    return {**state, "state": {name: {key: full(value) for key, value in values.items()} for name, values in state["state"].items()}}


def _check_space(root: Path, model: Any) -> None:
    """Weights and two moments, in float32, whatever the ranks."""
    needed = sum(p.numel() * 4 * (3 if p.requires_grad else 1) for p in model.parameters()) + (16 << 20)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise LearnerError(f"checkpoint: {root} has {free >> 20} MiB free and needs {needed >> 20}; free some or lower checkpoint.keep")
