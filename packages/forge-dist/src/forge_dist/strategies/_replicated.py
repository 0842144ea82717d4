"""Parameters that every rank holds whole beside sharded weights, such as adapters.

FSDP does not handle them: neither their first values nor their gradients agree between ranks by themselves.
"""

from collections.abc import Iterable
from itertools import groupby

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from forge_dist.strategies._grad_norm import local

_COPIES = "modules_to_save"
"""PEFT's name of the module that holds the trained copies of whole modules."""


def replicated(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters that are no shards."""
    return [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]


def unshard_copied_modules(model: nn.Module) -> None:
    """Make plain parameters of the modules that PEFT copied to train them whole; collective.

    `modules_to_save`, such as a reward model's head, are copied with their shards, and FSDP, which knows only the originals,
    would never gather them.
    """
    for name, module in list(model.named_modules()):
        if f".{_COPIES}." not in f".{name}.":
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            shards: torch.Tensor = parameter.detach()
            if isinstance(shards, DTensor):
                setattr(module, key, nn.Parameter(shards.full_tensor(), requires_grad=parameter.requires_grad))


def broadcast(parameters: Iterable[nn.Parameter], group: ProcessGroup | None) -> None:
    """Copy rank 0's values to every rank."""
    for parameter in parameters:
        distributed.broadcast(parameter.detach(), src=0, group=group)


def sum_grads(parameters: Iterable[nn.Parameter], group: ProcessGroup | None) -> None:
    """Sum gradients over ranks in place, in one collective for each dtype.

    A rank without a gradient counts as zero; a parameter that has none on any rank keeps none, so that the optimizer leaves it
    alone as it would in one process.
    """

    def kind(parameter: nn.Parameter) -> tuple[str, str]:
        return str(parameter.dtype), str(parameter.device)

    for _, same in groupby(sorted(parameters, key=kind), key=kind):
        _sum_flat(list(same), group)


def _sum_flat(parameters: list[nn.Parameter], group: ProcessGroup | None) -> None:
    present = [float(p.grad is not None) for p in parameters]
    # Flags of which parameters have a gradient at all travel behind the gradients.
    flags = torch.tensor(present, dtype=parameters[0].dtype, device=parameters[0].device)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([*(grad.reshape(-1) for grad in grads), flags])
    distributed.all_reduce(flat, group=group)
    held = flat[-len(parameters) :].tolist()
    start = 0
    for parameter, grad, ranks in zip(parameters, grads, held, strict=True):
        summed = flat[start : start + grad.numel()].view_as(grad)
        start += grad.numel()
        if ranks:
            parameter.grad = grad.copy_(summed)


def sum_local_grads(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Sum what this rank has of each gradient over ranks that have the same part of it."""
    for parameter in parameters:
        if parameter.grad is not None:
            distributed.all_reduce(local(parameter.grad), group=group)
