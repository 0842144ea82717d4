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
    with torch.no_grad():
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                shard = parameter.to_local()
                if shard.device.type == "cpu" and shard.untyped_storage().nbytes() > shard.nbytes:
                    shard.data = shard.clone()
