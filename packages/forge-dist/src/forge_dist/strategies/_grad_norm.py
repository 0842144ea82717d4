"""Global norm and scaling of gradients, whole or sharded, without gathering them."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed import ProcessGroup, all_reduce
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def grad_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> torch.Tensor:
    """Compute the 2-norm over all gradients, float32[] on `device`.

    Also where they are bfloat16, whose own norm would keep 3 digits. A replicated gradient counts once. The squares of shards
    are added up over the ranks that hold the other shards, in one sum of one number for each such group of ranks; ranks that
    hold copies compute the same, bit for bit.
    """
    whole: list[torch.Tensor] = []
    shards: dict[tuple[ProcessGroup, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        mine = local(grad)
        norm = torch.linalg.vector_norm(mine, dtype=torch.promote_types(mine.dtype, torch.float32)).to(device)
        groups = _shard_groups(grad)
        (shards.setdefault(groups, []) if groups else whole).append(norm)
    if not shards:
        return torch.linalg.vector_norm(torch.stack(whole)).float() if whole else torch.zeros((), device=device)
    squares = [torch.stack(whole).double().square().sum()] if whole else []
    for groups, norms in shards.items():
        # A square of a float32 norm may pass float32's largest number; in float64 it cannot. MPS has no float64, and no groups
        # either.
        square = torch.stack(norms).double().square().sum()
        for group in groups:
            all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt().float()


def scale_grads(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by `factor` in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)


def _shard_groups(grad: torch.Tensor) -> tuple[ProcessGroup, ...]:
    """Return the groups of ranks that hold a gradient's shards, one a dimension; none if whole."""
    if not isinstance(grad, DTensor):
        return ()
    # A gradient that waits for a sum over ranks has no norm yet; every strategy sums first.
    assert not any(placement.is_partial() for placement in grad.placements), grad.placements
    divided = [dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate()]
    return tuple(grad.device_mesh.get_group(dim) for dim in divided)
