"""A model over the ranks (FSDP2): each holds a slice of every parameter, its gradient and its optimizer state, and computes with the whole.

Parameters are float32 slices; a layer is gathered just before it is used, in the forward pass's dtype, and given back after. Gradients are
summed in float32, not averaged: what each rank back-propagates is already weighed over the whole step, so that the sum over the ranks is
the step's gradient, however its rows lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from harness_rl.learner.ranks import Ranks


def shard(whole: torch.nn.Module, body: torch.nn.Module, ranks: Ranks, dtype: torch.dtype, offload: bool) -> None:
    """Shard `whole`, in place: the layers of `body` one by one, the rest together. A collective.

    `dtype` is the forward pass's. With `offload` slices, gradients and optimizer state stay in host memory, and the optimizer runs there.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    lower = dtype.itemsize < torch.float32.itemsize
    precision = MixedPrecisionPolicy(dtype if lower else None, torch.float32 if lower else None, cast_forward_inputs=False)
    place = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if offload else OffloadPolicy()
    for module in (*_layers(body), whole):
        sharded = fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=place)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other way to a factor of its own


def spread(whole: torch.nn.Module, model: torch.nn.Module, values: dict[str, torch.Tensor], ranks: Ranks, offload: bool) -> None:
    """Give the slices of a `model`, sharded as a part of `whole`, rank 0's `values`: its state dict before it was sharded. The other ranks'
    have no memory yet. A collective."""
    if ranks.rank:
        whole.to_empty(device="cpu" if offload else ranks.device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values if ranks.rank == 0 else {}, options=options)
    buffers = dict(model.named_buffers())
    found = ranks.agree({name: buffer.cpu() for name, buffer in buffers.items()} if ranks.rank == 0 else None)
    for name, buffer in buffers.items():
        if ranks.rank:
            buffer.data = found[name].to(ranks.device)


def _layers(body: torch.nn.Module) -> list[torch.nn.Module]:
    """Those of the longest list of modules: a transformer's layers."""
    lists = [list(module) for module in body.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def give_back(whole: torch.nn.Module) -> None:
    """After a forward pass that no backward pass follows: the parameters are slices again, and never an older step's copy."""
    if isinstance(whole, FSDPModule):
        whole.reshard()


def local(tensor: Any) -> torch.Tensor:
    """This rank's slice of a sharded tensor; a tensor that is not sharded, as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """All of a sharded tensor, on `device`; a collective. One that is not sharded as it is."""
    tensor = tensor.detach()
    return tensor.to(device).full_tensor() if isinstance(tensor, DTensor) else tensor
