"""One model over several GPUs: experts are sharded (FSDP2); everything else, routers included, is whole on each GPU.

Experts are 95 % of the weights of a large MoE model, so the rest fits on each GPU. Every router stays a plain fp32
parameter.
"""

from __future__ import annotations

import torch

from gripmoe.io import distributed
from gripmoe.moe.adapters import unwrapped
from gripmoe.moe.model import MoEModel


def shard_experts(model: MoEModel | torch.nn.Module) -> None:
    """Shards the experts of every layer over all processes, and moves the rest to this process's device (ours). In
    every backward pass, gradients are averaged over processes: those of experts by FSDP, the others by a hook. It has
    no effect in one process.

    Call this before you make the optimizer and before the first forward pass. If one GPU cannot hold the model, load it
    on the CPU. Each process then gives its own rows to the model, in as many forward passes as the others. Raises
    ValueError for an unknown family.
    """
    if distributed.processes() == 1:
        return
    # These imports take a second, and only several processes need them.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    model = model if isinstance(model, MoEModel) else MoEModel(unwrapped(model))
    mesh = init_device_mesh(kind, (distributed.processes(),))
    for layer in model.layers:
        fully_shard(model.block(layer).experts, mesh=mesh, reshard_after_forward=True)
    model.model.to(kind)
    # Without a common root, each would keep its whole gradients until the backward pass has ended.
    decoder = model.model.model
    fully_shard(decoder, mesh=mesh, ignored_params={p for p in decoder.parameters() if not isinstance(p, DTensor)})
    decoder._get_fsdp_state()._lazy_init()  # now, because the first pass may skip layers (`only_layers`)
    for parameter in model.model.parameters():
        if not isinstance(parameter, DTensor):
            distributed.from_first_(parameter.data)
            averaged = parameter.requires_grad
            parameter.requires_grad_(True)  # needed to register the hook
            parameter.register_post_accumulate_grad_hook(_average_gradient)
            parameter.requires_grad_(averaged)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether several processes share the parameters of `model`."""
    return distributed.processes() > 1 and len(distributed.by_sharding(model.parameters())) > 1


def _average_gradient(parameter: torch.nn.Parameter) -> None:
    distributed.averaged_(parameter.grad)


def whole_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's state. For a sharded model it is gathered on the CPU of the first process, and empty in the
    others."""
    if distributed.processes() == 1:
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
