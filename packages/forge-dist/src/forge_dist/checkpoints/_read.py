"""Read a full state into tensors in place, on any number of ranks and divided in any way."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from forge_dist._errors import CheckpointError
from forge_dist.checkpoints._manifest import Manifest
from forge_dist.checkpoints._plan import DTYPES, StoredTensor, local_pieces
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
        planner = _planner(into, self.manifest)
        for file, items in by_file(self.manifest, _read_items(into, self.manifest)).items():
            fill(self.path / file, items, planner)

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


def by_file(manifest: Manifest, items: Iterable[ReadItem]) -> dict[str, list[ReadItem]]:
    """Group what is to be read by the files that have it."""
    found: dict[str, list[ReadItem]] = {}
    for item in items:
        chunks, index = manifest.tensors[item.storage_index.fqn].chunks, item.storage_index
        offsets = list(index.offset or ())
        # The planner's hint; without it the chunk is looked for.
        hinted = chunks[index.index] if index.index is not None and index.index < len(chunks) else None
        chunk = hinted if hinted and hinted.offsets == offsets else next(each for each in chunks if each.offsets == offsets)
        found.setdefault(file_of(chunk.rank), []).append(item)
    return found


def fill(path: Path, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    """Copy chunks of one file to where the planner wants them.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for item in items:
                target = planner.resolve_tensor(item).detach()
                target.copy_(_chunk_slice(file, item))
                planner.commit_tensor(item, target)
    except Exception as error:
        # safetensors raises exceptions of its own, without a public base class.
        raise CheckpointError(f"{path} cannot be read, and was whole a moment ago: {error}") from error


def _planner(into: Mapping[str, torch.Tensor], manifest: Manifest) -> DefaultLoadPlanner:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    stored = metadata_of({name: manifest.tensors[name] for name in into})
    planner.set_up_planner(dict(into), stored, is_coordinator=True)
    return planner


def _read_items(into: Mapping[str, torch.Tensor], manifest: Manifest) -> Iterator[ReadItem]:
    """Find what of the files each tensor needs.

    A shard is compared with the chunks of all ranks: once for all tensors that lie alike in the files and on this rank.
    """
    pieces, _ = local_pieces(into)
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, piece in pieces.items():
        where = tuple(piece.offsets), tuple(piece.sizes)
        alike.setdefault((id(manifest.tensors[name].chunks), isinstance(into[name], DTensor), where), []).append(name)
    others = {names[0]: names for names in alike.values()}
    found = _planner({name: into[name] for name in others}, manifest).create_local_plan().items
    for item in found:
        for name in others[item.dest_index.fqn]:
            yield replace(item, dest_index=_renamed(item.dest_index, name), storage_index=_renamed(item.storage_index, name))


def _renamed(index: MetadataIndex, name: str) -> MetadataIndex:
    return MetadataIndex(name, index.offset, index.index)


def _chunk_slice(file: Any, item: ReadItem) -> torch.Tensor:
    name = item.storage_index.fqn
    if not item.lengths:  # a scalar has nothing to slice
        return file.get_tensor(name)
    return file.get_slice(name)[
        tuple(slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True))
    ]


def metadata_of(stored: Mapping[str, StoredTensor]) -> Metadata:
    """Return metadata from which torch's planner finds the chunks that a shard overlaps."""
    chunks: dict[int, list[ChunkStorageMetadata]] = {}
    for tensor in stored.values():
        if id(tensor.chunks) not in chunks:
            chunks[id(tensor.chunks)] = [
                ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
                for chunk in tensor.chunks
            ]
    return Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                size=torch.Size(tensor.shape),
                chunks=chunks[id(tensor.chunks)],
            )
            for name, tensor in stored.items()
        },
        storage_data={MetadataIndex(name): None for name in stored},
    )
