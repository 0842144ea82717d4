"""One save after the copy in memory: each rank's file, then the first rank's commit.

It may run in a thread.
"""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch

from forge_dist._files import room_lacking
from forge_dist.checkpoints import _folder as folder
from forge_dist.checkpoints._manifest import Manifest, versions
from forge_dist.checkpoints._plan import Piece, StoredTensor
from forge_dist.checkpoints._write import WrittenFile, file_of, write_file

if TYPE_CHECKING:
    from forge_dist.ranks._ranks import Ranks

_LISTED = 3


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Job:
    """Arguments of a save, fixed while the training goes on."""

    step: int
    """Optimizer step of the state."""
    serial: int
    """Its number among the full states of the run."""
    temporary: Path
    """Directory that the ranks write into."""
    root: Path
    """Directory of all full states."""
    keep: int
    """Number of full states to keep."""
    broken: tuple[Path, ...]
    """Full states that are not whole, to be deleted."""
    pieces: Mapping[str, Piece]
    """Name → this rank's piece."""
    values: Mapping[str, torch.Tensor]
    """Name → tensor of the pieces that this rank writes."""
    tensors: Mapping[str, StoredTensor]
    """Name → chunks of all ranks; empty but on the first rank."""
    must_match: str
    """JSON as text, because the caller's dictionaries may go on changing."""
    about: str
    """JSON as text."""


@attrs.frozen(kw_only=True)
class Outcome:
    """Result of a save, the same on all ranks: a path or an error."""

    path: Path | None = None
    """The full state, if it was saved."""
    error: str | None = None
    """Why it was not."""
    remark: str | None = None
    """What failed afterwards: the full state itself is whole."""


class Exchange(Protocol):
    """What a save needs of `Ranks`; a background save has a process group of its own."""

    def collect(self, value: object) -> list[Any] | None:
        """Return every rank's value (as JSON), by rank, on the first rank, and None elsewhere."""
        ...

    def broadcast(self, value: object) -> Any:
        """Return the first rank's value (as JSON) on every rank."""
        ...


def save_job(job: Job, ranks: "Ranks", exchange: Exchange) -> Outcome:
    """Write, commit and prune; never raises an Exception."""
    try:
        reports = exchange.collect(_write(job, ranks))
        result = exchange.broadcast(None if reports is None else _commit(job, ranks, reports))
    except Exception as error:  # noqa: BLE001 - a rank that died in the middle of a collective; this one must end in order
        return Outcome(error=f"the ranks lost each other while saving step {job.step}: {error!r}")
    return Outcome(
        path=None if result["path"] is None else Path(result["path"]), error=result["error"], remark=result["remark"]
    )


def _write(job: Job, ranks: "Ranks") -> dict[str, Any]:
    takes = sum(value.nbytes for value in job.values.values())
    try:
        if not job.values:
            return {"file": None, "error": None, "where": "", "bytes": 0}
        name = file_of(ranks.rank)
        file = write_file(job.temporary / name, job.pieces, job.values, list(job.values))
        return {"file": [name, *file], "error": None, "where": "", "bytes": takes}
    except Exception as error:  # noqa: BLE001 - of any kind: the other ranks wait for an answer
        where = f"rank {ranks.rank} on {socket.gethostname()}" if ranks.world_size > 1 else ""
        said = f"{job.root / folder.name_of(job.step)} cannot be written: {error}"
        if where and isinstance(error, FileNotFoundError):
            said += "; is it a place that all hosts share?"
        return {"file": None, "error": said, "where": where, "bytes": takes}


def _commit(job: Job, ranks: "Ranks", reports: list[dict[str, Any]]) -> dict[str, Any]:
    errors = _errors(reports)
    target = None
    try:
        if not errors:
            files = {file[0]: WrittenFile(file[1], file[2]) for report in reports if (file := report["file"]) is not None}
            target = folder.finish(job.temporary, job.root, _manifest(job, ranks, files))
    except Exception as error:  # noqa: BLE001 - as above
        errors.append(f"{job.root / folder.name_of(job.step)} cannot be written: {error}")
    if target is None:
        folder.discard(job.temporary)
        why = "; ".join(errors)
        room = room_lacking(job.root, sum(report["bytes"] for report in reports), why)
        return {"path": None, "error": f"{why}{room}", "remark": None}
    remarks = [folder.announce(job.root, target), folder.prune(job.root, target, job.keep, job.broken)]
    return {"path": str(target), "error": None, "remark": "; ".join(text for text in remarks if text) or None}


def _errors(reports: list[dict[str, Any]]) -> list[str]:
    """Return what went wrong on the ranks: a few texts, each once however many ranks say it."""
    places: dict[str, list[str]] = {}
    for report in reports:
        if report["error"] is not None:
            places.setdefault(report["error"], []).append(report["where"])
    found = []
    for text, (first, *others) in places.items():
        more = f" and {len(others)} other rank{'s' * (len(others) > 1)}" if others else ""
        found.append(f"{text} ({first}{more})" if first else text)
    left = len(found) - _LISTED
    return [*found[:_LISTED], f"and {left} more such error{'s' * (left > 1)}"] if left > 0 else found


def _manifest(job: Job, ranks: "Ranks", files: dict[str, WrittenFile]) -> Manifest:
    return Manifest(
        step=job.step,
        serial=job.serial,
        world_size=ranks.world_size,
        versions=versions(),
        must_match=json.loads(job.must_match),
        about=json.loads(job.about),
        files=dict(sorted(files.items())),
        tensors=dict(job.tensors),
    )
