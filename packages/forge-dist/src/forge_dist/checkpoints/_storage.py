"""Full states as storage of torch.distributed.checkpoint, for its `load` and `save`.

torch's own storage pickles what it knows about a checkpoint; here that is the manifest, JSON with a digest of every file.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from forge_dist._errors import CheckpointError
from forge_dist.checkpoints import _folder as folder
from forge_dist.checkpoints._manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    check_hash,
    check_sizes,
    jsonable,
    next_serial,
    read_manifest,
    versions,
)
from forge_dist.checkpoints._plan import DTYPE_NAMES, DTYPES, Chunk, Piece, StoredTensor
from forge_dist.checkpoints._read import Checkpoint, by_file, fill, metadata_of
from forge_dist.checkpoints._write import WrittenFile, file_of, write_file


class ForgeReader(StorageReader):
    """Reader of one full state for `torch.distributed.checkpoint.load`.

    On any number of ranks, divided in any way.

    Names are the state's own ("model/FQN", "optimizer/FQN/KEY"). Every file that a rank reads from is verified by its SHA-256
    before; those of a `Checkpoint` were when it was found. Which of several states is the newest whole one, `Checkpoints` says.

    Args:
        state: the directory of a full state, or a `Checkpoint`.

    Raises:
        CheckpointError: in `load`, within torch's CheckpointException: a file is missing or damaged, a dtype is another one.
    """

    def __init__(self, state: str | os.PathLike[str] | Checkpoint) -> None:
        self._verified = isinstance(state, Checkpoint)
        self._path = state.path if isinstance(state, Checkpoint) else Path(state)
        self._manifest = state.manifest if isinstance(state, Checkpoint) else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another full state where torch is given its directory."""
        if checkpoint_id is not None and Path(checkpoint_id) != self._path:
            self._path, self._manifest, self._verified = Path(checkpoint_id), None, False

    def read_metadata(self) -> Metadata:  # pyrefly: ignore[bad-override]  arguments would ask for metadata of each rank
        """Read the manifest; what is wrong with it `set_up_storage_reader` raises, which comes next."""
        try:
            return metadata_of(self._read_manifest().tensors)
        except CheckpointError:
            # torch 2.11 drops an error of this method, and says that there is no metadata.
            return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Read the manifest on each rank."""
        self._read_manifest()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of this rank's plan."""
        manifest = self._read_manifest()
        for item in plan.items:
            stored, wanted = DTYPES[manifest.tensors[item.storage_index.fqn].dtype], planner.resolve_tensor(item).dtype
            if wanted != stored:
                raise CheckpointError(f"{self._path} holds {item.storage_index.fqn} as {stored}, and {wanted} is asked for")
        for file, items in by_file(manifest, plan.items).items():
            problem = None if self._verified else check_hash(self._path / file, manifest.files[file])
            if problem is not None:
                raise CheckpointError(f"{self._path} is not whole: {problem}")
            fill(self._path / file, items, planner)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is the directory of a full state."""
        return Path(checkpoint_id, MANIFEST).is_file()

    def _read_manifest(self) -> Manifest:
        if self._manifest is None:
            try:
                manifest = read_manifest(self._path, folder.step_of(self._path))
                check_sizes(self._path, manifest.files)
            except (Damaged, OSError) as error:
                raise CheckpointError(f"{self._path} is not whole: {error}") from None
            self._manifest = manifest
        return self._manifest


class ForgeWriter(StorageWriter):
    """Writer of one full state for `torch.distributed.checkpoint.save`.

    It is whole under its name, or not there.

    `Checkpoints.save` writes the same files, plans with less communication, keeps several states and goes on beside the
    training; this is for programs that save through torch.

    Args:
        root: the directory of full states, which all ranks reach; the state becomes `root/step_N`.
        step: N, 0 or more.
        about: JSON beside the tensors; the coordinator's is taken.
        must_match: JSON that a run must have in common to load it; the coordinator's is taken.

    Raises:
        CheckpointError: in `save`, within torch's CheckpointException: a value is no tensor that a file can hold.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        step: int,
        *,
        about: Mapping[str, Any] | None = None,
        must_match: Mapping[str, Any] | None = None,
    ) -> None:
        number, invalid = folder.whole_step(step)
        if number < 0:
            raise ValueError(invalid or f"step must be 0 or more; got {step}")
        self._root, self._step = Path(root), number
        self._texts = jsonable(about or {}, "about"), jsonable(must_match or {}, "must_match")
        self._temporary: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Refuse another place: it follows from `root` and `step`.

        Raises:
            CheckpointError: torch was given one.
        """
        if checkpoint_id is not None and Path(checkpoint_id) != self._root / folder.name_of(self._step):
            raise CheckpointError(
                f"checkpoint_id {checkpoint_id} is not {self._root / folder.name_of(self._step)}, which this writer writes: "
                "leave it out"
            )
        self._temporary = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan, if all of it can be written.

        Raises:
            CheckpointError: a value is no tensor that a file can hold.
        """
        kept: dict[str, WriteItem] = {}
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            if item.type == WriteItemType.BYTE_IO or data is None:
                raise CheckpointError(f"{name} is no tensor; a full state holds tensors (the rest belongs into about)")
            if data.properties.dtype not in DTYPE_NAMES or name in kept:
                raise CheckpointError(f"{name} cannot be kept in a full state: {data.properties.dtype}, or several pieces")
            if 0 not in data.chunk.sizes or 0 in data.size:  # with more ranks than rows this one holds nothing
                kept[name] = item
        return replace(plan, items=list(kept.values()))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the temporary directory, and tell each rank of it and of its own number."""
        self._temporary = folder.begin(self._root, self._step)
        return [replace(plan, storage_data=(str(self._temporary), rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        temporary, rank = plan.storage_data
        pieces = {item.index.fqn: _piece(item) for item in plan.items}
        values: dict[str, Any] = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        if not values:
            return _done([])
        written = write_file(Path(temporary) / file_of(rank), pieces, values, list(values))
        return _done([WriteResult(item.index, values[item.index.fqn].nbytes, (rank, *written)) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, and give the directory its name."""
        assert self._temporary is not None
        written = {result.storage_data[0]: WrittenFile(*result.storage_data[1:]) for each in results for result in each}
        ranks = {(each.index.fqn, tuple(each.index.offset or ())): each.storage_data[0] for rank in results for each in rank}
        target = folder.finish(
            self._temporary,
            self._root,
            Manifest(
                step=self._step,
                serial=next_serial(folder.listed(self._root)),
                world_size=len(results),
                versions=versions(),
                about=json.loads(self._texts[0]),
                must_match=json.loads(self._texts[1]),
                files={file_of(rank): file for rank, file in sorted(written.items())},
                tensors={name: _stored(name, each, ranks) for name, each in sorted(metadata.state_dict_metadata.items())},
            ),
        )
        folder.announce(self._root, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is the name of a full state's directory."""
        return folder.step_of(Path(checkpoint_id)) is not None


def _piece(item: WriteItem) -> Piece:
    data = item.tensor_data
    assert data is not None
    name = DTYPE_NAMES[data.properties.dtype]
    return Piece(name, list(data.size), list(data.chunk.offsets), list(data.chunk.sizes))


def _stored(name: str, tensor: object, ranks: Mapping[tuple[str, tuple[int, ...]], int]) -> StoredTensor:
    assert isinstance(tensor, TensorStorageMetadata)
    chunks = [
        Chunk(list(chunk.offsets), list(chunk.sizes), ranks[name, tuple(chunk.offsets)])
        for chunk in tensor.chunks
        if (name, tuple(chunk.offsets)) in ranks
    ]
    return StoredTensor(DTYPE_NAMES[tensor.properties.dtype], list(tensor.size), sorted(chunks))


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
