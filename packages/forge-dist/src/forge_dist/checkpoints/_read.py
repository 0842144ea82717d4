"""A whole full state on disk → tensors in place, on any number of ranks and divided in any way."""

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
from forge_dist.checkpoints._plan import DTYPES, Whole
from forge_dist.checkpoints._write import file_of


@attrs.frozen(repr=False, eq=False)
class Checkpoint:
    """A full state that was found whole."""

    path: Path
    """Its directory."""
    manifest: Manifest
    """All that is known about it."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = attrs.field(
        init=False, default=attrs.Factory(lambda self: _described(self.manifest), takes_self=True)
    )
    """Name → shape of the whole tensor and dtype."""

    @property
    def step(self) -> int:
        """The optimizer step after which it was saved."""
        return self.manifest.step

    @property
    def about(self) -> dict[str, Any]:
        """What was saved beside the tensors, as JSON gives it back (tuples are lists)."""
        return self.manifest.about

    @property
    def world_size(self) -> int:
        """Ranks that saved it."""
        return self.manifest.world_size

    def read(self, into: Mapping[str, torch.Tensor]) -> None:
        """Fill the tensors in place: plain ones whole, a DTensor with this rank's shard. No collective: ranks may ask for different names.

        Shapes are those of the whole tensors. Nothing is converted: the dtype is the one that was saved. One stored piece at a time is
        held in memory beside the tensors.

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
                        planner.resolve_tensor(item).detach().copy_(_part(file, item))
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


def _described(manifest: Manifest) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(whole.shape), DTYPES[whole.dtype]) for name, whole in manifest.tensors.items()}


def _part(file: Any, item: ReadItem) -> torch.Tensor:
    name = item.storage_index.fqn
    if not item.lengths:  # a scalar has nothing to slice
        return file.get_tensor(name)
    return file.get_slice(name)[
        tuple(slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True))
    ]


def _metadata(wholes: Mapping[str, Whole]) -> Metadata:
    """What torch's planner wants to know, to find which stored pieces a shard overlaps with."""
    return Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[whole.dtype]),
                size=torch.Size(whole.shape),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
                    for chunk in whole.chunks
                ],
            )
            for name, whole in wholes.items()
        },
        storage_data={MetadataIndex(name): None for name in wholes},
    )
