"""Parameters that every rank holds whole in a model whose other weights are sharded, as adapters are: kept the same on all ranks.

FSDP knows nothing of them: neither their first values nor their gradients agree between ranks by themselves.
"""

from collections.abc import Iterable
from itertools import groupby

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

_COPIES = "modules_to_save"


def replicated(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters that are no shards."""
    return [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]


def made_whole(model: nn.Module) -> None:
    """Make the copies that PEFT trains of whole modules (`modules_to_save`: a reward model's head) plain parameters; collective.

    They were copied with their shards, and FSDP, which knows only the originals, would never put them together.
    """
    for name, module in list(model.named_modules()):
        if f".{_COPIES}." not in f".{name}.":
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            shards: torch.Tensor = parameter.detach()
            if isinstance(shards, DTensor):
                setattr(module, key, nn.Parameter(shards.full_tensor(), requires_grad=parameter.requires_grad))


def broadcast(parameters: Iterable[nn.Parameter], group: ProcessGroup | None) -> None:
    """Every rank's values become rank 0's."""
    for parameter in parameters:
        distributed.broadcast(parameter.detach(), src=0, group=group)


def sum_grads(parameters: Iterable[nn.Parameter], group: ProcessGroup | None) -> None:
    """Every rank's gradients become their sum over ranks: one collective for each dtype.

    A rank without a gradient counts as zero; a parameter that has none on any rank keeps none, so that the optimizer leaves it alone as
    it would in one process.
    """

    def kind(parameter: nn.Parameter) -> tuple[str, str]:
        return str(parameter.dtype), str(parameter.device)

    for _, same in groupby(sorted(parameters, key=kind), key=kind):
        _sum_flat(list(same), group)


def _sum_flat(parameters: list[nn.Parameter], group: ProcessGroup | None) -> None:
    present = [float(p.grad is not None) for p in parameters]
    # Who has a gradient at all travels behind the gradients themselves.
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
