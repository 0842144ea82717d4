"""Gather the tensors of a divided model one at a time, each on the ranks that want it."""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Shard

from forge_dist._third_party_logs import quiet_redistribution
from forge_dist.strategies._strategy import Wanted
from forge_dist.strategies._wrappers import resharded

if TYPE_CHECKING:
    from forge_dist.ranks._ranks import Ranks

_FIRST = (0,)


def whole_tensors(
    model: nn.Module, device: torch.device, names: Wanted | None, ranks: "Ranks"
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Iterate as `Strategy.whole`, over a model of plain tensors and DTensors.

    Beyond the shards, one whole tensor is held on the device of a rank that wants it.
    """
    with torch.no_grad():
        # keep_vars: a tied weight is the same object under each of its names.
        state = once(resharded(model).state_dict(keep_vars=True))
        for name, wanted_on in destinations(state, names).items():
            tensor = state[name]
            if isinstance(tensor, DTensor):
                # Shards in the host's memory go to the device first: its backend may not communicate tensors of the host.
                whole = _gathered(tensor.detach().to(device), wanted_on, ranks.rank)
            elif isinstance(tensor, nn.Parameter):
                whole = tensor.detach()
            else:
                whole = first_ranks(tensor, wanted_on, ranks)
            yield name, whole.cpu() if whole is not None and ranks.rank in wanted_on else None
            del whole  # or it would stay while the next one is gathered


def once(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `state` with each tensor under its first name alone."""
    seen: set[int] = set()
    return {name: tensor for name, tensor in state.items() if not (id(tensor) in seen or seen.add(id(tensor)))}


def destinations(state: Mapping[str, torch.Tensor], names: Wanted | None) -> Mapping[str, Collection[int]]:
    """Return name → ranks that get the tensor, in the order in which they come."""
    if isinstance(names, Mapping):
        return names
    return {name: _FIRST for name in state if names is None or name in names}


def first_ranks(tensor: torch.Tensor, wanted_on: Collection[int], ranks: "Ranks") -> torch.Tensor:
    """Return rank 0's buffer where another rank wants it.

    Buffers are not kept the same while training.
    """
    if ranks.world_size == 1 or set(wanted_on) <= {0}:
        return tensor.detach()
    shared = tensor.detach().clone()
    distributed.broadcast(shared, src=0, group=ranks.group)
    return shared


def _gathered(tensor: torch.Tensor, wanted_on: Collection[int], rank: int) -> torch.Tensor | None:
    """Return the whole tensor on the ranks that want it; collective."""
    assert isinstance(tensor, DTensor)
    sharded = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not sharded:
        return tensor.to_local()
    (dim, *others) = sharded
    if others or type(tensor.placements[dim]) is not Shard:
        # Along two dimensions of ranks, or in strips: by all ranks.
        with quiet_redistribution():
            return tensor.full_tensor()
    found = None
    for destination in wanted_on:
        # Of several copies the one that has this rank among its own is gathered.
        members = distributed.get_process_group_ranks(tensor.device_mesh.get_group(dim))
        if destination in members:
            whole = _gathered_on(tensor, dim, members.index(destination))
            found = whole if rank == destination else found
    return found


def _gathered_on(tensor: DTensor, dim: int, destination: int) -> torch.Tensor | None:
    """Return the whole tensor on one rank of the group along one dimension of the mesh."""
    group = tensor.device_mesh.get_group(dim)
    along, parts = tensor.placements[dim].dim, tensor.device_mesh.size(dim)  # pyrefly: ignore[missing-attribute]
    along %= tensor.dim()
    count = tensor.shape[along]
    rows = -(-count // parts)
    mine, local = _padded(tensor, along, rows), distributed.get_rank(group)
    if local != destination:
        distributed.gather(_as_bytes(mine), group=group, group_dst=destination)
        return None
    shape = [*tensor.shape[:along], rows, *tensor.shape[along + 1 :]]
    whole = torch.empty([parts, *shape], dtype=tensor.dtype, device=mine.device)
    distributed.gather(_as_bytes(mine), [_as_bytes(part) for part in whole], group=group, group_dst=destination)
    if along == 0:
        return whole.view(parts * rows, *shape[1:])[:count]
    return torch.cat(list(whole), dim=along).narrow(along, 0, count)


def _padded(tensor: DTensor, along: int, rows: int) -> torch.Tensor:
    """Return this rank's shard, contiguous, with as many rows as the longest."""
    local = tensor.to_local()
    if local.shape[along] == rows:
        return local.contiguous()
    padded = local.new_zeros([*tensor.shape[:along], rows, *tensor.shape[along + 1 :]])
    padded.narrow(along, 0, local.shape[along]).copy_(local)
    return padded


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as bytes: a backend need not know the dtype."""
    return tensor.view(-1).view(torch.uint8)
