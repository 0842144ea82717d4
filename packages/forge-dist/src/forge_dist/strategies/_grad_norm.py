"""Global norm and scaling of gradients, whole or sharded, without gathering them."""

from collections.abc import Iterable, Iterator

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
    found: dict[tuple[ProcessGroup, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            found.setdefault(_shard_groups(parameter.grad), []).append(local(parameter.grad))
    shards = {groups: [norm.to(device) for norm in _norms(grads)] for groups, grads in found.items()}
    whole = shards.pop((), [])
    if not shards:
        return torch.linalg.vector_norm(torch.stack(whole)).float() if whole else torch.zeros((), device=device)
    squares = [_squares(whole)] if whole else []
    for groups, norms in shards.items():
        square = _squares(norms)
        for group in groups:
            all_reduce(square, group=group)
        squares.append(square)
    return _root(torch.stack(squares).sum(0)).float()


_SCALE = 2.0**96
"""Factor by which numbers near the ends of float32's range come to its middle, where their squares are in it too."""


def _squares(norms: list[torch.Tensor]) -> torch.Tensor:
    """Sum the squares of norms three times: as they are, scaled down, scaled up; [3].

    The square of a norm may pass float32's range, or vanish in it. float64 has room, but some chips have none (Intel's Arc),
    and the collectives of others do not add it (Ascend's hccl).
    """
    stacked = torch.stack(norms)
    return torch.stack([(stacked * scale).square().sum() for scale in (1.0, 1 / _SCALE, _SCALE)])


def _root(squares: torch.Tensor) -> torch.Tensor:
    """Take the root of the one of the three sums that is within float32's range."""
    plain, lower, upper = squares.unbind()
    small = torch.where(plain < 1e-30, upper.sqrt() / _SCALE, plain.sqrt())
    return torch.where(plain.isinf(), lower.sqrt() * _SCALE, small)


def scale_grads(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by `factor` in place."""
    for grads in _alike(local(parameter.grad) for parameter in parameters if parameter.grad is not None):
        torch._foreach_mul_(grads, factor)


def _norms(grads: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Compute the norm of each tensor in float32 or wider."""
    for tensors in _alike(grads):
        yield from torch._foreach_norm(tensors, 2, dtype=torch.promote_types(tensors[0].dtype, torch.float32))


def _alike(grads: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Divide tensors into those of one dtype on one device, on which one call works."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.dtype, grad.device), []).append(grad)
    return alike.values()


def _shard_groups(grad: torch.Tensor) -> tuple[ProcessGroup, ...]:
    """Return the groups of ranks that hold a gradient's shards, one a dimension; none if whole."""
    if not isinstance(grad, DTensor):
        return ()
    # A gradient that waits for a sum over ranks has no norm yet; every strategy sums first.
    assert not any(placement.is_partial() for placement in grad.placements), grad.placements
    divided = [dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate()]
    return tuple(grad.device_mesh.get_group(dim) for dim in divided)
