"""Plan of a save: which rank writes which piece of which tensor.

A rank holds one piece of each tensor: all of a plain or replicated one, its shard of a divided one, or nothing of it. Pieces
that several ranks hold are written once, by the one that has the least to write so far. Every rank computes the same plan from
the pieces of all ranks, so it need not be sent.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from forge_dist._errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Safetensors' names of the dtypes that a full state can hold."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Piece(NamedTuple):
    """One rank's part of one tensor. Lists, because JSON makes lists of sizes."""

    dtype: str
    shape: list[int]  # of the whole tensor
    offsets: list[int]  # where the piece begins
    sizes: list[int]  # its own shape


class Chunk(NamedTuple):
    """A stored piece: its offsets in the tensor, its own shape, and the rank whose file has it."""

    offsets: list[int]
    sizes: list[int]
    rank: int


class StoredTensor(NamedTuple):
    """A tensor of a full state: the chunks that fill it without overlapping."""

    dtype: str
    shape: list[int]
    chunks: list[Chunk]


def local_pieces(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Piece], dict[str, torch.Tensor]]:
    """Return name → this rank's piece, and name → the piece's tensor (a view, on its device).

    Raises:
        CheckpointError: a value is no tensor that a file can hold.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{name} is {type(tensor).__name__}; a full state holds tensors (the rest belongs into about)"
            )
        if tensor.dtype not in _NAMES or tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{name} cannot be kept in a full state: {tensor.dtype}, {tensor.layout}, on {tensor.device}; "
                f"known are dense tensors of {', '.join(str(dtype).removeprefix('torch.') for dtype in _NAMES)}"
            )
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise CheckpointError(f"{name} still waits for a sum over ranks ({tensor.placements}) and has no value to keep")
    # torch knows where a rank's shard begins; its planner is the public interface for that.
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    pieces, values = {}, {}
    for item in planner.create_local_plan().items:
        data, value = item.tensor_data, planner.resolve_data(item)
        name = item.index.fqn
        if data is None or not isinstance(value, torch.Tensor) or name in pieces:
            raise CheckpointError(f"{name} is divided in a way that a full state cannot keep")
        shape, offsets, sizes = list(data.size), list(data.chunk.offsets), list(data.chunk.sizes)
        if list(value.shape) != sizes:
            raise CheckpointError(f"{name}: this rank should hold {sizes} of {shape} and holds {list(value.shape)}")
        if 0 in sizes and 0 not in shape:
            continue  # more ranks than rows: this one holds nothing
        pieces[name] = Piece(_NAMES[value.dtype], shape, offsets, sizes)
        values[name] = value.detach()
    return pieces, values


def divide(holdings: Sequence[Mapping[str, Piece]]) -> dict[str, StoredTensor]:
    """Divide the pieces of all ranks into chunks to write: name → StoredTensor, sorted.

    The same on every rank.

    Raises:
        CheckpointError: ranks disagree about a tensor, or do not hold all of it together.
    """
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    stored: dict[str, StoredTensor] = {}
    for rank, pieces in enumerate(holdings):
        for name, piece in pieces.items():
            tensor = stored.setdefault(name, StoredTensor(piece.dtype, piece.shape, []))
            if (tensor.dtype, tensor.shape) != (piece.dtype, piece.shape):
                raise CheckpointError(
                    f"ranks disagree about {name}: rank {rank} has {piece.dtype} {piece.shape}, another {tensor.dtype} "
                    f"{tensor.shape}"
                )
            holders.setdefault((name, tuple(piece.offsets), tuple(piece.sizes)), []).append(rank)
    load = [0] * len(holdings)
    # The largest first, so that the small ones balance the ranks.
    for (name, offsets, sizes), ranks in sorted(holders.items(), key=lambda entry: (-_bytes(stored, entry[0]), entry[0])):
        rank = min(ranks, key=lambda rank: (load[rank], rank))
        load[rank] += _bytes(stored, (name, offsets, sizes))
        stored[name].chunks.append(Chunk(list(offsets), list(sizes), rank))
    for name, tensor in stored.items():
        tensor.chunks.sort()
        held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if held != math.prod(tensor.shape):
            raise CheckpointError(
                f"the ranks hold {held} values of {name} together, and it has {math.prod(tensor.shape)} {tensor.shape}"
            )
    return dict(sorted(stored.items()))


def _bytes(stored: Mapping[str, StoredTensor], key: tuple[str, tuple[int, ...], tuple[int, ...]]) -> int:
    return math.prod(key[2]) * DTYPES[stored[key[0]].dtype].itemsize
