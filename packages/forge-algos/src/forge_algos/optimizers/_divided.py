"""Parameter that ranks may divide → what of it this process holds."""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from forge_algos._errors import OptimizerError


def rows_here(parameter: torch.Tensor, optimizer: str) -> tuple[int, int]:
    """Return the first row of a parameter that this process holds, and their number.

    Raises:
        OptimizerError: ranks divide its columns.
    """
    first, count = 0, parameter.shape[0] if parameter.dim() else 1
    held: torch.Tensor = parameter.detach()
    if not isinstance(held, DTensor):
        return first, count
    for dim, placement in enumerate(held.placements):
        if type(placement) is Shard and placement.dim == 0:
            size, rank = held.device_mesh.size(dim), held.device_mesh.get_local_rank(dim)
            each = -(-count // size)
            start = min(each * rank, count)
            first, count = first + start, min(each, count - start)
        elif type(placement) is not Replicate:
            raise OptimizerError(
                f"optimizer={optimizer} moves matrices that ranks divide by rows, and here they divide other parts "
                f"({placement}): leave tp_size and ep_size out, or use optimizer=adamw"
            )
    return first, count


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor, in the same memory."""
    held = tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else held
