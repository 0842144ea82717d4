"""Pieces of a save: what a rank holds of each tensor, and the chunks that files have of it.

A rank holds one piece of each tensor: all of a plain or replicated one, its shard of a divided one, or nothing of it.
"""

from collections.abc import Mapping
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

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Dtype → safetensors' name of it."""


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
        if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{name} cannot be kept in a full state: {tensor.dtype}, {tensor.layout}, on {tensor.device}; "
                f"known are dense tensors of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPE_NAMES)}"
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
        pieces[name] = Piece(DTYPE_NAMES[value.dtype], shape, offsets, sizes)
        values[name] = value.detach()
    return pieces, values
