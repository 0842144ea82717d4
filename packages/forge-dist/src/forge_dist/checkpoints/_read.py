"""Read a full state into tensors in place, on any number of ranks and divided in any way."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from forge_dist._errors import CheckpointError
from forge_dist.checkpoints._manifest import Manifest
from forge_dist.checkpoints._plan import DTYPES, StoredTensor
from forge_dist.checkpoints._write import file_of


@attrs.frozen(repr=False, eq=False)
class Checkpoint:
    """A full state that was found whole."""

    path: Path
    """Its directory."""
    manifest: Manifest
    """Its manifest."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = attrs.field(
        init=False, default=attrs.Factory(lambda self: _shapes(self.manifest), takes_self=True)
    )
    """Name → shape of the whole tensor and dtype."""

    @property
    def step(self) -> int:
        """Optimizer step after which it was saved."""
        return self.manifest.step

    @property
    def about(self) -> dict[str, Any]:
        """The caller's JSON beside the tensors (tuples become lists)."""
        return self.manifest.about

    @property
    def world_size(self) -> int:
        """Number of ranks that saved it."""
        return self.manifest.world_size

    def read(self, into: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors in place: plain ones whole, a DTensor with this rank's shard.

        Not collective: ranks may read different names. Shapes are those of the whole tensors. Nothing is converted: the dtype
        is the one that was saved. One stored chunk at a time is held in memory beside the tensors.

        Raises:
            CheckpointError: a name that was not saved, another shape or dtype, or a file that cannot be read any more.
        """
        self._check(into)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(into), _metadata({name: self.manifest.tensors[name] for name in into}), is_coordinator=True)
        by_file: dict[str, list[ReadItem]] = {}
        for item in planner.create_local_plan().items:
            chunks = self.manifest.tensors[item.storage_index.fqn].chunks
            offset = item.storage_index.offset
            rank = next(chunk.rank for chunk in chunks if chunk.offsets == list(offset or ()))
            by_file.setdefault(file_of(rank), []).append(item)
        for name, items in by_file.items():
            try:
                with safe_open(self.path / name, framework="pt") as file, torch.no_grad():
                    for item in items:
                        planner.resolve_tensor(item).detach().copy_(_chunk_slice(file, item))
            except Exception as error:
                # safetensors raises exceptions of its own, without a public base class.
                raise CheckpointError(f"{self.path / name} cannot be read, and was whole a moment ago: {error}") from error

    def _check(self, into: Mapping[str, torch.Tensor]) -> None:
        unknown = [name for name in into if name not in self.manifest.tensors]
        if unknown:
            raise CheckpointError(f"{self.path} does not hold {', '.join(unknown[:5])}{' ...' if len(unknown) > 5 else ''}")
        for name, tensor in into.items():
            shape, dtype = self.tensors[name]
            if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
                raise CheckpointError(
                    f"{self.path} holds {name} as {dtype} {list(shape)}, and {tensor.dtype} {list(tensor.shape)} is asked for"
                )

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step={self.step}, {len(self.manifest.tensors)} tensors)"


def _shapes(manifest: Manifest) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), DTYPES[tensor.dtype]) for name, tensor in manifest.tensors.items()}


def _chunk_slice(file: Any, item: ReadItem) -> torch.Tensor:
    name = item.storage_index.fqn
    if not item.lengths:  # a scalar has nothing to slice
        return file.get_tensor(name)
    return file.get_slice(name)[
        tuple(slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True))
    ]


def _metadata(stored: Mapping[str, StoredTensor]) -> Metadata:
    """Return metadata from which torch's planner finds the chunks that a shard overlaps."""
    return Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                size=torch.Size(tensor.shape),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
                    for chunk in tensor.chunks
                ],
            )
            for name, tensor in stored.items()
        },
        storage_data={MetadataIndex(name): None for name in stored},
    )
