"""Shards in memory of their own, not views of the files that they were read from."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def own_shards(model: nn.Module) -> None:
    """Copy each shard on the host out of the mapped file that it is a view of, one at a time.

    transformers slices a mapped file. On a device the slice is copied; on the host, in the dtype of the file, it stays a view:
    the file is mapped whole for as long as one shard of it lives, every page that is touched counts beside the copies that the
    optimizer makes of it, and what a rank holds cannot be told.
    """
    # By object: a tied weight has several places.
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    for same in places.values():
        parameter = getattr(*same[0])
        if isinstance(parameter, DTensor) and _is_view(parameter.to_local()):
            own = _copied(parameter)
            for module, name in same:
                setattr(module, name, own)
            del own
        del parameter  # or its file would stay mapped while the next one is copied


def _is_view(shard: torch.Tensor) -> bool:
    return shard.device.type == "cpu" and shard.untyped_storage().nbytes() > shard.nbytes


def _copied(parameter: DTensor) -> nn.Parameter:
    copy = DTensor.from_local(
        parameter.to_local().detach().clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(copy, requires_grad=parameter.requires_grad)
